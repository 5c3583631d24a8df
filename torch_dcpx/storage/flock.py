"""flock on an open file, at once or not at all. Some file systems have none: saves go on without.

It belongs to an open file description and dies with the process, however that ends.
"""

from __future__ import annotations

import errno
import logging

from torch_dcpx._answered_os import fcntl, os
from torch_dcpx._descriptors import open_file

logger = logging.getLogger("torch_dcpx")

# EPERM: of a container's filter of system calls.
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM})
_BUSY = frozenset({errno.EWOULDBLOCK, errno.EACCES})
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def opened(name: str | os.PathLike[str], *, dir_fd: int | None = None) -> tuple[int, bool]:
    """Opens a lock file for reading and writing: NFS has no LOCK_EX, and some file systems in user
    space make no file, for one that only reads. Of another user's file, it only reads.

    Returns the descriptor, and whether it may write. Raises: OSError.
    """
    try:
        return open_file(name, _FLAGS | os.O_RDWR | os.O_CREAT, 0o666, dir_fd=dir_fd), True
    except PermissionError as error:
        refusal = error  # a lock needs no more than reading
    try:
        return open_file(name, _FLAGS | os.O_RDONLY, dir_fd=dir_fd), False
    except FileNotFoundError:  # and may not be made: somebody can mend that
        raise refusal from None


def take(fd: int, kind: int, *, is_writable: bool = True) -> OSError | None:
    """Takes a lock of an open file.

    Args:
        kind: fcntl.LOCK_SH or LOCK_EX.
        is_writable: whether `fd` may write; NFS has no LOCK_EX for one that may not.

    Returns None: it is held; or why nobody can hold one here.

    Raises BlockingIOError: somebody else holds it. OSError: the call failed otherwise.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK)) from error
        if error.errno in _UNSUPPORTED or (error.errno == errno.EBADF and not is_writable):
            return error
        raise
    return None


def give_back(fd: int) -> None:
    """Gives a lock back before its file is closed: a process that was forked meanwhile shares it.
    Never raises.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            logger.warning("a lock is given back by closing its file alone: %s", str(error))
