"""Calls of `dcp.save` and `dcp.load` that a framework makes, made by us instead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from torch_dcpx._answered_os import path_of
from torch_dcpx.checkpoint.load import load
from torch_dcpx.checkpoint.stateful import LoadPart
from torch_dcpx.keys.wrappers import inside
from torch_dcpx.manager.state import base_of, names_of_base
from torch_dcpx.planners.load_planner import DcpxLoadPlanner
from torch_dcpx.planners.save_planner import DcpxSavePlanner
from torch_dcpx.reader.reader import DcpxReader
from torch_dcpx.storage.names import METADATA_NAME
from torch_dcpx.storage.reader_lock import being_read
from torch_dcpx.writer.writer import DcpxWriter


class Part(NamedTuple):
    """One checkpoint of DCP in a folder."""

    state_dict: dict[str, Any]
    path: Path

    def without(self, names: Collection[str]) -> Part:
        """Returns it without these names of its model's state."""
        if not names:
            return self
        model = self.state_dict["model"].items()
        kept = {name: value for name, value in model if name not in names}
        return self._replace(state_dict={**self.state_dict, "model": kept})


def base_names(
    state: dict[str, Any], model: nn.Module, optimizers: Iterable[Any]
) -> frozenset[str]:
    """Returns names, in a part's state of its model, of what nothing has trained."""
    plain, own = inside(model), state.get("model")
    if not isinstance(own, dict):
        return frozenset()
    return frozenset(names_of_base(plain, base_of(plain, optimizers), own))


@dataclass
class _Model(LoadPart):
    """A model's state, whose base is left as it is where a checkpoint does not hold it."""

    state: dict[str, Any]
    base: Collection[str]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def fitted(self, state: dict[str, Any], metadata: Metadata, key: str) -> dict[str, Any]:
        stored = metadata.state_dict_metadata
        return {n: v for n, v in state.items() if n not in self.base or f"{key}.{n}" in stored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.update(state)


@contextmanager
def noted(target: Path) -> Iterator[list[Part]]:
    """Yields what plain calls of `dcp.save` in this thread would save below a folder within the
    block, and saves nothing of it. Other calls save as they are.
    """
    parts: list[Part] = []

    def note(
        state_dict: dict[str, Any],
        *,
        checkpoint_id: Any = None,
        storage_writer: Any = None,
        **more: Any,
    ) -> Any:
        path = checkpoint_id or getattr(storage_writer, "path", "")
        is_plain = _is_plain(storage_writer, _WRITERS, more)
        if is_plain and Path(path).absolute().is_relative_to(target):
            return parts.append(Part(state_dict, path_of(path)))
        named = {"checkpoint_id": checkpoint_id, "storage_writer": storage_writer}
        return stock(state_dict, **named, **more)

    with _instead_of("save", note) as stock:
        yield parts


@contextmanager
def loads_by_us(
    folder: Path, may_miss: Callable[[Part], Collection[str]] = lambda _: ()
) -> Iterator[None]:
    """Within the block plain calls of `dcp.load` in this thread load from a folder by us, and
    nobody removes it.

    Args:
        may_miss: returns names of its model that a part need not hold. Default: none.
    """

    def load_ours(
        state_dict: dict[str, Any],
        *,
        checkpoint_id: Any = None,
        storage_reader: Any = None,
        **more: Any,
    ) -> Any:
        path = checkpoint_id or getattr(storage_reader, "path", "")
        is_plain = _is_plain(storage_reader, _READERS, more)
        if is_plain and Path(path).absolute().is_relative_to(folder.absolute()):
            if base := may_miss(Part(state_dict, path_of(path))):
                state_dict = {**state_dict, "model": _Model(state_dict["model"], base)}
            return load(state_dict, path, cast="allow")
        named = {"checkpoint_id": checkpoint_id, "storage_reader": storage_reader}
        return stock(state_dict, **named, **more)

    with ExitStack() as stack:
        for part in parts_of(folder):
            stack.enter_context(being_read(part))
        stock = stack.enter_context(_instead_of("load", load_ours))
        yield


_NONE: type = type(None)
_WRITERS = (_NONE, FileSystemWriter, DcpxWriter)
_READERS = (_NONE, FileSystemReader, DcpxReader)
_PLANNERS = (_NONE, DefaultSavePlanner, DefaultLoadPlanner, DcpxSavePlanner, DcpxLoadPlanner)


def _is_plain(storage: object, kinds: tuple[type, ...], more: dict[str, Any]) -> bool:
    """Returns whether ours does all that a call asks for: a user's hook may ask for more."""
    planner = more.get("planner")
    return (
        type(storage) in kinds
        and type(planner) in _PLANNERS
        and not getattr(planner, "allow_partial_load", False)
        and more.get("process_group") is None
        and not more.get("no_dist")
    )


@contextmanager
def _instead_of(name: str, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Lets this thread's calls of `dcp.NAME` call a function; yields the one of before."""
    before, own = getattr(dcp, name), threading.get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        is_own = threading.get_ident() == own
        return (function if is_own else before)(*args, **kwargs)

    setattr(dcp, name, called)
    try:
        yield before
    finally:
        setattr(dcp, name, before)


def parts_of(folder: Path) -> list[Path]:
    """Returns the whole checkpoints of DCP directly in a folder, sorted."""
    return sorted(path.parent for path in folder.glob(f"*/{METADATA_NAME}"))
