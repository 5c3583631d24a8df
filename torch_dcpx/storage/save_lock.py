"""One save at a time in a directory: flock on `.dcpx.lock`, held by the coordinator.

The lock belongs to an open file description and dies with the process, however it ends. A table of
the process, keyed by (device, inode), names its holder. So the next save can take the lock of a
save that is over without a word to its writer (running_save.py).

The file's record names the save that took the lock; a save that ends well empties it. So the next
save knows whether it finds leftovers of a save of this machine, which did not end, or files of a
save on another machine, which may be running where locks do not reach: those it leaves alone. A
manager's record names the directory, too: under another name it is a user's copy, or was renamed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import socket
import stat
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote, unquote

from torch_dcpx._answered_os import os
from torch_dcpx._waiting import Guard
from torch_dcpx.errors import ConcurrentSaveError, CorruptionError, StorageError
from torch_dcpx.storage import flock
from torch_dcpx.storage.directory import Directory, storage_error, storage_errors
from torch_dcpx.storage.names import TRASH_PREFIX
from torch_dcpx.storage.system_calls import close_read, moved, on_stale

if TYPE_CHECKING:
    from torch_dcpx.storage.running_save import RunningSave

logger = logging.getLogger("torch_dcpx")

UNKNOWN_BOOT = "unknown"
_MAX_OTHERS = 16  # machines that are remembered
_MAX_RECORD_BYTES = 4096
_Key = tuple[int, int]  # (st_dev, st_ino)
_held: dict[_Key, dict[int, weakref.ref[SaveLock]]] = {}  # by descriptor; several if shared
_guard = Guard()
_warned: set[int] = set()  # devices without locks that were named once
_NAME = "name="  # in a record, before the directory's name
managed: list[str] = []  # paths to which managers save, or which they remove


def is_at_locks() -> bool:
    """Whether this thread takes or gives back a lock: it is in a signal's handler meanwhile, and
    no other thread comes to its lock before that has returned.
    """
    return _guard.is_own


def boot_id() -> str:
    """Returns an id of this machine and its last start, or UNKNOWN_BOOT."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return UNKNOWN_BOOT


def machine() -> str:
    """Returns `boot_id` as 8 hex digits, for names of files."""
    return hashlib.blake2b(boot_id().encode(), digest_size=4).hexdigest()


def holders_of(fd: int) -> str:
    """Returns the processes that hold a flock on a file now, "host=... pid=...,...".

    Returns "" if they are on other machines or in other containers, or without /proc/locks.
    """
    try:
        status = os.fstat(fd)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return ""
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    rows = [line.split() for line in lines]
    found = {
        row[4]: None
        for row in rows
        if len(row) > 5 and (row[1], row[5]) == ("FLOCK", f"{device}:{status.st_ino}")
    }
    pids = [pid for pid in found if pid.isdigit() and pid != "0"]  # 0: of another container
    return f"host={socket.gethostname()} pid={','.join(pids[:_MAX_OTHERS])}" if pids else ""


def owner_of(directory: Directory, name: str) -> str:
    """Returns who holds a lock file now, as "host=... pid=..."; "" if nobody does, or it cannot be
    seen.

    It takes the lock, shared and for a moment, only where a save of another machine or container
    has noted itself there: else a save that begins at that moment would be refused.
    Raises: StorageError; CorruptionError: it is no regular file.
    """
    with directory.open_regular(name) as file:
        held = holders_of(file.fd)
        if held:
            return held
        for line in _lines(file.part(0, min(file.nbytes, _MAX_RECORD_BYTES))):
            words = dict(word.partition("=")[::2] for word in line.split())
            pid, host = words.get("pid", ""), words.get("host", "")
            is_here = words.get("boot") == boot_id() and host == socket.gethostname()
            # A file system may show locks under another device than its files.
            may_hold = not is_here or (pid.isdigit() and Path(f"/proc/{pid}").exists())
            if may_hold and _is_taken(file.fd):
                return f"host={host} pid={pid}"
    return ""


def _is_taken(fd: int) -> bool:
    try:
        missing = flock.take(fd, fcntl.LOCK_SH)
    except OSError:
        return True
    if missing is None:
        flock.give_back(fd)
    return False


def is_held_elsewhere(directory: Directory, name: str) -> bool | None:
    """Whether the lock of the save that has noted itself last, on another machine, keeps this one
    out; None: it is of this machine, or nobody can tell. REQUIRES: that save goes on meanwhile.
    """
    with suppress(StorageError, CorruptionError), directory.open_regular(name) as file:
        lines = _lines(file.part(0, min(file.nbytes, _MAX_RECORD_BYTES)))
        return _is_taken(file.fd) if _elsewhere(lines[:1]) else None
    return None


