"""System calls begun again after a signal, and closes that report.

Python begins most interrupted calls again (PEP 475), but none that works on names: mkdir, rename,
unlink, stat, listing. Network file systems interrupt those as well.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from torch_dcpx._answered_os import os
from torch_dcpx._descriptors import open_file
from torch_dcpx.errors import StorageError

logger = logging.getLogger("torch_dcpx")

_P = ParamSpec("_P")
_T = TypeVar("_T")

# What a server, a disk of it or a network says where it does not answer.
SILENT = frozenset(
    {errno.ENOTCONN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN}
    | {errno.ESHUTDOWN, errno.EREMOTEIO, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH}
    | {errno.ECONNABORTED, errno.ECONNRESET, errno.ECONNREFUSED}
)
LATE_PAUSES_S = (0.0, 0.05, 0.2, 0.8, 1.5)  # a client keeps a handle for a second


def uninterrupted(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Returns what `call` returns, made again while a signal interrupts it.

    A handler that raises ends it: Python runs handlers before the next attempt.
    """
    while True:
        try:
            return call(*args, **kwargs)
        except InterruptedError:
            continue


def moved(nbytes: int) -> int:
    """Returns the bytes that a write moved. Raises OSError for none: a file system in user space
    might answer so for ever.
    """
    if nbytes == 0:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return nbytes


def close_written(fd: int) -> None:
    """Closes a descriptor of a written file. Raises OSError: the bytes are lost."""
    try:
        os.close(fd)
    except InterruptedError:
        return  # Linux has closed it; fsync has reported lost writes


def close_read(fd: int, path: str | os.PathLike[str]) -> None:
    """Closes a descriptor through which nothing was written, so that nothing can be lost.

    Logs an error, which does not concern the call that is ending: only a descriptor that is not
    open any more (EBADF) is anybody's mistake.
    """
    try:
        os.close(fd)
    except OSError as error:
        level = logging.WARNING if error.errno == errno.EBADF else logging.DEBUG
        logger.log(level, "close '%s': %s", os.fspath(path), str(error))


class _Opened(Protocol):
    path: Path
    fd: int
    FLAGS: int


def on_stale(directory: _Opened, call: Callable[[int], _T]) -> _T:
    """Returns what `call` returns of the descriptor of a directory, made again while a signal
    interrupts it. Where another node has just made the directory, and this one has an earlier
    handle of it, it is opened anew, by its path.
    """
    pauses_s = iter(LATE_PAUSES_S)
    while True:
        try:
            return call(directory.fd)
        except InterruptedError:
            continue
        except OSError as error:
            pause_s = next(pauses_s, None) if error.errno == errno.ESTALE else None
            if pause_s is None:
                raise
            time.sleep(pause_s)
            fd = open_file(directory.path, directory.FLAGS)
            if _is_other(directory.fd, fd):  # which nobody has asked for
                os.close(fd)
                raise
        stale, directory.fd = directory.fd, fd
        close_read(stale, directory.path)


def open_at(directory: _Opened, name: str, flags: int, mode: int = 0o777) -> int:
    """As `open_file`, beneath a directory that is opened anew where its handle is stale."""
    try:
        return open_file(name, flags, mode, dir_fd=directory.fd)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return on_stale(directory, lambda fd: open_file(name, flags, mode, dir_fd=fd))


def _is_other(stale_fd: int, fd: int) -> bool:
    """Returns whether two descriptors are known to be of different directories."""
    try:
        return not os.path.samestat(os.fstat(stale_fd), os.fstat(fd))
    except OSError:  # nobody knows what the stale one was
        return False


_SMALL_BYTES = 64 << 20


def is_hollow(fd: int, nbytes: int) -> bool:
    """Returns whether a file of this size is larger than 64 MiB and nearly all of it holes, to
    which nobody wrote.

    Asked of SEEK_DATA: blocks are counted late on ZFS, and are none where a file is archived.
    """
    end = written = 0
    try:
        while nbytes > _SMALL_BYTES and written < nbytes // 256:
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            written += end - begin
    except OSError as error:  # any other: the file system does not tell
        return error.errno == errno.ENXIO  # no more data
    return False


def refuse_lost_link(path: Path) -> None:
    """Raises StorageError where a link leads to nothing: a disk may not be mounted.

    Args:
        path: missing; itself or one above it may be the link.
    """
    place = next((one for one in (path, *path.parents) if os.path.lexists(one)), path)
    # These raise nothing: the next call does.
    if os.path.islink(place) and not os.path.exists(place):
        problem = f"'{place}' is a link to '{os.path.realpath(place)}', where nothing is"
        raise StorageError(
            f"look into '{path}': {problem}; is a disk not mounted?",
            errno=errno.ENXIO,
            path=str(path),
        )
