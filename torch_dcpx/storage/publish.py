"""One file, published: written under a name that nobody has, synced, and renamed to its own.

Who opens its name finds what was there before or all of the new, whoever else writes there, and no
link leads a byte elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch_dcpx._answered_os import answered_at, os
from torch_dcpx.errors import StorageError
from torch_dcpx.storage import flock
from torch_dcpx.storage.directory import (
    Buffer,
    Directory,
    make_directory,
    remove_leftover,
    storage_errors,
)
from torch_dcpx.storage.names import temporary_name
from torch_dcpx.storage.save_lock import UNKNOWN_BOOT, boot_id, machine
from torch_dcpx.storage.system_calls import open_at

_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_LOST = 16


def publish(directory: Directory, name: str, pieces: Iterable[Buffer], *, is_durable: bool) -> None:
    """Replaces a small file of a directory. Its caller removes what a kill leaves of it.

    Raises StorageError: it could not be written, and what was there is still in place; or the last
    fsync failed, and a power cut may leave the one or the other.
    """
    temporary = temporary_name(name)
    try:
        directory.create(temporary, pieces, is_durable=is_durable)
        directory.rename(temporary, name)
    except BaseException:
        remove_leftover(directory, temporary)
        raise
    if is_durable:
        directory.sync()


def put(path: Path, content: bytes) -> None:
    """As `put_from`, of a small file."""
    put_from(path, lambda file: file.write(content))


def _fill(file: BinaryIO, write: Callable[[BinaryIO], object]) -> None:
    write(file)
    file.flush()
    os.fsync(file.fileno())


class _Moving(io.FileIO):
    """A file that notes when bytes have last moved to it."""

    at = 0.0

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        self.at = time.monotonic()
        return count


@contextmanager
def _closed(file: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    try:
        yield file
    finally:
        answered_at(path, "close", file.close)


def put_from(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replaces a file by what a function writes, durably. Makes its directory if it is missing.

    Removes what processes of this machine that are gone have left of it.

    Raises StorageError: as `publish`. What the function raises: the file is as it was.
    """
    make_directory(path.parent, is_durable=True)
    beginning = f".dcpx.{hashlib.blake2b(os.fsencode(path.name), digest_size=6).hexdigest()}"
    with Directory(path.parent) as directory:
        _remove_left(directory, beginning)
        temporary, fd = _made(directory, beginning)
        try:
            raw = _Moving(fd, "wb")
            with storage_errors("write", path), _closed(io.BufferedWriter(raw), path) as file:
                answered_at(path, "write", partial(_fill, file, write), lambda: raw.at)
                os.close(os.dup(fd))  # sends it off where no fsync does
                directory.rename(temporary, path.name)  # locked: else another might remove it
        except BaseException:
            remove_leftover(directory, temporary)
            raise
        directory.sync()


def _made(directory: Directory, beginning: str) -> tuple[str, int]:
    """Returns name and descriptor of a new file, whose lock says that its writer lives."""
    for _ in range(_MAX_LOST):
        name = f"{beginning}.{machine()}-{uuid.uuid4().hex[:12]}.tmp"
        with storage_errors("create", directory.path / name):
            fd = open_at(directory, name, _NEW_FILE, 0o666)
            try:
                flock.take(fd, fcntl.LOCK_EX)
                is_lost = os.fstat(fd).st_nlink == 0
            except BlockingIOError:
                is_lost = True
            except BaseException:
                os.close(fd)
                remove_leftover(directory, name)
                raise
        if not is_lost:
            return name, fd
        os.close(fd)  # another process took it for a dead one's, before it had its lock
    raise StorageError(
        f"create a file in '{directory.path}': other processes removed {_MAX_LOST} at once",
        errno=errno.EAGAIN,
        path=str(directory.path),
    )


def _remove_left(directory: Directory, beginning: str) -> None:
    """Removes files of `_made` that nobody locks. Those of other machines stay: their locks may not
    reach this one.
    """
    if boot_id() == UNKNOWN_BOOT:
        return
    left = re.compile(rf"{re.escape(beginning)}\.{machine()}-[0-9a-f]{{12}}\.tmp")
    for name in filter(left.fullmatch, directory.names()):
        try:
            fd = open_at(directory, name, _OLD_FILE)
        except OSError:  # gone, or no file
            continue
        try:
            if directory.is_regular(name) and flock.take(fd, fcntl.LOCK_EX) is None:
                remove_leftover(directory, name)
        except BlockingIOError:
            continue  # it is being written
        finally:
            os.close(fd)
