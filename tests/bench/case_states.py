"""The tensors and values of a case, and whether what was loaded is what was saved."""

from __future__ import annotations

from typing import Any

import torch
from cases import Case, MismatchError

COLUMNS = 64  # tensors are float32 [rows, 64]


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
    state = {f"rank{rank}.layer.{i}.weight": _empty_tensor(item_bytes) for i in range(items)}
    for tensor in state.values():
        # Any bits, NaNs included: twice as fast as floats, and a disk cannot compress them.
        tensor.view(torch.int64).random_(generator=generator)
    return state


def _empty_tensor(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes // 4 // COLUMNS, COLUMNS)


def payload_bytes(state: dict[str, Any]) -> int:
    """Returns the bytes of all tensors."""
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))


def blank_like(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state's shapes with other contents, to be loaded into."""
    target: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            target[key] = torch.empty_like(value)
            target[key].view(torch.uint8).fill_(0xA5)
        else:
            target[key] = type(value)()
    return target


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
