"""flock on an open file, at once or not at all. Some file systems have none: saves go on without.

It belongs to an open file description and dies with the process, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os

logger = logging.getLogger("torch_dcpx")

# EPERM: of a container's filter of system calls.
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM})
_BUSY = frozenset({errno.EWOULDBLOCK, errno.EACCES})


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
