"""Writes parts of tensors to the artifact's files: rows for `RangeJob`, within a budget.

The job writes plain host memory in place; other memory is copied to the host piece by piece. A
thread writes one batch of copies while the caller fills the next. Large copies use memory again:
fresh memory costs a page fault every 4 KiB, which is as slow as the disk.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from torch_dcpx._answers import current_timeout, wait_at_most
from torch_dcpx.storage.answered_job import AnsweredRangeJob
from torch_dcpx.tensors import device as device_memory
from torch_dcpx.tensors.memory import byte_strides, is_plain

_MOST_ROWS = 20_000  # that wait for one call
_MOST_PIECE_BYTES = 16 << 20
_SIZES = 32  # of pieces that are lent: a copy wastes an eighth at most


class ExportRow(NamedTuple):
    """One region as `RangeJob.write` takes it. Strides in bytes."""

    file: int
    offset: int  # of the region in the file
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
    """Collects rows and writes them together. Not thread-safe."""

    def __init__(self, job: Any, memory_bytes: int) -> None:
        """Writes through `job`, of `open_job`, holding copies of at most `memory_bytes`."""
        self._job = job
        if isinstance(job, AnsweredRangeJob):
            job.held = self
        self._piece_bytes = max(1, min(_MOST_PIECE_BYTES, memory_bytes // 4))
        self._rows: list[ExportRow] = []
        self._held: list[torch.Tensor] = []  # that the rows are of
        self._copied_bytes = 0

    def add(self, source: torch.Tensor, place: torch.Tensor, target: Target) -> None:
        """Adds memory of the shape of `place`, a view with the payload's strides and dtype."""
        if source.numel() == 0:
            return
        if is_plain(source) and device_memory.is_host(source) and source.dtype == place.dtype:
            self._add_row(source, place, target)
            return
        # Converted before it is copied from a device, and held as both for a moment.
        width = source.element_size() + (place.element_size() if source.dtype != place.dtype else 0)
        for offsets, lengths in slabs(source.shape, width, self._piece_bytes):
            piece = narrowed(source, offsets, lengths).to(place.dtype)
            host = piece.cpu().resolve_conj().resolve_neg().contiguous()
            self.add_copy(host, narrowed(place, offsets, lengths), target)

    def add_copy(self, copy: torch.Tensor, place: torch.Tensor, target: Target) -> None:
        """Adds host memory, and keeps it until it is written."""
        if copy.numel() == 0:
            return
        self._copied_bytes += copy.numel() * copy.element_size()
        self._add_row(copy, place, target)
        if self._copied_bytes >= self._piece_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes all rows."""
        if self._rows:
            self._job.write(self._rows)
        self._rows, self._held, self._copied_bytes = [], [], 0

    def leave(self) -> None:
        """Ends a `flush` on another thread that waits for a silent storage."""
        if isinstance(self._job, AnsweredRangeJob):
            self._job.leave()

    def _add_row(self, source: torch.Tensor, place: torch.Tensor, target: Target) -> None:
        self._held.append(source)
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
        if len(self._rows) >= _MOST_ROWS:
            self.flush()


def narrowed(view: torch.Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    """Returns a box of a view."""
    for dim, (begin, length) in enumerate(zip(offsets, lengths, strict=True)):
        view = view.narrow(dim, begin, length)
    return view


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
    zeros, ones = (0,) * (len(sizes) - dim), (1,) * (dim - 1)
    for outer in _indices(sizes[: dim - 1]):
        for begin in range(0, sizes[dim - 1], step):
            length = min(step, sizes[dim - 1] - begin)
            yield (*outer, begin, *zeros), (*ones, length, *sizes[dim:])


def _indices(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields all indices in C order. `itertools.product` would hold each range as a tuple: all
    memory there is, where a file claims 2**34 rows.
    """
    if not sizes:
        yield ()
        return
    for first in range(sizes[0]):
        for rest in _indices(sizes[1:]):
            yield (first, *rest)


