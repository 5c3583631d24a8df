"""A checkpoint directory held by descriptor: durable mkdir, listing, small files, fsync.

Everything is done beneath one open directory, so that a rename of a parent in the middle of a save
cannot split it, and no name is followed through a link.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeAlias, TypeVar

from torch_dcpx.errors import CorruptionError, DcpxError, StorageError
from torch_dcpx.storage.system_calls import (
    close_read,
    close_written,
    is_hollow,
    moved,
    uninterrupted,
)

_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")

Buffer: TypeAlias = bytes | bytearray | memoryview  # of bytes

_JOINED_BYTES = 64 << 10  # pieces from here on have a write of their own

# Metadata larger than this is refused before it is read.
MAX_METADATA_BYTES = 1 << 32

logger = logging.getLogger("torch_dcpx")
_warned: set[int] = set()  # devices that were named once

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


# What may be cured by room: the same as in csrc/io/output_file.cpp.
_LACK_OF_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def _room(path: Path, nbytes: int | None) -> str:
    """Returns what to say of the room for `nbytes` (None: who knows) at `path`, or above it."""
    needed = "" if nbytes is None else f"needed {nbytes} B, "
    for place in (path, *path.parents):
        try:
            status = os.statvfs(place)
        except OSError:
            continue
        free = status.f_bavail * status.f_frsize
        return f" ({needed}free {free} B; saving over a checkpoint needs room for both)"
    return ""


def storage_error(
    verb: str,
    path: str | os.PathLike[str],
    error: OSError,
    *,
    offset: int | None = None,
    nbytes: int | None = None,
    is_read: bool = False,
) -> StorageError:
    """Returns the typed error for a failed system call of ours; a read says nothing of room."""
    range_text = "" if nbytes is None else f" {nbytes} B at offset {offset} of"
    may_lack_room = not is_read and error.errno in _LACK_OF_ROOM
    room = _room(Path(path), nbytes) if may_lack_room else ""
    return StorageError(
        f"{verb}{range_text} '{os.fspath(path)}': {os.strerror(error.errno or errno.EIO)}{room}",
        errno=error.errno,
        path=os.fspath(path),
        offset=offset,
        nbytes=nbytes,
    )


def _fsync_entries(fd: int, path: Path) -> None:
    """fsync of a directory; where the file system has no such thing, one warning instead."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        device = os.fstat(fd).st_dev
        if device not in _warned:
            _warned.add(device)
            logger.warning(
                "'%s': the file system cannot fsync a directory (%s); that a committed checkpoint "
                "survives a power cut is up to it",
                path,
                str(error),
            )


def fsync_path(path: Path) -> None:
    """Makes the entries of a directory durable. Raises: StorageError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _fsync_entries(fd, path)
        finally:
            close_read(fd, path)
    except OSError as error:
        raise storage_error("fsync directory", path, error) from error


def _is_directory(path: Path) -> bool:
    """Returns whether there is a directory. Raises StorageError where the system does not tell."""
    try:
        return stat.S_ISDIR(uninterrupted(os.stat, path).st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise storage_error("stat", path, error) from error


def make_directory(path: Path, *, is_durable: bool) -> list[Path]:
    """Makes `path` and its parents; durable, each with its parent's entry, before it returns.

    Several ranks may do this at once: the rank that makes a directory also syncs its parent. If
    `path` is there already, a save that was killed may have made it and not synced it: so this call
    syncs its entry as well.

    Returns:
        What was made here, `path` itself last; its entry is as durable as asked.

    Raises:
        StorageError: it cannot be made or synced.
    """
    missing, made = [], []
    for candidate in (path, *path.parents):
        if _is_directory(candidate):
            break
        missing.append(candidate)
    if missing and is_durable:
        with Directory(missing[-1].parent) as there:
            there.sync_parent()
    for directory in reversed(missing):
        try:
            uninterrupted(directory.mkdir)
            made.append(directory)
        except FileExistsError as error:
            if not _is_directory(directory):
                raise storage_error("mkdir", directory, error) from error
        except OSError as error:
            raise storage_error("mkdir", directory, error) from error
        if is_durable:
            fsync_path(directory.parent)
    return made


def look_into(path: Path, look: Callable[[_Asked], _Found], asked: _Asked) -> _Found:
    """Returns `look(asked)`, stock's code that looks into a directory and knows no typed errors.

    Raises:
        StorageError: it cannot be looked into.
    """
    try:
        return uninterrupted(look, asked)
    except OSError as error:
        if isinstance(error, DcpxError):
            raise
        raise storage_error("look into", path, error, is_read=True) from error


def _joined(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yields the bytes of `pieces`, small neighbours as one, large ones as they are."""
    small: list[memoryview] = []
    for piece in pieces:
        if len(piece) < _JOINED_BYTES:
            small.append(piece)
            continue
        yield memoryview(b"".join(small))
        yield piece
        small = []
    yield memoryview(b"".join(small))


