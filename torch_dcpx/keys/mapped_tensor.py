"""A tensor put together from boxes of stored ones: split, merged, transposed, never copied.

A `MappedTensor` lists its boxes, each with its place here and in a stored tensor. To read or write
a part, boxes are intersected and the caller's memory is viewed with its dimensions in another
order: readers and writers see plain regions of plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import sub
from typing import NamedTuple

import torch

from torch_dcpx.errors import PlanError

Sizes = tuple[int, ...]


class Piece(NamedTuple):
    """A box of one stored tensor, and where it lies in the mapped one. All in elements."""

    fqn: str  # stored name
    offsets: Sizes  # in the mapped tensor, one a dimension of it
    lengths: Sizes  # likewise
    stored_offsets: Sizes  # in the stored tensor, one a dimension of it
    axes: tuple[int | None, ...]  # of each stored dimension: the mapped one; None: of length 1


class StoredPart(NamedTuple):
    """The part of a wanted box that one stored tensor holds."""

    fqn: str
    offsets: Sizes  # in the stored tensor
    lengths: Sizes  # likewise
    view: torch.Tensor  # the caller's memory for it, in the order of the stored dimensions


class MappedTensor(NamedTuple):
    """A tensor, or an object, by the stored names that make it."""

    sizes: Sizes | None  # None: an object, or a tensor of unknown sizes
    pieces: tuple[Piece, ...]  # of a tensor without elements empty ones: they name its sources

    @classmethod
    def whole(cls, fqn: str, sizes: Sequence[int] | None) -> MappedTensor:
        """Returns a stored tensor as it is."""
        if sizes is None:
            return cls(None, (Piece(fqn, (), (), (), ()),))
        shape, zeros = tuple(sizes), (0,) * len(sizes)
        return cls(shape, (Piece(fqn, zeros, shape, zeros, tuple(range(len(shape)))),))

    @property
    def sources(self) -> tuple[str, ...]:
        """Stored names, each once."""
        return tuple(dict.fromkeys(piece.fqn for piece in self.pieces))

    def is_whole(self, sizes: Sequence[int] | None) -> bool:
        """Returns whether it is one stored tensor of `sizes`, or one object, as it is."""
        return len(self.pieces) == 1 and self == MappedTensor.whole(self.pieces[0].fqn, sizes)

    def transposed(self, first: int, second: int) -> MappedTensor:
        """Returns it with two dimensions swapped."""
        if self.sizes is None:
            return self
        order = list(range(len(self.sizes)))
        a, b = self._dim(first), self._dim(second)
        order[a], order[b] = b, a
        return self._reshaped(lambda values, _: tuple(values[d] for d in order), order.index)

    def narrowed(self, dim: int, begin: int, length: int) -> MappedTensor:
        """Returns the elements [begin, begin + length) along a dimension."""
        if self.sizes is None:
            return self
        at = self._dim(dim)
        begins = tuple(begin if d == at else 0 for d in range(len(self.sizes)))
        box = tuple(length if d == at else size for d, size in enumerate(self.sizes))
        if 0 in box:
            # Nothing is read of it, but its dtype is that of the stored tensors.
            empty = tuple(
                piece._replace(offsets=(0,) * len(box), lengths=tuple(map(min, piece.lengths, box)))
                for piece in self.pieces
            )
            return MappedTensor(box, empty)
        pieces = []
        for piece in self.pieces:
            cut = _cut(piece, begins, box)
            if cut is not None:
                pieces.append(cut._replace(offsets=tuple(map(sub, cut.offsets, begins))))
        return MappedTensor(box, tuple(pieces))

    def selected(self, dim: int, index: int) -> MappedTensor:
        """Returns the slice at `index` along a dimension, which goes."""
        if self.sizes is None:
            return self
        at = self._dim(dim)
        return self.narrowed(dim, index, 1)._reshaped(
            lambda values, _: values[:at] + values[at + 1 :],
            lambda axis: None if axis == at else axis - (axis > at),
        )

    def unsqueezed(self, dim: int) -> MappedTensor:
        """Returns it with one more dimension, of one element."""
        if self.sizes is None:
            return self
        count = len(self.sizes) + 1
        if not -count <= dim < count:
            raise PlanError(f"there is no dimension {dim} to stack along in {count} dimensions")
        at = dim % count
        return self._reshaped(
            lambda values, new: (*values[:at], new, *values[at:]),
            lambda axis: axis + (axis >= at),
        )

    def _reshaped(
        self, change: Callable[[Sizes, int], Sizes], moved: Callable[[int], int | None]
    ) -> MappedTensor:
        """Returns it with other dimensions.

        Args:
            change: takes one value a dimension, and the value of a new dimension; returns one value
                a dimension of the result.
            moved: takes the number of a dimension, returns its new number, or None if it goes.
        """
        pieces = tuple(
            piece._replace(
                offsets=change(piece.offsets, 0),
                lengths=change(piece.lengths, 1),
                axes=tuple(None if axis is None else moved(axis) for axis in piece.axes),
            )
            for piece in self.pieces
        )
        return MappedTensor(change(self.sizes or (), 1), pieces)

    @staticmethod
    def joined(parts: Sequence[MappedTensor], dim: int, fqn: str) -> MappedTensor:
        """Returns parts, one after the other along a dimension, as the tensor `fqn`.

        Raises: PlanError: their other dimensions differ.
        """
        if any(part.sizes is None for part in parts):
            return MappedTensor(None, tuple(piece for part in parts for piece in part.pieces))
        shapes = [part.sizes or () for part in parts]
        at = parts[0]._dim(dim)
        others = {(len(shape), shape[:at], shape[at + 1 :]) for shape in shapes}
        if len(others) > 1:
            raise PlanError(
                f"'{fqn}' cannot be merged along dimension {at}: its parts have sizes {shapes}",
                fqn=fqn,
            )
        pieces, begin = [], 0
        for part, shape in zip(parts, shapes, strict=True):
            for piece in part.pieces:
                offsets = list(piece.offsets)
                offsets[at] += begin
                pieces.append(piece._replace(offsets=tuple(offsets)))
            begin += shape[at]
        return MappedTensor((*shapes[0][:at], begin, *shapes[0][at + 1 :]), tuple(pieces))

    def parts_of(self, offsets: Sequence[int], target: torch.Tensor) -> Iterator[StoredPart]:
        """Yields the stored parts of the box at `offsets`, whose memory is `target`."""
        for piece in self.pieces:
            cut = _cut(piece, offsets, target.shape)
            if cut is None:
                continue
            # What detach() gives would take a scale of its own; of a view, a load takes care.
            view = target.view_as(target) if target.is_quantized else target.detach()
            for dim, (at, begin) in enumerate(zip(cut.offsets, offsets, strict=True)):
                view = view.narrow(dim, at - begin, cut.lengths[dim])
            view = _in_stored_order(view, cut.axes)
            yield StoredPart(cut.fqn, cut.stored_offsets, tuple(view.shape), view)

    def boxes_of(
        self, fqn: str, offsets: Sequence[int], source: torch.Tensor
    ) -> Iterator[tuple[Sizes, torch.Tensor]]:
        """Yields each box of the stored tensor `fqn` that the chunk at `offsets`, whose memory is
        `source`, holds: (offsets in the mapped tensor, view of `source`).
        """
        for piece in self.pieces:
            if piece.fqn != fqn:
                continue
            begins, view = list(piece.offsets), source.detach()
            for dim, axis in enumerate(piece.axes):
                begin, at = piece.stored_offsets[dim], offsets[dim]
                length = 1 if axis is None else piece.lengths[axis]
                first = max(begin, at)
                last = min(begin + length, at + source.shape[dim])
                if last <= first:
                    break
                view = view.narrow(dim, first - at, last - first)
                if axis is not None:
                    begins[axis] += first - begin
            else:
                yield tuple(begins), _in_mapped_order(view, piece)

    def _dim(self, dim: int) -> int:
        count = len(self.sizes or ())
        if not -count <= dim < count:
            raise PlanError(
                f"'{self.pieces[0].fqn}' has {count} dimensions, none is number {dim}",
                fqn=self.pieces[0].fqn,
            )
        return dim % count


def _cut(piece: Piece, begins: Sequence[int], lengths: Sequence[int]) -> Piece | None:
    """Returns the part of a piece in a box of the mapped tensor; None: they do not meet."""
    first = tuple(map(max, piece.offsets, begins))
    boxes = zip(piece.offsets, piece.lengths, begins, lengths, strict=True)
    ends = [min(offset + have, begin + want) for offset, have, begin, want in boxes]
    kept = tuple(map(sub, ends, first))
    if min(kept, default=1) <= 0:
        return None
    stored = tuple(
        offset + (0 if axis is None else first[axis] - piece.offsets[axis])
        for offset, axis in zip(piece.stored_offsets, piece.axes, strict=True)
    )
    return piece._replace(offsets=first, lengths=kept, stored_offsets=stored)


def _in_stored_order(view: torch.Tensor, axes: Sequence[int | None]) -> torch.Tensor:
    """Returns a view of mapped memory with the stored tensor's dimensions."""
    kept = [axis for axis in axes if axis is not None]
    added = [dim for dim in range(view.dim()) if dim not in kept]  # of stacks, of length 1
    view = view.permute([*kept, *added])
    for _ in added:
        view = view.squeeze(-1)
    for dim, axis in enumerate(axes):
        if axis is None:
            view = view.unsqueeze(dim)
    return view


def _in_mapped_order(view: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Returns a view of stored memory with the mapped tensor's dimensions."""
    for dim in reversed(range(len(piece.axes))):
        if piece.axes[dim] is None:
            view = view.squeeze(dim)
    kept = [axis for axis in piece.axes if axis is not None]
    view = view.permute(sorted(range(len(kept)), key=kept.__getitem__))
    for dim in range(len(piece.offsets)):
        if dim not in kept:
            view = view.unsqueeze(dim)
    return view
