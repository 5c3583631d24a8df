"""Jobs of C++ whose calls end at the bound of their operation, or at a signal, and stay behind.

A job reads and writes by threads of its own, which wait in the kernel where a server does not
answer. So the call is made on a thread that can be left behind. What it uses lives as long as that:

1. The caller leaves. Of a read, no byte comes to the caller's memory any more from then on.
2. The job's threads end when their system calls return, and what is left of its files goes.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch_dcpx._answers import answered
from torch_dcpx._native import _C
from torch_dcpx.errors import StorageError
from torch_dcpx.storage.directory import Directory, remove_leftover
from torch_dcpx.storage.names import METADATA_NAME, data_file_parts, is_metadata_name


class _AnsweredJob:
    """Stands for a job. As thread-safe as that."""

    def __init__(self, job: Any, path: Path) -> None:
        self._job, self._path = job, path
        self._lock = threading.Lock()  # of whether the caller tidies up, or the call itself
        self._is_running = self._has_left = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def _run(self, verb: str, call: Callable[[], Any], name: str = "") -> Any:
        """Returns what `call` returns. The bound is on how long nothing moves."""

        def run() -> Any:
            try:
                return call()
            finally:
                with self._lock:
                    self._is_running = self._has_left  # and stays so: the caller does nothing
                if self._is_running:
                    self._end()

        state, since = self._moved(), time.monotonic()

        def moved_at() -> float:
            nonlocal state, since
            if self._has_left:
                raise self._left_error()
            found = self._moved()
            if found != state:
                state, since = found, time.monotonic()
            return since

        self._is_running = True
        path = str(self._path / name)
        try:
            return answered(run, f"{verb} '{path}'", path, moved_at=moved_at)
        except BaseException:
            with self._lock:
                self._has_left = True
            if self._is_running:
                self._leave()
            raise

    def _telling(self, progress: Callable[..., object] | None) -> Callable[..., None]:
        """Returns a hook that ends the call once its caller has left. It calls `progress`."""

        def tell(*counts: int) -> None:
            if self._has_left:
                raise self._left_error()
            if progress is not None:
                progress(*counts)

        return tell

    def _left_error(self) -> StorageError:
        return StorageError("left behind", errno=errno.ECANCELED, path=str(self._path))

    def _close(self, close: Callable[[], object]) -> None:
        """Closes the job's files by a call that never raises. Without an answer a thread goes on:
        who closes has more to tidy up.
        """
        with suppress(StorageError):
            path = str(self._path)
            answered(close, f"close files in '{path}'", path, is_proof=False)

    def _moved(self) -> object:
        """Returns what differs once something has moved."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Is called as the caller leaves."""

    def _end(self) -> None:
        """Is called when a call has ended whose caller has left."""


class AnsweredWriteJob(_AnsweredJob):
    """Stands for a `WriteJob` of a directory."""

    def write(self, *args: Any, progress: Callable[[int], object] | None, **kwargs: Any) -> Any:
        """As `WriteJob.write`; `progress` is called on another thread."""
        tell = self._telling(progress)
        return self._run("write to", lambda: self._job.write(*args, progress=tell, **kwargs))

    def _moved(self) -> object:
        report = self._job.report()
        return [report[name] for name in ("done_bytes", "copy_ns", "write_ns", "fsync_ns")]

    def abandon(self) -> None:
        """As `WriteJob.abandon`; what was left behind does it later."""
        if not self._is_running:
            self._close(self._job.abandon)

    def created(self) -> list[str]:
        """Returns the names of files to remove; those of what was left behind go later."""
        return [] if self._is_running else self._job.created()

    def _end(self) -> None:
        names = self._job.created()
        self._job.abandon()
        with Directory(self._path) as directory:
            # Of a later save, which may have taken the stock name; its own id nobody else has.
            is_whole = any(map(is_metadata_name, directory.names()))
            is_whole = is_whole or directory.is_regular(METADATA_NAME)  # which a listing may lack
            for name in names:
                parts = data_file_parts(name)
                if not is_whole or (parts is not None and parts[2] is not None):
                    remove_leftover(directory, name)


class AnsweredReadJob(_AnsweredJob):
    """Stands for a `ReadJob` of a directory that may be left."""

    def locate(self, *args: Any) -> Any:
        """As `ReadJob.locate`."""
        return self._run("look into", lambda: self._job.locate(*args))

    def read(self, *args: Any) -> Any:
        """As `ReadJob.read`."""
        return self._run("read", lambda: self._job.read(*args))

    def _moved(self) -> object:
        return self._job.moved

    def _leave(self) -> None:
        self._job.leave()

    def close(self) -> None:
        """As `ReadJob.close`; what was left behind does it later."""
        if not self._is_running:
            self._close(self._job.close)

    def _end(self) -> None:
        self._job.close()


class AnsweredVerifyJob(_AnsweredJob):
    """Stands for a `VerifyJob` of a directory."""

    def has_footer(self, *args: Any) -> Any:
        """As `VerifyJob.has_footer`."""
        return self._run("look into", lambda: self._job.has_footer(*args))

    def add_file(self, *args: Any) -> Any:
        """As `VerifyJob.add_file`."""
        return self._run("look into", lambda: self._job.add_file(*args))

    def add_foreign(self, *args: Any) -> Any:
        """As `VerifyJob.add_foreign`."""
        return self._run("look into", lambda: self._job.add_foreign(*args))

    def sum(self, progress: Callable[[int, int], None] | None = None) -> Any:
        """As `VerifyJob.sum`; `progress` is called on another thread."""
        return self._run("read", lambda: self._job.sum(self._telling(progress)))

    def _moved(self) -> object:
        return self._job.done_bytes


class AnsweredRangeJob(_AnsweredJob):
    """Stands for a `RangeJob`. The export's coordinator removes the files.

    Attributes:
        held: what has to live as long as a call that was left, such as memory that it writes.
    """

    held: Any = None

    def leave(self) -> None:
        """Ends a call that waits, of another thread: it raises StorageError (ECANCELED)."""
        self._has_left = True

    def add_file(self, name: str, nbytes: int, *, is_new: bool) -> Any:
        """As `RangeJob.add_file`."""
        call = partial(self._job.add_file, name, nbytes, is_new=is_new)
        return self._run("make" if is_new else "open", call, name)

    def write(self, rows: Any) -> Any:
        """As `RangeJob.write`."""
        return self._run("write to", lambda: self._job.write(rows))

    def finish(self, *, is_whole: bool) -> Any:
        """As `RangeJob.finish`."""
        return self._run("sync", lambda: self._job.finish(is_whole=is_whole))

    def _moved(self) -> object:
        return self._job.report()["writes"]

    def abandon(self) -> None:
        """As `RangeJob.abandon`; what was left behind does it later."""
        if not self._is_running:
            self._end()

    def _end(self) -> None:
        self.held = None
        self._close(self._job.abandon)


def answered_job(job: Any, path: Path) -> Any:
    """Returns what stands for a job in a directory of a file system that may not answer."""
    kinds = {
        _C.WriteJob: AnsweredWriteJob,
        _C.ReadJob: AnsweredReadJob,
        _C.VerifyJob: AnsweredVerifyJob,
        _C.RangeJob: AnsweredRangeJob,
    }
    return kinds[type(job)](job, path)
