"""A load plan whose items stay on their rank.

Stock's global load plan gives each rank its own items back. So where nobody looks at other ranks'
items they are not sent: `dcp.load` pickles a token, and `finish_plan` puts the items back.
"""

from __future__ import annotations

import copy
import dataclasses
import uuid
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from torch_dcpx._hooks import has_stock_hooks, is_own
from torch_dcpx.errors import PlanError
from torch_dcpx.reader.reader import DcpxReader

_HOOKS = ("create_local_plan", "create_global_plan", "finish_plan")
_READER_HOOKS = ("prepare_local_plan", "prepare_global_plan")


class _Away:
    """Stands in for items that stay on their rank; raises when somebody looks at them. An empty
    list would silently plan nothing for the rank.
    """

    def _refuse(self, *_: Any) -> Any:
        raise PlanError(
            "the items of a load plan stay on their rank where its planner and reader have stock's "
            "hooks, but a planner or a reader of another rank looks at them: give all ranks "
            "planners and readers of the same classes"
        )

    __iter__ = __len__ = __bool__ = __getitem__ = __contains__ = __reversed__ = _refuse
    __add__ = __radd__ = __eq__ = __ne__ = _refuse
    __hash__ = None  # type: ignore[assignment]  # as of any list

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and pickles ask for
            raise AttributeError(name)
        return self._refuse()


@dataclasses.dataclass
class KeptPlan(LoadPlan):
    """A plan that leaves its items behind when it is pickled."""

    token: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    is_away: bool = False  # whether it has come out of a pickle

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (_Away(), self.storage_data, self.planner_data, self.token, True)

    def __copy__(self) -> KeptPlan:
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptPlan:
        parts = {name: copy.deepcopy(value, memo) for name, value in vars(self).items()}
        return type(self)(**parts)

    def whole(self, kept: KeptPlan | None) -> LoadPlan:
        """Returns the plan with the items of `kept`. PlanError: this is another rank's plan."""
        if not self.is_away:
            kept = self
        if kept is None or kept.token != self.token:
            raise PlanError(
                "the coordinator gave this rank another plan than it had sent; each rank reads by "
                "its own"
            )
        return LoadPlan(kept.items, self.storage_data, self.planner_data)


def is_kept(planner: LoadPlanner, reader: object) -> bool:
    """Returns whether there are other ranks, at whose items neither planner nor reader looks."""
    return (
        isinstance(reader, FileSystemReader)
        and dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size() > 1
        and has_stock_hooks(planner, _HOOKS)
        and all(_leaves_items(reader, hook) for hook in _READER_HOOKS)
    )


def _leaves_items(reader: FileSystemReader, hook: str) -> bool:
    is_stock = is_own(reader, FileSystemReader, hook)
    return is_own(reader, DcpxReader, hook) or (
        is_stock and getattr(FileSystemReader, hook).__module__ == FileSystemReader.__module__
    )
