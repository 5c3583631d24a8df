"""The states that tests/bench/cuda.py moves between device and host: their shapes alone."""

from __future__ import annotations

import random
from typing import NamedTuple

KIB, MIB = 1 << 10, 1 << 20

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
    """What is moved, and the share of one pinned block's rate that it is to reach."""

    title: str
    share: float
    shapes: list[Shape]

    @property
    def nbytes(self) -> int:
        return sum(shape.nbytes for shape in self.shapes)


def cases(size: str) -> dict[str, Case]:
    """Returns the cases by name, the same at each call.

    Args:
        size: of `SIZES`; "full" takes 10 GiB of device and host memory.
    """
    scale = {"full": 1, "quick": 10, "smoke": 100}[size]
    largest = 64 * MIB if size != "smoke" else MIB
    return {
        "mixed": Case("tensors of 64 KiB to 64 MiB", 0.9, _mixed(1000 // scale, largest)),
        "strided": Case(
            "halves of the columns of 2048 x 4096",
            0.7,
            [Shape(2048 // (scale if size == "smoke" else 1), 2048, 4096)] * max(200 // scale, 2),
        ),
        "small": Case("tensors of 64 KiB", 0.7, [Shape(1, 16 * KIB, 16 * KIB)] * (20_000 // scale)),
    }


def _mixed(count: int, largest: int) -> list[Shape]:
    """Returns contiguous tensors whose sizes are uniform in their logarithm, by a fixed seed."""
    source = random.Random(8)
    low, high = 16 * KIB, largest // 4  # elements
    sizes = [int(low * (high / low) ** source.random()) for _ in range(count)]
    return [Shape(1, elements, elements) for elements in sizes]
