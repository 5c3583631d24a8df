"""The tensors and values of a case, and whether what was loaded is what was saved."""

from __future__ import annotations

from typing import Any

import torch
from cases import SHARD_DIMS, Case, MismatchError

COLUMNS = 64  # tensors are float32 [rows, 64]
SHARD_COLUMNS = 8192  # where columns are cut: a third of half a row is more than 4 KiB


def make_state(case: Case, size: str, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Returns this rank's part of the state, a flat dict.

    With several ranks each holds its share of the tensors, under names of its own. Python scalars
    are the same on every rank: of those DCP writes only the coordinator's.
    """
    items, item_bytes = case.size(size)
    generator = torch.Generator().manual_seed(rank)
    if case.name == "scalars":
        return {f"scalar.{i}": i if i % 2 else i / 7 for i in range(items)}
    if case.name == "tiny":
        weights = {
            f"rank{rank}.layer.{i}": torch.randn(16 << i, COLUMNS, generator=generator)
            for i in range(4)
        }
        return {**weights, "step": 1234, "loss": 0.1, "name": "tiny"}
    if items >= ranks:
        items //= ranks
    else:
        item_bytes //= ranks
    columns = SHARD_COLUMNS if case.name in SHARD_DIMS else COLUMNS
    state = {
        f"rank{rank}.layer.{i}.weight": torch.empty(item_bytes // 4 // columns, columns)
        for i in range(items)
    }
    for tensor in state.values():
        # Any bits, NaNs included: twice as fast as floats, and a disk cannot compress them.
        tensor.view(torch.int64).random_(generator=generator)
    return state


def payload_bytes(state: dict[str, Any]) -> int:
    """Returns the bytes of all tensors."""
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))


def blank_like(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state's shapes with other contents, to be loaded into."""
    target = {
        key: torch.empty_like(value) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }
    make_blank(target)
    return target


def make_blank(state: dict[str, Any]) -> None:
    """Overwrites what the state holds, in place."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            value.view(torch.uint8).fill_(0xA5)
        else:
            state[key] = type(value)()


def check_same(state: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Compares bit for bit, types included.

    Raises:
        MismatchError: names the first key that differs.
    """
    if state.keys() != loaded.keys():
        raise MismatchError(f"keys differ: {sorted(state.keys() ^ loaded.keys())[:3]}")
    for key, value in state.items():
        found = loaded[key]
        if isinstance(value, torch.Tensor):
            is_same = value.dtype == found.dtype and value.shape == found.shape
            is_same = is_same and torch.equal(value.view(torch.int32), found.view(torch.int32))
        else:
            is_same = type(value) is type(found) and repr(value) == repr(found)
        if not is_same:
            raise MismatchError(f"{key!r} was loaded with other bits than were saved")
