"""A checkpoint directory held by descriptor: durable mkdir, listing, small files, fsync.

All calls work beneath one open directory: so a rename of a parent cannot split a save, and no name
leads through a link.
"""

from __future__ import annotations

import errno
import logging
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from torch_dcpx import _mounts
from torch_dcpx._answered_os import note_device, os
from torch_dcpx._descriptors import open_file
from torch_dcpx._replacing import move_new
from torch_dcpx.errors import CorruptionError, ShortReadError, StorageError
from torch_dcpx.storage.room import room_text
from torch_dcpx.storage.system_calls import (
    LATE_PAUSES_S,
    close_read,
    close_written,
    is_hollow,
    moved,
    on_stale,
    open_at,
    refuse_lost_link,
    uninterrupted,
)

_Own = TypeVar("_Own", bound="Directory")

Buffer: TypeAlias = bytes | bytearray | memoryview  # of bytes

_JOINED_BYTES = 64 << 10  # pieces from here on have a write of their own
MAX_METADATA_BYTES = 1 << 32  # larger metadata is refused before it is read
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
logger = logging.getLogger("torch_dcpx")
_warned: set[int] = set()  # devices that were named once


def storage_error(
    verb: str,
    path: str | os.PathLike[str],
    error: OSError,
    *,
    offset: int | None = None,
    nbytes: int | None = None,
    is_read: bool = False,
) -> StorageError:
    """Returns the typed error of a failed system call; that of a read does not mention room."""
    if isinstance(error, StorageError):  # without an answer: it says what and for how long
        return StorageError(error.message, errno=error.errno, path=error.path)
    range_text = "" if nbytes is None else f" {nbytes} B at offset {offset} of"
    room = "" if is_read else room_text(Path(path), nbytes, error.errno)
    return StorageError(
        f"{verb}{range_text} '{os.fspath(path)}': {os.strerror(error.errno or errno.EIO)}{room}",
        errno=error.errno,
        path=os.fspath(path),
        offset=offset,
        nbytes=nbytes,
    )


@contextmanager
def storage_errors(verb: str, path: Path, *, is_read: bool = False) -> Iterator[None]:
    """Raises an OSError of the block as `storage_error` has it."""
    try:
        yield
    except OSError as error:
        raise storage_error(verb, path, error, is_read=is_read) from error


