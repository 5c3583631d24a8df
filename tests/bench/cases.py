"""The states that benches save and load, in three sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
COLUMNS = 64  # tensors are float32 [rows, 64]


class Size(NamedTuple):
    items: int
    item_bytes: int  # 0: not tensors


class Case(NamedTuple):
    """One state. `rounds` are counted ones; a side in `rounds_of` runs in fewer."""

    name: str
    title: str
    full: Size
    quick: Size
    smoke: Size
    rounds: int
    rounds_of: dict[str, int]

    def size(self, name: str) -> Size:
        return {"full": self.full, "quick": self.quick, "smoke": self.smoke}[name]

    def rounds_at(self, size: str) -> int:
        return {"full": self.rounds, "quick": 2, "smoke": 1}[size]


CASES = {
    case.name: case
    for case in (
        Case(
            "64mib", "2 GiB of 64 MiB tensors",
            Size(32, 64 * MIB), Size(2, 64 * MIB), Size(2, MIB), 5, {},
        ),
        Case(
            "4gib", "one 4 GiB tensor",
            Size(1, 4 * GIB), Size(1, 128 * MIB), Size(1, 4 * MIB), 5, {},
        ),
        Case(
            "64kib", "20,000 x 64 KiB",
            Size(20_000, 64 * KIB), Size(1_000, 64 * KIB), Size(40, 64 * KIB), 5,
            {"stock": 3, "stock2": 3},
        ),
        Case(
            "4kib", "100,000 x 4 KiB",
            Size(100_000, 4 * KIB), Size(2_000, 4 * KIB), Size(40, 4 * KIB), 3,
            {"stock": 2, "stock2": 1},
        ),
        Case(
            "scalars", "20,000 Python scalars",
            Size(20_000, 0), Size(1_000, 0), Size(40, 0), 5, {},
        ),
        Case("tiny", "a tiny state", Size(7, 0), Size(7, 0), Size(7, 0), 20, {}),
    )
}  # fmt: skip


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


class MismatchError(AssertionError):
    """What was loaded is not bit for bit what was saved."""


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
