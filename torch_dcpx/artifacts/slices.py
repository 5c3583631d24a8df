"""An index of a stored tensor, as `t[3:7, ..., 0]`, and the boxes to read for it.

An index takes of each dimension `begin`, `begin + step`, and so on. Without steps that is one box.
With steps, rows with a block or more between them are boxes of their own, so that what lies between
is not read; a box with shorter gaps is read with them, and they are left out in memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torch_dcpx.artifacts.rows import narrowed, slabs
from torch_dcpx.errors import UnsupportedError

_BLOCK_BYTES = 64 << 10  # a shorter gap shares the blocks of the rows beside it


class Cut(NamedTuple):
    """Holds what an index takes of each dimension, in elements."""

    begins: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    dropped: tuple[int, ...]  # dimensions that the result lacks: those with an int

    def result(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns a view of `memory`, of sizes `counts`, as the index shapes it."""
        return memory[
            tuple(0 if dim in self.dropped else slice(None) for dim in range(memory.dim()))
        ]


class Box(NamedTuple):
    """A region to read, and where it belongs."""

    offsets: tuple[int, ...]  # in the stored tensor
    lengths: tuple[int, ...]  # likewise, with gaps
    place: torch.Tensor  # contiguous, a part of the result's memory
    steps: tuple[int, ...]  # from one element of `place` to the next one in the box

    @property
    def has_gaps(self) -> bool:
        """Whether the box is larger than its place."""
        return self.lengths != tuple(self.place.shape)


def cut_of(index: Any, sizes: Sequence[int], name: str) -> Cut:
    """Returns what `index` takes of the tensor `name` of `sizes`.

    Raises:
        UnsupportedError: a kind of index that is not taken.
        IndexError: it lies outside of the tensor, or names more dimensions than there are.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    dots = [number for number, part in enumerate(parts) if part is Ellipsis]
    given = len(parts) - len(dots)
    if len(dots) > 1 or given > len(sizes):
        what = f"{len(dots)} ellipses" if len(dots) > 1 else f"{given} indices"
        raise IndexError(f"{what} for '{name}', which has {len(sizes)} dimensions: {index!r}")
    at = dots[0] if dots else len(parts)
    parts[at : at + 1] = [slice(None)] * (len(sizes) - given)
    rows = [_of_one(part, size, name) for part, size in zip(parts, sizes, strict=True)]
    dropped = tuple(dim for dim, part in enumerate(parts) if not isinstance(part, slice))
    begins, counts, steps = zip(*rows, strict=True) if rows else ((), (), ())
    return Cut(begins, counts, steps, dropped)


def _of_one(part: Any, size: int, name: str) -> tuple[int, int, int]:
    """Returns begin, count and step in one dimension."""
    if isinstance(part, slice):
        try:
            begin, end, step = part.indices(size)
        except (TypeError, ValueError) as error:
            raise UnsupportedError(f"slice '{name}' by {part}: {error}") from error
        if step < 0:
            raise UnsupportedError(
                f"slice '{name}' by {part}: steps below 0 are not taken, as by torch; "
                "flip what is read: torch.flip"
            )
        return begin, len(range(begin, end, step)), step
    is_mask = isinstance(part, bool) or getattr(part, "dtype", None) in (torch.bool, bool)
    try:
        if part is None or is_mask or getattr(part, "ndim", None):
            raise TypeError
        at = operator.index(part)
    except TypeError:
        kind = "None (a new dimension)" if part is None else type(part).__name__
        raise UnsupportedError(
            f"index '{name}' by {kind}: integers, slices and ... are taken; read rows by these, "
            "and index the tensor that they give"
        ) from None
    if not -size <= at < size:
        raise IndexError(f"index {at} is outside of a dimension of {size} of '{name}'")
    return at % size, 1, 1


def boxes_of(cut: Cut, sizes: Sequence[int], memory: torch.Tensor, max_bytes: int) -> Iterator[Box]:
    """Yields the boxes that fill `memory`, of sizes `cut.counts`, from a tensor of `sizes`.

    Args:
        max_bytes: of a box with gaps, unless one element's is larger.
    """
    steps = tuple(
        step if count > 1 else 1 for step, count in zip(cut.steps, cut.counts, strict=True)
    )
    part_bytes = max(1, memory.nbytes)
    stepped = [dim for dim, step in enumerate(steps) if step > 1]
    if stepped:
        part_bytes = max_bytes // math.prod(steps)
        for dim in stepped:
            gap = (steps[dim] - 1) * math.prod(sizes[dim + 1 :]) * memory.itemsize
            if gap >= _BLOCK_BYTES:
                row_bytes = math.prod(cut.counts[dim + 1 :]) * memory.itemsize
                part_bytes = min(part_bytes, row_bytes)
    for at, lengths in slabs(cut.counts, memory.itemsize, part_bytes):
        rows_of = zip(cut.begins, at, steps, strict=True)
        offsets = tuple(begin + place * step for begin, place, step in rows_of)
        spans = tuple((length - 1) * step + 1 for length, step in zip(lengths, steps, strict=True))
        yield Box(offsets, spans, narrowed(memory, at, lengths), steps)
