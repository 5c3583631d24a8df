"""The states that benches save and load, in three sizes: names and numbers, without torch."""

from __future__ import annotations

from typing import NamedTuple

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


class MismatchError(AssertionError):
    """What was loaded is not bit for bit what was saved."""


class Size(NamedTuple):
    items: int
    item_bytes: int  # 0: not tensors


class Case(NamedTuple):
    """One state. `rounds` are counted ones; a side in `rounds_of` runs in fewer.

    Without `--ranks` a full run takes a case on `ranks` ranks.
    """

    name: str
    title: str
    full: Size
    quick: Size
    smoke: Size
    rounds: int
    rounds_of: dict[str, int]
    ranks: tuple[int, ...] = (1,)

    def size(self, name: str) -> Size:
        return {"full": self.full, "quick": self.quick, "smoke": self.smoke}[name]

    def rounds_at(self, size: str, ranks: int = 1) -> int:
        full = self.rounds if ranks == 1 else min(self.rounds, 3)
        return {"full": full, "quick": 2, "smoke": 1}[size]


CASES = {
    case.name: case
    for case in (
        Case(
            "64mib", "2 GiB of 64 MiB tensors",
            Size(32, 64 * MIB), Size(2, 64 * MIB), Size(2, MIB), 5, {}, (1, 2),
        ),
        Case(
            "4gib", "one 4 GiB tensor",
            Size(1, 4 * GIB), Size(1, 128 * MIB), Size(1, 4 * MIB), 5, {},
        ),
        Case(
            "64kib", "20,000 x 64 KiB",
            Size(20_000, 64 * KIB), Size(1_000, 64 * KIB), Size(40, 64 * KIB), 5,
            {"stock": 3, "stock2": 1}, (1, 2),
        ),
        Case(
            "4kib", "100,000 x 4 KiB",
            Size(100_000, 4 * KIB), Size(2_000, 4 * KIB), Size(40, 4 * KIB), 3, {"stock": 2},
        ),
        Case(
            "scalars", "20,000 Python scalars",
            Size(20_000, 0), Size(1_000, 0), Size(40, 0), 5, {},
        ),
        Case("tiny", "a tiny state", Size(7, 0), Size(7, 0), Size(7, 0), 12, {}, (1, 2)),
    )
}  # fmt: skip

LOAD_CASES = {
    case.name: case._replace(ranks=(1,))
    for case in (
        CASES["64mib"],
        CASES["64kib"]._replace(rounds_of={"stock": 2}),
        CASES["scalars"],
        CASES["tiny"],
        Case(
            "rows", "1 GiB, 2 -> 3 ranks, row shards",
            Size(4, 256 * MIB), Size(1, 64 * MIB), Size(1, MIB), 5, {"stock": 3},
        ),
        Case(
            "columns", "1 GiB, 2 -> 3 ranks, column shards",
            Size(4, 256 * MIB), Size(1, 64 * MIB), Size(1, MIB), 5, {"stock": 3},
        ),
    )
}  # fmt: skip
ASYNC_CASES = {
    case.name: case
    for case in (
        CASES["64mib"],
        Case(
            "4000", "4,000 x 64 KiB",
            Size(4000, 64 * KIB), Size(1000, 64 * KIB), Size(40, 64 * KIB), 5, {},
        ),
        Case(
            "20000", "20,000 x 64 KiB",
            Size(20_000, 64 * KIB), Size(5000, 64 * KIB), Size(40, 64 * KIB), 5, {},
        ),
        Case(
            "16mib", "256 MiB of 16 MiB tensors",
            Size(16, 16 * MIB), Size(4, 16 * MIB), Size(2, MIB), 5, {},
        ),
    )
}  # fmt: skip
EXPORT_CASES = {name: CASES[name] for name in ("64mib", "64kib")}
EXPORT_SIDES = ("save", "live", "stored", "load")

SHARD_DIMS = {"rows": 0, "columns": 1}

ALL_CASES = {**CASES, **LOAD_CASES}
