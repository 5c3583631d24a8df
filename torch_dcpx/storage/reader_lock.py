"""A reader of a checkpoint holds a shared lock; a removal needs the same lock alone.

The lock is a file of its own, `.dcpx.readers`: a save into the directory need not wait for readers,
which get the old checkpoint or the new one anyway. A reader that cannot open this file reads
without a lock, and gets a typed error where a deletion takes its files.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_dcpx._answered_os import os
from torch_dcpx._descriptors import open_file
from torch_dcpx.errors import ConcurrentSaveError
from torch_dcpx.storage import flock
from torch_dcpx.storage.directory import storage_error, storage_errors
from torch_dcpx.storage.names import READERS_NAME
from torch_dcpx.storage.object_url import is_url
from torch_dcpx.storage.paths import AnyPath
from torch_dcpx.storage.save_lock import holders_of
from torch_dcpx.storage.system_calls import close_read

logger = logging.getLogger("torch_dcpx")

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def make_readers_file(path: Path, *, dir_fd: int | None = None) -> None:
    """Makes a checkpoint's lock file, for readers who may not write.

    Args: as `being_deleted`. Raises: StorageError.
    """
    name = path / READERS_NAME
    with storage_errors("create", name):
        fd, _ = flock.opened(name if dir_fd is None else READERS_NAME, dir_fd=dir_fd)
        os.close(fd)


@contextmanager
def being_read(path: AnyPath | None) -> Iterator[bool]:
    """Keeps a manager from deleting the checkpoint in `path` while the block runs.

    Yields False if a manager is deleting it at this moment. Never fails: without a lock, a deletion
    is an error of the read.
    """
    fd, is_left_alone = _shared(path)
    try:
        yield is_left_alone
    finally:
        if fd >= 0:
            _unlock(fd, path)


class ReadersHold:
    """The lock of `being_read`, until `release`, the next `take`, or its end. Not thread-safe."""

    def __init__(self) -> None:
        self._finalizer: Any = None

    def take(self, path: AnyPath) -> None:
        """Locks the checkpoint in `path`, if it has a lock; never fails."""
        self.release()
        fd, _ = _shared(path)
        if fd >= 0:
            self._finalizer = weakref.finalize(self, _give_back, fd, path, os.getpid())
            self._finalizer.atexit = False  # the process ends, and with it the lock

    def release(self) -> None:
        """Gives the lock back; safe to call twice."""
        finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer()


def _give_back(fd: int, path: AnyPath, pid: int) -> None:
    if pid == os.getpid():
        _unlock(fd, path)
    else:  # a forked child's copy: the lock is its parent's
        close_read(fd, os.fsdecode(path))


def _shared(path: AnyPath | None) -> tuple[int, bool]:
    """Returns the locked file, -1 if there is none, and False if a manager is deleting."""
    fd = -1
    try:
        if path is not None and not is_url(path):  # a store has no locks
            fd = open_file(Path(os.fsdecode(path)) / READERS_NAME, _FLAGS)
            flock.take(fd, fcntl.LOCK_SH)
    except (OSError, ValueError, TypeError) as error:
        logger.debug("read '%s' without a lock: %s", path, error)
        return fd, not (fd >= 0 and isinstance(error, BlockingIOError))
    return fd, True


@contextmanager
def being_deleted(path: Path, *, dir_fd: int | None = None) -> Iterator[None]:
    """Keeps readers from the checkpoint in `path` while the block runs.

    Args:
        dir_fd: its directory, if a link must not be followed. Default None: `path` names it.

    Raises:
        ConcurrentSaveError: somebody reads it.
        StorageError: the lock file cannot be opened.
    """
    name = path / READERS_NAME
    try:
        place = name if dir_fd is None else READERS_NAME
        fd, is_writable = flock.opened(place, dir_fd=dir_fd)
    except OSError as error:
        raise storage_error("open lock", name, error) from error
    try:
        try:
            flock.take(fd, fcntl.LOCK_EX, is_writable=is_writable)
        except BlockingIOError as error:
            owner = holders_of(fd) or "unknown: on another machine, or in another container"
            raise ConcurrentSaveError(
                f"delete '{path}': somebody reads it ({owner}); try again when the load has ended",
                errno=errno.EBUSY,
                path=str(path),
                owner=owner,
            ) from error
        except OSError as error:
            logger.debug("delete '%s' without a lock against readers: %s", path, error)
        yield
    finally:
        _unlock(fd, path)


def _unlock(fd: int, path: AnyPath | None) -> None:
    try:
        flock.give_back(fd)
    finally:
        close_read(fd, os.fsdecode(path or READERS_NAME))
