"""Copies on their way into an export's files: one batch is written while the next one is filled.

The copies of large pieces lie in memory that is used again: fresh memory costs a page fault every
4 KiB, which is as slow as the disk.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from torch_dcpx.artifacts.rows import ExportRows, Target

_SIZES = 32  # of pieces: what a copy wastes is an eighth at most


class PieceMemory:
    """Memory for copies of up to `piece_bytes`, each used again when it was given back.

    What is free and of another size goes before more is taken: no more is ever held than was lent
    at one time.
    """

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}  # by address

    def take(self, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor in C order with any content."""
        nbytes = torch.Size(sizes).numel() * dtype.itemsize
        # For what is far smaller than a piece, the heap does as well and wastes nothing.
        if not self._piece_bytes // 4 <= nbytes <= self._piece_bytes:
            return torch.empty(sizes, dtype=dtype)
        unit = max(1, self._piece_bytes // _SIZES)
        piece = self._piece(-(-nbytes // unit) * unit)
        self._lent[piece.data_ptr()] = piece
        return piece[:nbytes].view(dtype).view(sizes)

    def give_back(self, copies: Iterable[torch.Tensor]) -> None:
        """Takes memory back that nobody uses any more."""
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
        # Page-aligned, as direct reads need it. When it goes the system has it back; the heap would
        # keep it.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=torch.uint8)


class BackgroundRows:
    """Rows that a thread writes while the caller fills the next ones. Not thread-safe.

    After an error it may only be left.
    """

    def __init__(self, rows: ExportRows, piece_bytes: int) -> None:
        """Writes through `rows`; large copies are of at most `piece_bytes`."""
        self._rows = rows
        self._pieces = PieceMemory(piece_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dcpx-export")
        self._under_way: Future[None] | None = None
        self._writing = threading.Lock()  # the thread's, for a batch
        self._is_over = False
        self._written: list[torch.Tensor] = []  # copies of what is under way
        self._filled: list[tuple[torch.Tensor, torch.Tensor, Target]] = []

    def __enter__(self) -> BackgroundRows:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over = True
        interruption: BaseException | None = None
        while True:
            try:
                # It uses the copies, and the job. Not by join(): once interrupted, that takes a
                # thread for dead.
                with self._writing:
                    break
            except BaseException as again:  # noqa: BLE001 - raised below; the caller closes the job
                interruption = again
        self._thread.shutdown(wait=True)
        if interruption is not None and error is None:
            raise interruption

    def memory(self, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns memory for a copy. What was filled before goes on its way: the next batch begins.

        Raises: as `finish`.
        """
        if self._filled:
            self._send()
        return self._pieces.take(sizes, dtype)

    def add_copy(self, copy: torch.Tensor, place: torch.Tensor, target: Target) -> None:
        """Adds memory that was taken here and is filled."""
        if copy.numel():
            self._filled.append((copy, place, target))

    def finish(self) -> None:
        """Returns when everything is written. Raises: StorageError."""
        self._send()
        self._wait()

    def _send(self) -> None:
        self._wait()
        filled, self._filled = self._filled, []
        self._written = [copy for copy, _, _ in filled]
        self._under_way = self._thread.submit(self._write, filled)

    def _write(self, filled: list[tuple[torch.Tensor, torch.Tensor, Target]]) -> None:
        with self._writing:
            if self._is_over:  # it had not begun when the caller was interrupted
                return
            for copy, place, target in filled:
                self._rows.add(copy, place, target, "")
            self._rows.flush()

    def _wait(self) -> None:
        future, self._under_way = self._under_way, None
        if future is not None:
            future.result()
        self._pieces.give_back(self._written)
        self._written = []
