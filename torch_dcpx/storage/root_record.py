"""The record of who holds a manager's root: a file of a directory, or an object of a store.

In a directory each holder makes a file of its own, `.dcpx.root.N`, by O_EXCL, which also excludes
where there are no locks; the highest number holds the root, and removes the others. So nobody takes
a root from a holder that it has not looked at. In a store a conditional PUT does the same.
"""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch_dcpx import _mounts
from torch_dcpx._answered_os import fcntl, os
from torch_dcpx.errors import CorruptionError, StorageError
from torch_dcpx.storage.directory import Directory, storage_error, storage_errors
from torch_dcpx.storage.holder import Holder
from torch_dcpx.storage.names import ROOT_LOCK_NAME, root_lock_name, root_lock_number
from torch_dcpx.storage.object_place import ObjectPlace
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.system_calls import close_read, close_written, moved, open_at

logger = logging.getLogger("torch_dcpx")

_MAX_BYTES = 4096
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_TRIES = 20  # of a flock that somebody holds to look at it
_SENDS = 3  # of a conditional PUT whose answer was lost
_PAUSE_S = 0.01
_OTHERS = frozenset({errno.EEXIST, errno.ESTALE, errno.ENOENT})  # what was seen is no longer there


class Seen(NamedTuple):
    """A look at a record has found this."""

    version: Any = None  # for `take`; None: there is no record
    holder: Holder | None = None  # None: nobody knows
    state: object = None  # another one after each renewal
    is_locked: bool | None = None  # whether somebody has a flock on it; None: not known


def identity_of(path: Location) -> str:
    """Returns what tells a root from a copy of it: "" of a directory that is not there.

    Of a directory it is the inode and the file system's id; no device, for a network file system
    has another one on each node. Raises: StorageError.
    """
    if not isinstance(path, Path):
        return str(path)
    try:
        return f"inode:{os.stat(path).st_ino}@{os.statvfs(path).f_fsid:x}"
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise storage_error("stat", path, error, is_read=True) from error


class RootRecord(Protocol):
    """The record of one root, for a process that holds it or wants to."""

    @property
    def path(self) -> Location: ...  # of the root
    @property
    def key(self) -> object: ...  # of the root, in a table of the process
    @property
    def identity(self) -> str: ...  # of the root, for other processes
    @property
    def is_dear(self) -> bool: ...  # whether a look is a request to a store
    @property
    def pause_s(self) -> float: ...  # between looks
    def look(self) -> Seen:
        """Returns what is there. Raises: StorageError."""
        ...

    def take(self, seen: Seen, holder: Holder) -> Holder | None:
        """Makes `holder` the one in place of `seen`. Returns it as it is noted; None: another
        process was faster. Raises: StorageError.
        """
        ...

    def put(self, holder: Holder) -> bool:
        """Writes the holder's record anew. Returns False where it is another one's by now, or
        gone: its end is told even so where the record was moved with its root. Raises:
        StorageError.
        """
        ...

    def close(self) -> None:
        """Gives up what proves that this process lives."""
        ...


class FileRecord:
    """A record in a directory."""

    is_dear = False
    pause_s = 0.2

    def __init__(self, path: Path) -> None:
        """Looks at a root that is there. Raises: StorageError."""
        self.path = path
        self._number = 0
        self._fd = -1  # of the own file, for its flock
        self._own: tuple[int, int] | None = None  # device and inode of the own file
        with Directory(path) as directory, storage_errors("fstat", path, is_read=True):
            status = os.fstat(directory.fd)
        self.key = status.st_dev, status.st_ino
        self.identity = identity_of(path)

    def look(self) -> Seen:
        try:
            return self._look()
        except StorageError as error:
            if error.errno != errno.ESTALE:
                raise
        return self._look()  # another client has replaced the file since it was opened

    def _look(self) -> Seen:
        with Directory(self.path) as directory:
            number = max(_numbers(directory), default=0)
            if not number:
                return Seen()
            name = root_lock_name(number)
            try:
                with directory.open_regular(name) as file:
                    content = file.part(0, min(file.nbytes, _MAX_BYTES))
                    with storage_errors("fstat", self.path / name, is_read=True):
                        status = os.fstat(file.fd)
                    # A record with two names (hard links) may be locked in another root.
                    is_locked = _is_locked(file.fd) if status.st_nlink == 1 else None
                    state = content, status.st_mtime_ns
                    return Seen(number, Holder.decoded(content), state, is_locked)
            except CorruptionError:  # no file, or it was cut meanwhile
                return Seen(number)
            except StorageError as error:
                if error.errno == errno.ENOENT:  # the next holder has removed it
                    return Seen(number, state=object())
                if error.errno != errno.EACCES:
                    raise
                with storage_errors("stat", self.path / name, is_read=True):
                    status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
                return Seen(number, state=status.st_mtime_ns)

    def take(self, seen: Seen, holder: Holder) -> Holder | None:
        number = (seen.version or 0) + 1
        with Directory(self.path) as directory:
            names = directory.names()
            while root_lock_name(number) in names and number not in _numbers(directory):
                number += 1  # a stranger's name
            name = root_lock_name(number)
            path = self.path / name
            try:
                flags = _FLAGS | os.O_RDWR | os.O_CREAT | os.O_EXCL
                fd = open_at(directory, name, flags, 0o666)
            except FileExistsError:
                return None
            except OSError as error:
                raise storage_error("create", path, error) from error
            try:
                if _mounts.HAS_SHARED and _mounts.shared_mount(str(path)):
                    with storage_errors("write", path):
                        _write(fd, holder.encoded())
                        os.fsync(fd)  # s3fs cannot open or truncate what it has not sent
                holder = holder._replace(has_flock=_has_locked(fd, directory, name))
                with storage_errors("write", path):
                    _overwrite(fd, holder.encoded())
                    status = os.fstat(fd)
                others = _numbers(directory)
                if max(others, default=0) != number:  # many have come and gone since that look
                    directory.unlink(name)
                    close_read(fd, path)
                    return None
            except BaseException:
                close_read(fd, path)
                directory.unlink(name)
                raise
            self.close()  # of a file that somebody has removed
            self._fd, self._number, self._own = fd, number, (status.st_dev, status.st_ino)
            for other in others:
                if other < number:
                    _remove_old(directory, root_lock_name(other))
        return holder

    def put(self, holder: Holder) -> bool:
        is_there = self._put(holder)
        if not is_there and holder.is_over and self._fd >= 0:  # its root may have been renamed
            with storage_errors("write", self.path / root_lock_name(self._number)):
                _overwrite(self._fd, holder.encoded())
        return is_there

    def _put(self, holder: Holder) -> bool:
        name = root_lock_name(self._number)
        try:
            with Directory(self.path) as directory:
                fd = open_at(directory, name, _FLAGS | os.O_WRONLY)
                try:
                    status = os.fstat(fd)
                    is_own = (status.st_dev, status.st_ino) == self._own
                    if not is_own or max(_numbers(directory), default=0) != self._number:
                        return False
                    _overwrite(fd, holder.encoded())
                finally:
                    close_written(fd)  # a network file system sends it off now
        except FileNotFoundError:
            return False
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        except OSError as error:
            raise storage_error("write", self.path / name, error) from error
        return True

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_read(fd, self.path)