# ---- Copies, written while the next are filled ---------------------------------------------------


class PieceMemory:
    """Lends memory for copies of up to `piece_bytes`, and lends it again when it is back.

    It drops free memory of another size before it takes more, so that it never holds more than it
    has lent at one time.
    """

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}  # by address

    def take(self, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor in C order with any content."""
        nbytes = torch.Size(sizes).numel() * dtype.itemsize
        # Far smaller copies lie in the heap, which wastes nothing on them.
        if not self._piece_bytes // 4 <= nbytes <= self._piece_bytes:
            return torch.empty(sizes, dtype=dtype, device="cpu")
        unit = max(1, self._piece_bytes // _SIZES)
        piece = self._piece(-(-nbytes // unit) * unit)
        self._lent[piece.data_ptr()] = piece
        return piece[:nbytes].view(dtype).view(sizes)

    def give_back(self, copies: Iterable[torch.Tensor]) -> None:
        """Takes memory back, once its bytes are written."""
        for copy in copies:
            piece = self._lent.pop(copy.data_ptr(), None)
            if piece is not None:
                self._free.append(piece)

    def _piece(self, nbytes: int) -> torch.Tensor:
        for number in reversed(range(len(self._free))):
            if self._free[number].numel() == nbytes:
                return self._free.pop(number)
        dropped = 0
        while self._free and dropped < nbytes:
            dropped += self._free.pop(0).numel()
        return self._fresh(nbytes)

    def _fresh(self, nbytes: int) -> torch.Tensor:
        # Page-aligned for direct reads. Once freed it is the system's; the heap would keep it.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=torch.uint8)


class BackgroundRows:
    """Writes rows in a thread while the caller fills the next ones. Not thread-safe.

    After an error it may only be left.
    """

    def __init__(self, rows: ExportRows, piece_bytes: int) -> None:
        self._rows = rows
        self._timeout = current_timeout()
        self._pieces = PieceMemory(piece_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dcpx-export")
        self._under_way: Future[None] | None = None
        self._writing = threading.Lock()  # the thread's, for a batch
        self._is_over = False
        self._written: list[torch.Tensor] = []  # copies of the batch under way
        self._filled: list[tuple[torch.Tensor, torch.Tensor, Target]] = []

    def __enter__(self) -> BackgroundRows:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._is_over = True
        interruption: BaseException | None = None
        while True:
            try:
                if error is not None:
                    self._rows.leave()
                # The thread uses the copies, and the job. Not join(): once interrupted, it takes
                # a thread for dead.
                with self._writing:
                    break
            except BaseException as again:  # noqa: BLE001 - raised below; the caller closes the job
                interruption = again
        self._thread.shutdown(wait=True)
        if interruption is not None and error is None:
            raise interruption

    def memory(self, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns memory for a copy; sends the copies filled before off. Raises: as `finish`."""
        if self._filled:
            self._send()
        return self._pieces.take(sizes, dtype)

    def add_copy(self, copy: torch.Tensor, place: torch.Tensor, target: Target) -> None:
        """Adds memory that the caller took here and filled."""
        if copy.numel():
            self._filled.append((copy, place, target))

    def finish(self) -> None:
        """Writes all that was added. Raises: StorageError."""
        self._send()
        self._wait()

    def _send(self) -> None:
        self._wait()
        filled, self._filled = self._filled, []
        self._written = [copy for copy, _, _ in filled]
        self._under_way = self._thread.submit(self._write, filled)

    def _write(self, filled: list[tuple[torch.Tensor, torch.Tensor, Target]]) -> None:
        with self._writing, wait_at_most(self._timeout):
            if self._is_over:  # it had not begun when the caller was interrupted
                return
            for copy, place, target in filled:
                self._rows.add(copy, place, target)
            self._rows.flush()

    def _wait(self) -> None:
        future, self._under_way = self._under_way, None
        if future is not None:
            future.result()
        self._pieces.give_back(self._written)
        self._written = []
