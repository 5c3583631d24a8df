"""One save at a time in a directory: flock on `.dcpx.lock`, held by the coordinator.

The lock belongs to an open file description and dies with the process, however it ends. Within the
process, a table keyed by (device, inode) says who holds it. DCP tells a writer nothing when a save
fails on another rank, so a lock whose owner cannot come back is free: the same thread starts
another save, the owning thread has ended, or the writer was collected.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import threading
import weakref
from pathlib import Path

from torch_dcpx.directory import Directory, storage_error
from torch_dcpx.errors import ConcurrentSaveError

__all__ = ["SaveLock"]

logger = logging.getLogger("torch_dcpx")

_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_Key = tuple[int, int]  # (st_dev, st_ino)
_held: dict[_Key, tuple[int, weakref.ref[SaveLock]]] = {}  # descriptor and its owner
_guard = threading.RLock()
_warned: set[int] = set()  # devices without locks that were named once


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


class SaveLock:
    """A lock of one save. Released by `release`, by garbage collection and by process exit."""

    def __init__(self, directory: Directory, name: str, *, is_shared: bool = False) -> None:
        """Takes the lock at once or not at all.

        Args:
            directory: the checkpoint directory.
            name: name of the lock file in it.
            is_shared: LOCK_SH, for ranks that only exclude a global save.

        Raises:
            ConcurrentSaveError: another process or thread is saving here; `owner` says who.
            StorageError: the lock file cannot be opened.
        """
        self.path = directory.path / name
        self.is_held = False  # False as well where the file system has no locks
        self._thread = threading.current_thread()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._fd = os.open(name, flags, 0o666, dir_fd=directory.fd)
        except OSError as error:
            raise storage_error("open lock", self.path, error) from error
        try:
            key = self._acquire(is_shared)
        except BaseException:
            os.close(self._fd)
            raise
        self._finalizer = weakref.finalize(self, _release, self._fd, key, os.getpid())
        if key is not None:
            self._note_owner()

    def _acquire(self, is_shared: bool) -> _Key | None:
        """Returns what the lock is entered under in the table of exclusive ones, if it is."""
        status = os.fstat(self._fd)
        key = (status.st_dev, status.st_ino)
        with _guard:
            entry = _held.get(key)
            holder = entry[1]() if entry is not None else None
            if holder is not None and holder.is_held:
                if holder._is_abandoned():
                    holder.release()
                elif not is_shared:
                    raise self._concurrent()
            try:
                fcntl.flock(
                    self._fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
                )
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise self._concurrent() from error
                if error.errno not in _UNSUPPORTED:
                    raise storage_error("lock", self.path, error) from error
                if status.st_dev not in _warned:
                    _warned.add(status.st_dev)
                    logger.warning(
                        "'%s': the file system has no locks (%s); two saves at once would not be "
                        "noticed, and leftovers of failed saves are not removed",
                        self.path,
                        error,
                    )
                return None
            self.is_held = True
            if is_shared:
                return None
            _held[key] = (self._fd, weakref.ref(self))
            return key

    def _note_owner(self) -> None:
        """Writes who saves here: for another save's error only, so a full disk does not matter."""
        owner = f"host={socket.gethostname()} pid={os.getpid()} boot={_boot_id()}\n".encode()
        try:
            os.pwrite(self._fd, owner, 0)
            os.ftruncate(self._fd, len(owner))
        except OSError as error:
            logger.warning("'%s' does not name its owner: %s", self.path, error)

    def _is_abandoned(self) -> bool:
        """A save of a thread that starts another one, or has ended, cannot be under way."""
        return self._thread is threading.current_thread() or not self._thread.is_alive()

    def _concurrent(self) -> ConcurrentSaveError:
        owner = os.pread(self._fd, 4096, 0).decode("utf-8", "replace").strip() or "unknown"
        return ConcurrentSaveError(
            f"another save is writing to '{self.path.parent}' ({owner}); wait for it, or save to "
            "another directory",
            errno=errno.EWOULDBLOCK,
            path=str(self.path),
            owner=owner,
        )

    def release(self) -> None:
        """Gives the lock back; safe to call twice."""
        self.is_held = False
        self._finalizer()


def _release(fd: int, key: _Key | None, owner_pid: int) -> None:
    with _guard:
        if key is not None and _held.get(key, (-1,))[0] == fd:
            del _held[key]
        # Closing is not enough: a child forked in the meantime shares the lock and would keep it.
        # The child itself must not give away what is its parent's.
        if os.getpid() == owner_pid:
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