def _numbers(directory: Directory) -> list[int]:
    """Returns the numbers of all records. What is no regular file is none."""
    found = {name: root_lock_number(name) for name in directory.names()}
    return [n for name, n in found.items() if n is not None and directory.is_regular(name)]


def _write(fd: int, content: bytes) -> None:
    done = 0
    while done < len(content):
        done += moved(os.pwrite(fd, content[done:], done))


def _overwrite(fd: int, content: bytes) -> None:
    """Writes a record over a shorter or longer one. Raises: OSError."""
    _write(fd, content)
    os.ftruncate(fd, len(content))


def _has_locked(fd: int, directory: Directory, name: str) -> bool:
    """Takes a flock of a new file; False where the file system has none, or only says so."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with directory.open_regular(name) as again:
                return _is_locked(again.fd) is True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                break
        time.sleep(_PAUSE_S)  # somebody looks at it
    return False


def _is_locked(fd: int) -> bool | None:
    """Returns whether somebody holds a flock of a file; None where nobody can tell."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        return True if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return False


def _remove_old(directory: Directory, name: str) -> None:
    """Removes the record of an earlier holder; logs a failure: it says nothing any more."""
    try:
        directory.unlink(name)
    except StorageError as error:
        logger.warning("an earlier record stays: %s", error)


class ObjectRecord:
    """A record beneath a prefix of a store."""

    is_dear = True
    pause_s = 2.0

    def __init__(self, place: ObjectPlace, *, is_conditional: bool) -> None:
        """Asks nothing yet. Without conditional PUTs two that come at once are not told apart."""
        self.path = place.path
        self.key = str(place.path), place.path.endpoint
        self.identity = identity_of(place.path)
        self._is_conditional = is_conditional

    def look(self) -> Seen:
        try:
            with ObjectPlace(self.path).open_small(ROOT_LOCK_NAME) as found:
                content = found.part(0, min(found.nbytes, _MAX_BYTES))
                return Seen(found.tag, Holder.decoded(content), content)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return Seen()
            raise

    def take(self, seen: Seen, holder: Holder) -> Holder | None:
        return holder if self._replace(seen.version, holder) else None

    def put(self, holder: Holder) -> bool:
        seen = self.look()
        is_own = seen.holder is not None and seen.holder.token == holder.token
        return is_own and self._replace(seen.version, holder)

    def _replace(self, tag: str | None, holder: Holder) -> bool:
        """Puts a record in place of the one with this tag. Returns whether it is there now."""
        for tries_left in reversed(range(_SENDS)):  # obstore repeats no conditional PUT
            try:
                self._send(tag, holder)
            except StorageError as error:  # a try whose answer was lost may have done it
                seen = self.look()
                if seen.holder is not None and seen.holder.token == holder.token:
                    return True
                if error.errno in _OTHERS:
                    return False
                if error.errno != errno.EIO or seen.version != tag or not tries_left:
                    raise
                time.sleep(_PAUSE_S)
            else:
                break
        return True

    def _send(self, tag: str | None, holder: Holder) -> None:
        place = ObjectPlace(self.path)
        key = place.key(ROOT_LOCK_NAME)
        if self._is_conditional:
            place.bucket.check_conditional(self.path.key)
            place.bucket.put_if(key, [holder.encoded()], tag)
        else:
            place.bucket.put_again(key, holder.encoded())

    def close(self) -> None:
        pass
