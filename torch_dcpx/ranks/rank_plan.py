"""RankPlan: what a rank of `DcpxSavePlanner` tells the coordinator, and what it gets back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torch_dcpx.ranks.plan_wire import WirePlan, packed_fields, travelling

_DIGEST_BYTES = 8


@packed_fields
@dataclasses.dataclass(frozen=True, eq=False)
class RankPlan(WirePlan):
    """What a rank tells the coordinator beside its items."""

    can_split: bool = False  # whether this rank can write rows of its tensors
    whole_names: frozenset[str] = frozenset()  # of tensors of which it cannot
    replicas: bytes = b""  # `Replicas.key`: of these alone, once a writer says that it keeps rows
    names_hash: int = 0  # of the items that `replicas` is of; of this process alone
    digests: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # of Python values
    is_shared: bool = False  # whether nobody changes a chunk or properties of one item alone
    has_paths: bool = False  # whether this rank takes `planner_data` from its planner
    sent_paths: Any = None  # the coordinator's: what the rank has, so is not sent back
    cut_names: frozenset[str] | None = None  # of tensors of which it writes rows, once it knows

    def planned(self, items: list[Any]) -> RankPlan:
        """Returns the coordinator's answer: other items, without what only it is told."""
        return dataclasses.replace(
            self,
            items=items,
            whole_names=frozenset(),
            replicas=b"",
            digests={},
            sent_paths=self.planner_data if self.has_paths else None,
        )

    def _beside(self) -> tuple[list[str], dict[str, Any]]:
        names, beside = super()._beside()
        if beside.pop("sent_paths", None) is self.planner_data:
            beside.pop("planner_data", None)
        beside.pop("digests", None)
        beside.pop("names_hash", None)
        whole, digests = list(self.whole_names), dict(self.digests)
        if set(map(type, (*whole, *digests))) <= {str} and all(map(_is_digest, digests.values())):
            beside.pop("whole_names", None)
            names = [*whole, *digests]
            beside["sums"] = b"".join(digests.values())
        else:
            beside["digests"] = digests
        return names, beside

    @classmethod
    def _whole(cls, items: list[Any], names: list[str], beside: dict[str, Any]) -> RankPlan:
        sums = beside.pop("sums", None)
        if sums is not None:
            first = len(names) - len(sums) // _DIGEST_BYTES
            parts = [sums[at : at + _DIGEST_BYTES] for at in range(0, len(sums), _DIGEST_BYTES)]
            beside["whole_names"] = frozenset(names[:first])
            beside["digests"] = dict(zip(names[first:], parts, strict=True))
        return cls(items, **beside)


def _is_digest(digest: object) -> bool:
    return type(digest) is bytes and len(digest) == _DIGEST_BYTES


def offered(plan: SavePlan) -> SavePlan:
    """Returns a rank's plan as a writer sends it that keeps several chunks of a name.

    One to which somebody has added items, or taken or renamed some, is written whole: what the
    planner said of its names is not of these, and others rely on it.
    """
    if isinstance(plan, RankPlan) and plan.replicas and plan.names_hash == names_hash(plan.items):
        return dataclasses.replace(plan, can_split=True, names_hash=0)
    return travelling(plan)


def names_hash(items: Iterable[WriteItem]) -> int:
    """Returns the hash of the names of items, in no order: equal in this process alone."""
    return hash(frozenset(item.index.fqn for item in items))
