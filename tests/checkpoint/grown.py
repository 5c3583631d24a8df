"""States that grow in training, and what a load makes of a fresh one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager


class Holder:
    """A Stateful that gives the dict it holds."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def tensor(value: float, size: int = 2) -> torch.Tensor:
    return torch.full((size,), value)


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal, types, keys and their types included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        kinds = [(t.dtype, t.stride(), t.requires_grad) for t in (one, other)]
        return kinds[0] == kinds[1] and torch.equal(one, other)
    if isinstance(one, dict):
        keys = [(type(key), key) for key in one] == [(type(key), key) for key in other]
        return keys and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def through(door: str, path: Path, saved: Any, fresh: Any, **arguments: Any) -> Any:
    """Returns what a load makes of `fresh`, where `saved` was saved."""
    return all_through(door, path, {"k": saved}, {"k": fresh}, **arguments)["k"]


def all_through(
    door: str, path: Path, saved: dict[str, Any], fresh: dict[str, Any], **arguments: Any
) -> dict[str, Any]:
    """Does so with several of them in one checkpoint."""
    is_held = door in ("stateful", "nested")
    kept, state = (
        {name: Holder({"v": value}) if is_held else value for name, value in given.items()}
        for given in (saved, fresh)
    )
    if door == "stateful":
        dcpx.save(kept, path, no_dist=True)
        dcpx.load(state, path, no_dist=True, **arguments)
    else:
        if door == "absent":
            kept, state = {**kept, "e": 1}, {"e": 0}
        with CheckpointManager(path, no_dist=True, async_save=False) as manager:
            manager.save(1, state=kept)
            manager.resume(state=state, **arguments)
    return {name: state[name].state["v"] if is_held else state[name] for name in fresh}