def saves_elsewhere(directory: Directory, name: str) -> list[str]:
    """Returns a line for each save of another machine that took the lock and did not end.

    Takes no lock and changes nothing. Raises: StorageError.
    """
    return _elsewhere(_read(directory, name))


def noted_names(directory: Directory, name: str) -> set[str]:
    """Returns the names that the directory had as managers took the lock and did not end.

    Takes no lock and changes nothing. Raises: StorageError.
    """
    words = " ".join(_read(directory, name)).split()
    return {unquote(word.removeprefix(_NAME)) for word in words if word.startswith(_NAME)}


def _read(directory: Directory, name: str) -> list[str]:
    if not directory.is_regular(name):
        return []
    with directory.open_regular(name) as file:
        return _lines(file.part(0, min(file.nbytes, _MAX_RECORD_BYTES)))


def _lines(record: bytes) -> list[str]:
    return record.decode("utf-8", "replace").splitlines()


def _elsewhere(lines: list[str]) -> list[str]:
    boot = f"boot={boot_id()}"
    return [line for line in lines if boot not in line.split()]


class SaveLock:
    """A lock of one save. Released by `release`, by garbage collection and by process exit."""

    def __init__(
        self, directory: Directory, name: str, save: RunningSave, *, is_shared: bool = False
    ) -> None:
        """Takes the lock file `name` of a checkpoint directory, at once or not at all.

        Args:
            save: that needs it; once it is over, another save of this process may take the lock.
            is_shared: LOCK_SH, for ranks that only exclude a global save.

        Raises:
            ConcurrentSaveError: another process or thread is saving here; `owner` names it.
            StorageError: the lock file cannot be opened, locked or read, or is no regular file.
        """
        self.path = directory.path / name
        self.is_held = False  # False as well where the file system has no locks
        self._save = save
        self._is_shared = is_shared
        try:
            opened = on_stale(directory, lambda fd: flock.opened(name, dir_fd=fd))
            self._fd, self._is_writable = opened
        except OSError as error:
            raise storage_error("open lock", self.path, error) from error
        try:
            self._key = self._check_file()
        except BaseException:
            close_read(self._fd, self.path)
            raise
        # Where a save that took this lock before did not end, by its record.
        self.left_by: Literal["nobody", "this machine", "another machine"] = "nobody"
        # Before the lock is taken: a signal's handler may raise at any line from here on.
        self._finalizer = weakref.finalize(
            self, _release, self._fd, self._key, self.path, os.getpid()
        )
        try:
            self._acquire(self._key)
            _refuse_trash(directory)
            if self.is_held and not is_shared:
                self._take_over_record()
        except BaseException:
            self.release()
            raise

    def _check_file(self) -> _Key:
        """Returns the file's key in the table. A record goes to a file of this directory only."""
        with storage_errors("fstat", self.path, is_read=True):
            status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(
                f"lock '{self.path}': it is no regular file; somebody has put something else in "
                "place of the lock file: remove it",
                errno=errno.EINVAL,
                path=str(self.path),
            )
        if status.st_nlink > 1 and self._is_writable:
            self._is_writable = False  # the other name may be anybody's file, outside of here
            logger.warning(
                "'%s' has %d names (hard links): it does not name its owner, since that would be "
                "written to all of them",
                self.path,
                status.st_nlink,
            )
        return status.st_dev, status.st_ino

    def _acquire(self, key: _Key) -> None:
        """Takes the lock and enters it in the table, if the file system has locks."""
        with _guard.held():
            for fd, entry in list(_held.get(key, {}).items()):
                holder = entry()
                if holder is None or not holder._save.is_under_way():
                    if holder is not None:
                        holder.release()
                    if fd in _held.get(key, {}):  # a signal has ended its release half-way
                        _release(fd, key, self.path, os.getpid())
                elif not (self._is_shared and holder._is_shared):
                    raise self._concurrent()
            kind = fcntl.LOCK_SH if self._is_shared else fcntl.LOCK_EX
            try:
                missing = flock.take(self._fd, kind, is_writable=self._is_writable)
            except BlockingIOError as error:
                raise self._concurrent() from error
            except OSError as error:
                raise storage_error("lock", self.path, error) from error
            if missing is not None:
                if key[0] not in _warned:
                    _warned.add(key[0])
                    logger.warning(
                        "'%s': the file system has no locks (%s); two saves at once would not be "
                        "noticed, and leftovers of failed saves are not removed",
                        self.path,
                        str(missing),
                    )
                return
            _held.setdefault(key, {})[self._fd] = weakref.ref(self)
            self.is_held = True

    def is_there(self) -> bool:
        """Whether its file still has its name: its holder may have removed it meanwhile."""
        try:
            status = self.path.lstat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._key

    def _take_over_record(self) -> None:
        """Reads the record and writes a new one; a write that fails is no more than a warning."""
        left = self._record()
        # Other machines' lines stay until a save has ended well: one that fails knows no better.
        elsewhere = _elsewhere(left)
        if left:
            self.left_by = "another machine" if elsewhere else "this machine"
        if not self._is_writable:
            return
        own = f"host={socket.gethostname()} pid={os.getpid()} boot={boot_id()}"
        if str(self.path.parent) in managed:
            own += f" {_NAME}{quote(self.path.parent.name)}"
        lines = [own, *elsewhere[:_MAX_OTHERS]]
        owner = "".join(f"{line}\n" for line in lines).encode()
        try:
            done = 0
            while done < len(owner):
                done += moved(os.pwrite(self._fd, owner[done:], done))
            os.ftruncate(self._fd, len(owner))
        except OSError as error:
            logger.warning("'%s' does not name its owner: %s", self.path, str(error))

    def _record(self) -> list[str]:
        """Returns a line for each save that took the lock and did not end, the last save first."""
        try:
            record = os.pread(self._fd, _MAX_RECORD_BYTES, 0)
        except OSError as error:
            raise storage_error(
                "read", self.path, error, offset=0, nbytes=_MAX_RECORD_BYTES, is_read=True
            ) from error
        return _lines(record)

    def _concurrent(self) -> ConcurrentSaveError:
        try:
            owner = (self._record() or ["unknown"])[0]
        except StorageError as error:
            owner = f"unknown: {error}"
        held = holders_of(self._fd)
        if held and not f"{owner} ".startswith(f"{held} "):  # it has written no record
            owner = held if owner == "unknown" else f"{held}; the lock file names {owner}"
        return ConcurrentSaveError(
            f"another save is writing to '{self.path.parent}' ({owner}); wait for it, or save to "
            "another directory",
            errno=errno.EWOULDBLOCK,
            path=str(self.path),
            owner=owner,
        )

    def release(self, *, has_ended_well: bool = False) -> None:
        """Gives the lock back; safe to call twice.

        Args:
            has_ended_well: the save is committed and has left nothing to remove.
        """
        if has_ended_well and self._is_writable and not self._is_shared:
            self._empty_record()
        self.is_held = False
        try:
            self._finalizer()
        except BaseException:  # of a signal's handler; the finalizer will not be called again
            with _guard.held():
                entry = _held.get(self._key, {}).get(self._fd)
                if entry is not None and entry() is self:
                    _release(self._fd, self._key, self.path, os.getpid())
            raise

    def _empty_record(self) -> None:
        with _guard.held():  # whoever else gives this lock back closes its file
            if not self._finalizer.alive:
                return
            try:
                os.ftruncate(self._fd, 0)
            except OSError as error:
                logger.warning("'%s' still names a save that has ended: %s", self.path, str(error))


