"""Parts of tensors to places in the artifact's files: rows for `RangeJob`, within a budget.

Host memory that strides describe is written from where it lies. What is on a device, or is no plain
memory, is copied to the host piece by piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from torch_dcpx._native import _C
from torch_dcpx.tensors import device as device_memory
from torch_dcpx.tensors.memory import byte_strides, check_storage, is_plain

_MOST_ROWS = 20_000  # that wait for one call
_MOST_PIECE_BYTES = 16 << 20


class ExportRow(NamedTuple):
    """One region as `RangeJob.write` takes it. Strides in bytes."""

    file: int
    offset: int  # byte of the file at which the region begins
    elem_bytes: int
    lengths: tuple[int, ...]
    src_strides: tuple[int, ...]
    dst_strides: tuple[int, ...]  # in the file
    source: int  # address
    source_bytes: int  # from that address on
    tag: int  # number of the payload, for its checksum; -1: none
    payload_end: int  # byte of the file behind the payload


class Target(NamedTuple):
    """A payload that rows are written to."""

    file: int  # number in the job
    offset: int
    nbytes: int
    tag: int


class ExportRows:
    """Rows on their way into files. Not thread-safe."""

    def __init__(self, job: _C.RangeJob, memory_bytes: int) -> None:
        """Writes through `job`, holding copies of at most `memory_bytes`."""
        self._job = job
        self._piece_bytes = max(1, min(_MOST_PIECE_BYTES, memory_bytes // 4))
        self._rows: list[ExportRow] = []
        self._copies: list[torch.Tensor] = []
        self._copied_bytes = 0
        self.nbytes = 0

    @property
    def piece_bytes(self) -> int:
        """Returns how large a copy may be."""
        return self._piece_bytes

    def add(self, source: torch.Tensor, place: torch.Tensor, target: Target, fqn: str) -> None:
        """Adds memory of the shape of `place`, a view of the payload's strides."""
        if source.numel() == 0:
            return
        if is_plain(source) and device_memory.is_host(source):
            check_storage(source, fqn)
            self._add_row(source, place, target)
            return
        for offsets, lengths in slabs(source.shape, source.element_size(), self._piece_bytes):
            piece, there = source, place
            for dim, (begin, length) in enumerate(zip(offsets, lengths, strict=True)):
                piece = piece.narrow(dim, begin, length)
                there = there.narrow(dim, begin, length)
            host = piece.cpu().resolve_conj().resolve_neg().contiguous()
            self.add_copy(host, there, target)

    def add_copy(self, copy: torch.Tensor, place: torch.Tensor, target: Target) -> None:
        """Adds host memory that was made for this, and is let go when it is written."""
        if copy.numel() == 0:
            return
        self._copies.append(copy)
        self._copied_bytes += copy.numel() * copy.element_size()
        self._add_row(copy, place, target)
        if self._copied_bytes >= self._piece_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes what was added."""
        if self._rows:
            self._job.write(self._rows)
        self._rows, self._copies, self._copied_bytes = [], [], 0

    def _add_row(self, source: torch.Tensor, place: torch.Tensor, target: Target) -> None:
        width = source.element_size()
        lengths = tuple(source.shape)
        strides = byte_strides(lengths, source.stride(), width)
        reach = sum((n - 1) * stride for n, stride in zip(lengths, strides, strict=True))
        self._rows.append(
            ExportRow(
                target.file,
                target.offset + int(place.storage_offset()) * width,
                width,
                lengths,
                strides,
                byte_strides(lengths, place.stride(), width),
                source.data_ptr(),
                reach + width,
                target.tag,
                target.offset + target.nbytes,
            )
        )
        self.nbytes += source.numel() * width
        if len(self._rows) >= _MOST_ROWS:
            self.flush()


def slabs(
    sizes: Sequence[int], itemsize: int, max_bytes: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields (offsets, lengths) of boxes of at most `max_bytes`, or one element, in C order."""
    if 0 in sizes:
        return
    inner, dim = itemsize, len(sizes)
    while dim > 0 and inner * sizes[dim - 1] <= max_bytes:
        dim -= 1
        inner *= sizes[dim]
    if dim == 0:
        yield (0,) * len(sizes), tuple(sizes)
        return
    step = max(1, max_bytes // inner)
    rest = len(sizes) - dim
    for outer in itertools.product(*map(range, sizes[: dim - 1])):
        for begin in range(0, sizes[dim - 1], step):
            length = min(step, sizes[dim - 1] - begin)
            yield (
                (*outer, begin, *(0,) * rest),
                (*(1,) * len(outer), length, *sizes[dim:]),
            )


def share_of(begin: int, total: int, ranks: int) -> int:
    """Returns which rank reads and writes what begins at this byte of all."""
    return min(ranks - 1, begin * ranks // max(1, total))


def volume(lengths: Sequence[int]) -> int:
    """Returns how many elements a box has."""
    return math.prod(lengths)
