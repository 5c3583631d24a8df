"""System calls begun again after a signal, and closes that report.

Python begins most interrupted calls again (PEP 475), but none that works on names: mkdir, rename,
unlink, stat, listing. Network file systems interrupt those as well.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from torch_dcpx.errors import StorageError

logger = logging.getLogger("torch_dcpx")

_P = ParamSpec("_P")
_T = TypeVar("_T")


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

    Logs an error, which does not concern the call that is ending.
    """
    try:
        os.close(fd)
    except OSError as error:
        logger.warning("close '%s': %s", os.fspath(path), str(error))


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
    if os.path.islink(place) and not os.path.exists(place):  # noqa: PTH110, PTH114
        problem = f"'{place}' is a link to '{os.path.realpath(place)}', where nothing is"
        raise StorageError(
            f"look into '{path}': {problem}; is a disk not mounted?",
            errno=errno.ENXIO,
            path=str(path),
        )