def _fsync_entries(fd: int, path: Path) -> None:
    """Syncs a directory; warns once for each file system that cannot."""
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
    with storage_errors("fsync directory", path):
        fd = open_file(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _fsync_entries(fd, path)
        finally:
            close_read(fd, path)


def rename_path(old: Path, new: Path) -> None:
    """Renames, over what is there. Raises: StorageError, which names both."""
    with storage_errors(f"rename '{old}' to", new):
        uninterrupted(os.rename, old, new)


def _is_directory(path: Path) -> bool:
    """Returns whether `path` is a directory. Raises StorageError if the system cannot tell."""
    try:
        status = uninterrupted(os.stat, path)
        if status.st_dev not in _mounts.LOCAL_DEVICES:
            note_device(path, status.st_dev)
        return stat.S_ISDIR(status.st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise storage_error("stat", path, error) from error


def make_directory(path: Path, *, is_durable: bool) -> list[Path]:
    """Makes `path` and its parents, each with a durable entry if `is_durable`.

    Several ranks may do this at once: the rank that makes a directory also syncs its parent. A
    killed save may have made the parent of what is missing, and not synced it: so its entry is
    synced as well.

    Returns the directories that it made, `path` last. Raises: StorageError.
    """
    missing, made = [], []
    for candidate in (path, *path.parents):
        if _is_directory(candidate):
            break
        missing.append(candidate)
    if missing:
        refuse_lost_link(path)
    if missing and is_durable:
        with Directory(missing[-1].parent) as there:
            there.sync_parent()
    for directory in reversed(missing):
        try:
            uninterrupted(os.mkdir, directory)
            made.append(directory)
        except OSError as error:
            if not isinstance(error, FileExistsError) or not _comes_into_sight(directory):
                raise storage_error("mkdir", directory, error) from error
        if is_durable:
            fsync_path(directory.parent)
    return made


def _comes_into_sight(path: Path) -> bool:
    """Returns whether what is there is a directory: of another node, it may be seen late."""
    for pause_s in LATE_PAUSES_S:
        if _is_directory(path) or os.path.lexists(path):
            break
        time.sleep(pause_s)
    return _is_directory(path)


def _joined(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yields `pieces`, small neighbours joined, large ones as they are."""
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


def is_size(found: int, nbytes: int, *, is_exact: bool) -> bool:
    """Whether a file of `found` bytes has `nbytes`, or at least these."""
    return found == nbytes if is_exact else found >= nbytes


def wrong_size(path: str, nbytes: int, found: int, *, is_exact: bool) -> ShortReadError:
    least = "" if is_exact else "at least "
    return ShortReadError(
        f"'{path}' is no regular file of {least}{nbytes} B: it has {found} B",
        errno=errno.EIO,
        path=path,
        offset=0,
        nbytes=nbytes,
    )


class SmallFile(NamedTuple):
    """An open file of metadata."""

    fd: int
    path: Path
    nbytes: int

    def part(self, offset: int, nbytes: int) -> bytes:
        """Returns bytes of the file. Raises: StorageError; CorruptionError: it became shorter."""
        pieces: list[bytes] = []
        begin, end = offset, offset + nbytes
        while begin < end or not pieces:  # one call, but for what no call gives at once
            try:
                pieces.append(os.pread(self.fd, end - begin, begin))
            except OSError as error:
                raise storage_error(
                    "read", self.path, error, offset=begin, nbytes=end - begin, is_read=True
                ) from error
            if begin < end and not pieces[-1]:
                raise CorruptionError(
                    f"'{self.path}' ends at {begin} B, where it had {self.nbytes} B",
                    path=str(self.path),
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
            self.fd = open_file(path, self.FLAGS)
        except OSError as error:
            raise storage_error("open directory", path, error, is_read=True) from error

    def __enter__(self: _Own) -> _Own:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the descriptor; safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close_read(fd, self.path)

    def names(self) -> list[str]:
        """Returns the names of all entries. Raises: StorageError."""
        with storage_errors("list", self.path, is_read=True):
            return sorted(on_stale(self, os.listdir))

    def is_regular(self, name: str) -> bool:
        """Returns whether `name` is a regular file, no link. Raises StorageError if unknown."""
        try:
            status = uninterrupted(os.stat, name, dir_fd=self.fd, follow_symlinks=False)
        except (FileNotFoundError, ValueError):  # ValueError: a name with a NUL, or no text
            return False
        except OSError as error:
            raise storage_error("stat", self.path / name, error, is_read=True) from error
        return stat.S_ISREG(status.st_mode)

    def read_small(self, name: str) -> bytes:
        """Returns a whole file of metadata. Raises: as `open_small`."""
        with self.open_small(name) as file:
            return file.part(0, file.nbytes)

    @contextmanager
    def open_small(self, name: str) -> Iterator[SmallFile]:
        """Opens a file of metadata.

        Raises: as `open_regular`; CorruptionError: it is too large, or nearly all holes.
        """
        with self.open_regular(name) as file:
            if file.nbytes > MAX_METADATA_BYTES or is_hollow(file.fd, file.nbytes):
                raise _irregular(self.path / name, file.nbytes)
            yield file

    @contextmanager
    def open_regular(self, name: str) -> Iterator[SmallFile]:
        """Opens a file of any size. Raises: StorageError; CorruptionError: no regular file."""
        path = self.path / name
        try:
            fd = open_at(self, name, _READ_FLAGS)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CorruptionError(f"'{path}' is a symbolic link", path=str(path)) from error
            raise storage_error("open", path, error, is_read=True) from error
        try:
            with storage_errors("fstat", path, is_read=True):
                status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise _irregular(path, status.st_size)
            if status.st_dev not in _mounts.LOCAL_DEVICES:
                note_device(path, status.st_dev)
            yield SmallFile(fd, path, status.st_size)
        finally:
            close_read(fd, path)

    def read_at(self, name: str, offsets: Sequence[int], nbytes: int) -> list[bytes]:
        """Returns up to `nbytes` at each offset of a regular file. Raises: StorageError."""
        path = self.path / name
        with storage_errors("read", path, is_read=True):
            fd = open_at(self, name, _READ_FLAGS)
            try:
                return [os.pread(fd, nbytes, offset) for offset in offsets]
            finally:
                close_read(fd, path)

    def create(self, name: str, pieces: Iterable[Buffer], *, is_durable: bool) -> None:
        """Writes a new file, synced if `is_durable`. Raises: StorageError."""
        path = self.path / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        views = list(_joined(memoryview(piece).cast("B") for piece in pieces))
        needed, done = sum(view.nbytes for view in views), 0
        try:
            fd = open_at(self, name, flags, 0o666)
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
            at = done if done < needed else 0  # an fsync fails for all that is written
            raise storage_error("write", path, error, offset=at, nbytes=needed - at) from error

    def rename(self, old: str, new: str, *, replaces: bool = True) -> None:
        """Renames, over `new` if it `replaces` that, atomically. Raises: StorageError."""
        with storage_errors(f"rename '{old}' to", self.path / new):
            if not replaces:
                move_new(self.path / old, self.path / new)
                return
            uninterrupted(os.rename, old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Removes a file, if it is there. Raises: StorageError."""
        try:  # plainly: a save may replace a file for each item
            uninterrupted(os.unlink, name, dir_fd=self.fd)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error("unlink", self.path / name, error) from error

    def sync(self) -> None:
        """Makes the directory's entries durable. Raises: StorageError."""
        with storage_errors("fsync directory", self.path):
            _fsync_entries(self.fd, self.path)  # once: its error is final

    def sync_parent(self) -> None:
        """Makes the directory's own entry durable; warns where its parent may not be read.

        Does nothing for the root of a mount, which has no entry to lose. Raises: StorageError.
        """
        try:
            fd = open_file("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise storage_error("open directory", self.path.parent, error) from error
            logger.warning(
                "the entry of '%s' in its parent is not synced: %s", self.path, str(error)
            )
            return
        try:
            with storage_errors("fsync directory", self.path.parent):
                if os.fstat(fd).st_dev == os.fstat(self.fd).st_dev:
                    _fsync_entries(fd, self.path.parent)
        finally:
            close_read(fd, self.path.parent)


class _Unlinks(Protocol):
    def unlink(self, name: str) -> None: ...


def remove_leftover(directory: _Unlinks, name: str) -> None:
    """Removes a file of a save whose own error is on its way: an error in here is only logged."""
    try:
        directory.unlink(name)
    except StorageError as error:
        logger.warning("leftover of a failed save stays: %s", str(error))
