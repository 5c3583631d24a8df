"""The states that tests/bench/cuda.py moves between device and host: their shapes alone."""

from __future__ import annotations

import random
from typing import NamedTuple

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SIZES = ("full", "quick", "smoke")


class Shape(NamedTuple):
    """One float32 tensor: `rows` runs of `columns` elements, `stride` elements apart."""

    rows: int
    columns: int
    stride: int

    @property
    def nbytes(self) -> int:
        return 4 * self.rows * self.columns


class Case(NamedTuple):
    """What is moved, and the share of one pinned block's rate that it is to reach; 0: none."""

    title: str
    share: float
    shapes: list[Shape]

    @property
    def nbytes(self) -> int:
        return sum(shape.nbytes for shape in self.shapes)

    @property
    def cost_s(self) -> float:
        """About what it takes to make the state, and to move it both ways by every side."""
        return 1.5 + 3.5 * self.nbytes / GIB + 200e-6 * len(self.shapes)


def cases(size: str) -> dict[str, Case]:
    """Returns the cases by name, most telling first; the same at each call.

    Args:
        size: of `SIZES`; the largest of "full" take 8 GiB of device memory, and six times as much
            of host memory.
    """
    small = {"full": GIB, "quick": 256 * MIB, "smoke": MIB}[size]
    largest = MIB // 4 if size == "smoke" else 64 * MIB
    found = {
        "64mib": _equal(small, largest, 0.9),
        "64kib": _equal(small, 64 * KIB, 0.7),
    }
    many = {"4kib": _equal(small, 4 * KIB, 0.0)}  # has no figure to reach, and takes longest
    if size == "full":
        found |= many
        found["8gib-64mib"] = _equal(8 * GIB, 64 * MIB, 0.9)
        found["8gib-64kib"] = _equal(8 * GIB, 64 * KIB, 0.7)
    found |= {
        "mixed": Case(
            f"tensors of 64 KiB to {_said(largest)}",
            0.9,
            _mixed({"full": 200, "quick": 50, "smoke": 10}[size], largest),
        ),
        "strided": Case(
            "halves of the columns of 2048 x 4096" if size != "smoke" else "halves of columns",
            0.7,
            [Shape(2048 if size != "smoke" else 20, 2048, 4096)]
            * {"full": 64, "quick": 16, "smoke": 2}[size],
        ),
    }
    return found | ({"8gib-4kib": _equal(8 * GIB, 4 * KIB, 0.0)} if size == "full" else many)


def _equal(total: int, nbytes: int, share: float) -> Case:
    title = f"{_said(total)} in tensors of {_said(nbytes)}"
    return Case(title, share, [Shape(1, nbytes // 4, nbytes // 4)] * (total // nbytes))


def _said(nbytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes // KIB} KiB"


def _mixed(count: int, largest: int) -> list[Shape]:
    """Returns contiguous tensors whose sizes are uniform in their logarithm, by a fixed seed."""
    source = random.Random(8)
    low, high = 16 * KIB, largest // 4  # elements
    sizes = [int(low * (high / low) ** source.random()) for _ in range(count)]
    return [Shape(1, elements, elements) for elements in sizes]