def _refuse_trash(directory: Directory) -> None:
    """Raises ConcurrentSaveError if a manager has renamed the directory to remove it, since we
    opened it. REQUIRES: its lock, which the manager held at the rename.
    """
    try:
        name = Path(f"/proc/self/fd/{directory.fd}").readlink().name
    except OSError:  # no /proc: its removal is an error of the save's
        return
    if name.startswith(TRASH_PREFIX):
        raise ConcurrentSaveError(
            f"save to '{directory.path}': the checkpoint there was being deleted when the save "
            "began; save again",
            errno=errno.EBUSY,
            path=str(directory.path),
        )


def _release(fd: int, key: _Key, path: Path, pid: int) -> None:
    """Gives a lock of process `pid` back. If a signal's handler raises in the middle, either the
    table still has the lock, and its owner or the next save calls this again, or only the file is
    left open.
    """
    with _guard.held():
        # A child that was forked while it was taken must not take it from its parent.
        if pid == os.getpid():
            flock.give_back(fd)
        holders = _held.get(key, {})
        holders.pop(fd, None)
        if not holders:
            _held.pop(key, None)
        close_read(fd, path)


def _forget_parents_locks() -> None:
    """In a forked child: a lock is its parent's, and goes with it even if the child lives on."""
    global _guard
    _guard = Guard()  # another thread of the parent may have held it
    for holders in _held.values():
        for fd, entry in holders.items():
            lock = entry()
            if lock is not None:
                lock._finalizer.detach()
                lock.is_held = False
            close_read(fd, "a lock of the parent process")
    _held.clear()


os.register_at_fork(after_in_child=_forget_parents_locks)
