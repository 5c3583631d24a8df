"""Uploads: the files of one streamed `WriteJob` while it fills, and objects made piece by piece."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch_dcpx._answers import StorageTimeout, wait_at_most
from torch_dcpx._replacing import taken
from torch_dcpx.errors import OptionError, OutcomeUnknownError, StorageError
from torch_dcpx.storage.object_store import Bucket
from torch_dcpx.storage.object_stream import Stream

if TYPE_CHECKING:
    from torch_dcpx._native import _C
    from torch_dcpx.timelines import Timeline

KIB = 1 << 10
MIB = 1 << 20
_MIN_PART_BYTES = 5 * MIB
_PART_BYTES = 8 * MIB
_MAX_PARTS = 9_000  # S3 takes 10,000; what a planner makes on the fly may be more than it planned
_PARTS_AT_ONCE = 16
_MAX_THREADS = 16  # each uploads a file
_POLL_S = 0.1
_TRIES = 3
_PAUSE_S = 0.5
_TAKEN = (errno.EEXIST, errno.ESTALE)


def upload_slot_bytes(slot_bytes: int, memory_bytes: int) -> int:
    """Returns the size of the slots of an upload: so many that parts leave some free."""
    fitting = memory_bytes // 32 // (64 * KIB) * (64 * KIB)
    return max(min(slot_bytes, fitting), 256 * KIB)


def part_bytes_for(
    file_bytes: int, memory_bytes: int, slot_bytes: int, *, is_slow: bool = False
) -> int:
    """Returns the size of the parts of a file of about so many bytes, uploaded from these slots;
    over a slow link the least that there may be.

    Raises OptionError: parts that the store takes do not fit the memory.
    """
    needed = max(_MIN_PART_BYTES, -(-file_bytes // _MAX_PARTS // MIB) * MIB)
    # As csrc/engine/write_stream.cpp: a part that waits for more bytes leaves a slot free.
    fitting = (memory_bytes // 2 // slot_bytes - 2) * slot_bytes // 2 // MIB * MIB
    if needed > fitting:
        way = " or files_per_rank" if needed > _MIN_PART_BYTES else ""
        raise OptionError(
            f"host_memory_bytes={memory_bytes} is too little for the upload of a file of "
            f"{file_bytes} B in parts of {needed} B: raise it{way}; {5 * needed} B are enough",
            option="host_memory_bytes",
            value=memory_bytes,
        )
    return needed if is_slow else max(needed, min(_PART_BYTES, fitting))


class Uploads:
    """Threads that upload the files of a job, in their order. Not thread-safe."""

    def __init__(
        self,
        bucket: Bucket,
        prefix: str,
        job: _C.WriteJob,
        names: Sequence[str],
        part_bytes: int,
        timeline: Timeline,
        timeout: StorageTimeout,
    ) -> None:
        self.error: Exception | None = None  # the first of any thread
        self._bucket, self._prefix, self._job, self._names = bucket, prefix, job, names
        self._part_bytes = part_bytes
        self._timeline = timeline
        self._timeout = timeout
        self._stop = threading.Event()
        self._guard = threading.Lock()
        self._next = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"dcpx-upload-{number}", daemon=True)
            for number in range(min(len(names), _MAX_THREADS))
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, poll: Callable[[], None]) -> int:
        """Waits until all is uploaded, and returns how long, in ns. Raises the first error of a
        thread, and what `poll` raises.
        """
        began = time.perf_counter_ns()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_POLL_S)
                poll()
        if self.error is not None:
            raise self.error
        return time.perf_counter_ns() - began

    def cancel(self) -> None:
        """Ends all uploads, aborted, and waits for that while the store answers."""
        self._stop.set()
        self._job.stop_uploads()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._guard:
                number, self._next = self._next, self._next + 1
                if number >= len(self._names) or self.error is not None:
                    return
                name = self._names[number]
            try:
                with wait_at_most(self._timeout), self._timeline.phase("upload"):
                    self._upload(number, f"{self._prefix}/{name}")
            except Exception as error:  # noqa: BLE001 - `wait` raises it
                with self._guard:
                    self.error = self.error or error
                self._job.stop_uploads()
                return

    def _upload(self, number: int, key: str) -> None:
        own = self._job.pieces(number)
        pieces, nbytes = _Pieces(own, self._job), own.nbytes()
        for tries_left in reversed(range(_TRIES)):
            try:
                is_one = nbytes is not None and nbytes <= self._part_bytes
                Stream(
                    self._bucket,
                    key,
                    nbytes if is_one and nbytes is not None else self._part_bytes,
                    at_once=0 if is_one else _PARTS_AT_ONCE,
                    on_error=pieces.stop,
                    stop=self._stop,
                ).run(pieces)
                return
            except StorageError as error:
                if pieces.is_ended and _is_there(self._bucket, key, own.nbytes()):
                    return
                # What is taken is gone: only an upload that has not begun may begin again.
                if pieces.is_begun or error.errno != errno.EIO or not tries_left:
                    raise
            time.sleep(_PAUSE_S)


class _Pieces:
    """Knows how far obstore has come."""

    def __init__(self, own: Iterator[Any], job: _C.WriteJob | None = None) -> None:
        self._own, self._job = own, job
        self.is_begun = self.is_ended = self.has_failed = False

    def __iter__(self) -> _Pieces:
        return self

    def __next__(self) -> Any:
        self.is_begun = True
        try:
            return next(self._own)
        except StopIteration:
            self.is_ended = True
            raise
        except BaseException:
            self.has_failed = True
            raise

    def stop(self) -> None:
        """Ends a wait for more, after an error of their upload."""
        if self._job is not None and self.is_begun and not self.is_ended:
            self._job.stop_uploads()


def _is_there(bucket: Bucket, key: str, nbytes: int | None, replaced: str | None = None) -> bool:
    """Whether an upload that was not answered was done: nobody else puts an object of this name.

    Args:
        replaced: the tag of the one that was there before; None: its name is new.
    """
    try:
        found = bucket.head(key)
    except StorageError:
        return False  # the error of the upload says more
    return found is not None and found[0] == nbytes and found[1] != replaced


def _put_new(bucket: Bucket, key: str, pieces: Iterator[Any]) -> None:
    """Puts an object where none is. Raises: StorageError, of `_TAKEN` where there is one."""
    kept = list(pieces)  # of one part
    try:
        bucket.put_if(key, kept, None)
    except StorageError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        bucket.put(key, iter(kept))


def _checked(pieces: Callable[[], Iterator[Any]], bucket: Bucket, key: str) -> Iterator[Any]:
    """Yields all pieces, and looks before the end if by now an object has the name.

    Raises OptionError: one has, which may be of an earlier try that nobody answered.
    """
    yield from pieces()
    if bucket.head(key) is not None:
        raise taken(bucket.url(key))


def upload(
    bucket: Bucket,
    key: str,
    nbytes: int,
    pieces: Callable[[], Iterator[Any]],
    *,
    part_bytes: int,
    at_once: int,
    is_replacing: bool,
    is_new: bool = False,
) -> None:
    """Uploads an object whose bytes can be made again: it begins anew where nobody answers.

    Args:
        pieces: makes all bytes, in their order, in the caller's thread.
        part_bytes: of a part; a smaller object is one PUT.
        at_once: parts under way.
        is_replacing: an object of this name may be there, which the new one replaces.
        is_new: one that is there stays, also one that comes meanwhile; of an object of several
            parts until the last request, for which obstore has no condition.

    Raises:
        OptionError: with `is_new` there is one.
        StorageError: what was there is there still.
        OutcomeUnknownError: the store does not say if it is replaced.
        What `pieces` raises: the upload is aborted.
    """
    is_whole = nbytes <= part_bytes
    unit_bytes, parts = (nbytes, 0) if is_whole else (part_bytes, at_once)
    if is_new and not is_whole:
        pieces = partial(_checked, pieces, bucket, key)
    found = bucket.head(key) if is_replacing else None
    may_be_done = False  # by some try that nobody answered, now or later
    for tries_left in reversed(range(_TRIES)):
        made = _Pieces(pieces())
        try:
            if is_whole and is_new:
                _put_new(bucket, key, made)
            else:
                Stream(bucket, key, unit_bytes, at_once=parts, is_ahead=True).run(made)
            return
        except StorageError as error:
            if made.has_failed:
                raise
            if is_new and error.errno in _TAKEN and not may_be_done:  # no earlier try's
                raise taken(bucket.url(key)) from error
            if made.is_ended and _is_there(bucket, key, nbytes, found and found[1]):
                return
            # ENOENT: an upload that is complete, or aborted, is no more.
            is_again = error.errno in (errno.EIO, errno.ENOENT)
            may_be_done |= made.is_ended and (is_again or error.errno == errno.ETIMEDOUT)
            if is_again and tries_left:
                time.sleep(_PAUSE_S)
            elif may_be_done and is_replacing:
                raise OutcomeUnknownError(
                    f"{error}: its outcome is unknown. What is there is the previous object or "
                    "this one, whole"
                ) from error
            else:
                raise