def _irregular(path: Path, nbytes: int) -> CorruptionError:
    return CorruptionError(
        f"'{path}' is no regular file of at most {MAX_METADATA_BYTES} B, or nearly all holes",
        path=str(path),
        nbytes=nbytes,
    )


class SmallFile:
    """An open file of metadata."""

    def __init__(self, fd: int, path: Path, nbytes: int) -> None:
        self.fd = fd
        self._path = path
        self.nbytes = nbytes

    def part(self, offset: int, nbytes: int) -> bytes:
        """Returns bytes of the file. Raises: StorageError; CorruptionError: it became shorter."""
        pieces: list[bytes] = []
        begin, end = offset, offset + nbytes
        while begin < end or not pieces:  # one call, but for what no call gives at once
            try:
                pieces.append(os.pread(self.fd, end - begin, begin))
            except OSError as error:
                raise storage_error(
                    "read", self._path, error, offset=begin, nbytes=end - begin, is_read=True
                ) from error
            if begin < end and not pieces[-1]:
                raise CorruptionError(
                    f"'{self._path}' ends at {begin} B, where it had {self.nbytes} B",
                    path=str(self._path),
                    offset=begin,
                    nbytes=end - begin,
                )
            begin += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Directory:
    """An open directory. Not thread-safe; a context manager that closes it."""

    FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

    def __init__(self, path: Path) -> None:
        """Opens `path`. Raises: StorageError."""
        self.path = path
        try:
            self.fd = os.open(path, self.FLAGS)
        except OSError as error:
            raise storage_error("open directory", path, error, is_read=True) from error

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the descriptor; safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close_read(fd, self.path)

    def names(self) -> list[str]:
        """Returns the names of all entries. Raises: StorageError."""
        try:
            return sorted(uninterrupted(os.listdir, self.fd))
        except OSError as error:
            raise storage_error("list", self.path, error, is_read=True) from error

    def is_regular(self, name: str) -> bool:
        """Returns whether `name` is a regular file here (no link).

        Raises:
            StorageError: the system does not tell.
        """
        try:
            status = uninterrupted(os.stat, name, dir_fd=self.fd, follow_symlinks=False)
        except (FileNotFoundError, ValueError):  # ValueError: a NUL, or no text: no file's name
            return False
        except OSError as error:
            raise storage_error("stat", self.path / name, error, is_read=True) from error
        return stat.S_ISREG(status.st_mode)

    def read_small(self, name: str) -> bytes:
        """Reads a whole file (metadata). Raises: as `open_small`."""
        with self.open_small(name) as file:
            return file.part(0, file.nbytes)

    @contextmanager
    def open_small(self, name: str) -> Iterator[SmallFile]:
        """Opens a file (metadata) to be read by parts.

        Raises:
            CorruptionError: it is no regular file, too large to be metadata, or nearly all holes.
            StorageError: it cannot be opened (FileNotFoundError's errno included) or read.
        """
        with self.open_regular(name) as file:
            if file.nbytes > MAX_METADATA_BYTES or is_hollow(file.fd, file.nbytes):
                raise _irregular(self.path / name, file.nbytes)
            yield file

    @contextmanager
    def open_regular(self, name: str) -> Iterator[SmallFile]:
        """Opens a file of any size to be read by parts.

        Raises:
            CorruptionError: it is no regular file.
            StorageError: it cannot be opened (FileNotFoundError's errno included) or read.
        """
        path = self.path / name
        try:
            fd = os.open(name, _READ_FLAGS, dir_fd=self.fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CorruptionError(f"'{path}' is a symbolic link", path=str(path)) from error
            raise storage_error("open", path, error, is_read=True) from error
        try:
            try:
                status = os.fstat(fd)
            except OSError as error:
                raise storage_error("fstat", path, error, is_read=True) from error
            if not stat.S_ISREG(status.st_mode):
                raise _irregular(path, status.st_size)
            yield SmallFile(fd, path, status.st_size)
        finally:
            close_read(fd, path)

    def read_at(self, name: str, offsets: Sequence[int], nbytes: int) -> list[bytes]:
        """Returns up to `nbytes` at each offset of a regular file. Raises: StorageError."""
        path = self.path / name
        try:
            fd = os.open(name, _READ_FLAGS, dir_fd=self.fd)
            try:
                return [os.pread(fd, nbytes, offset) for offset in offsets]
            finally:
                close_read(fd, path)
        except OSError as error:
            raise storage_error("read", path, error, is_read=True) from error

    def create(self, name: str, pieces: Iterable[Buffer], *, is_durable: bool) -> None:
        """Writes a new file of these bytes, fsynced. Raises: StorageError."""
        path = self.path / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        views = list(_joined(memoryview(piece).cast("B") for piece in pieces))
        needed, done = sum(view.nbytes for view in views), 0
        try:
            fd = os.open(name, flags, 0o666, dir_fd=self.fd)
            try:
                for view in views:
                    end = done + view.nbytes
                    while done < end:
                        done += moved(os.write(fd, view[done - end :]))
                if is_durable:
                    os.fsync(fd)
            except BaseException:
                close_read(fd, path)  # the error that is there says more
                raise
            close_written(fd)
        except OSError as error:
            left = needed - done if done < needed else needed  # at the fsync all of it is written
            at = done if done < needed else 0
            raise storage_error("write", path, error, offset=at, nbytes=left) from error

    def rename(self, old: str, new: str) -> None:
        """Renames over `new`, atomically. Raises: StorageError."""
        try:
            uninterrupted(os.rename, old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError as error:
            raise storage_error(f"rename '{old}' to", self.path / new, error) from error

    def unlink(self, name: str) -> None:
        """Removes a file; that it is gone already is fine. Raises: StorageError."""
        try:
            uninterrupted(os.unlink, name, dir_fd=self.fd)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error("unlink", self.path / name, error) from error

    def sync(self) -> None:
        """Makes the directory's entries durable. Raises: StorageError."""
        try:
            _fsync_entries(self.fd, self.path)
        except OSError as error:
            raise storage_error("fsync directory", self.path, error) from error

    def sync_parent(self) -> None:
        """Makes the directory's own entry durable, where its parent may be read.

        Nothing is done for the root of a mount: it has no entry that could be lost.

        Raises:
            StorageError: the parent may be read, but not opened now, or the fsync failed.
        """
        try:
            fd = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise storage_error("open directory", self.path.parent, error) from error
            logger.warning(
                "the entry of '%s' in its parent is not synced: %s", self.path, str(error)
            )
            return
        try:
            if os.fstat(fd).st_dev == os.fstat(self.fd).st_dev:
                _fsync_entries(fd, self.path.parent)
        except OSError as error:
            raise storage_error("fsync directory", self.path.parent, error) from error
        finally:
            close_read(fd, self.path.parent)
