"""Opening files above descriptors 0 to 2, which are stdin, stdout and stderr to every library.

Where a process was started without them (a daemon, `2>&-`), the next open file would get such a
number, and what a library prints would go into it. csrc/common/standard_fds.h does the same.
"""

from __future__ import annotations

import errno

from torch_dcpx._answered_os import fcntl, os

_FIRST = 3


def open_file(
    path: str | os.PathLike[str], flags: int, mode: int = 0o777, *, dir_fd: int | None = None
) -> int:
    """As `os.open`, and as fast, but the descriptor is none of 0 to 2. Raises: OSError."""
    fd = os.open(path, flags, mode, dir_fd=dir_fd)
    if fd >= _FIRST:
        return fd
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        _fill(fd)
    if flags & os.O_EXCL:  # made by this call: what was printed into it meanwhile goes
        os.ftruncate(moved, 0)
        os.lseek(moved, 0, os.SEEK_SET)
    return moved


def opener(path: str, flags: int) -> int:
    """Opens for `open(opener=)`."""
    return open_file(path, flags, 0o666)


def _fill(fd: int) -> None:
    """Closes a file that has one of 0 to 2, and gives those that are free to /dev/null, for good:
    nobody writes into the next file before it has moved.
    """
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, fd, inheritable=False)
        while null < _FIRST:
            null = os.open(os.devnull, os.O_RDWR)
        os.close(null)
    except OSError as error:  # no /dev/null, or no descriptors
        if error.errno != errno.EBADF:
            os.close(fd)
