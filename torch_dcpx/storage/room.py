"""Says in the error of a write what room it lacked, as csrc/io/output_file.cpp does."""

from __future__ import annotations

import errno
from pathlib import Path

from torch_dcpx._answered_os import os

_SMALL_BYTES = 1 << 20  # more than a name takes


def room_text(path: Path, nbytes: int | None, number: int | None) -> str:
    """Returns the text about the room at `path`, or above it; "" where room cures nothing.

    Not of EIO: where a thin volume has no more, or a server fails, what is free says nothing.

    Args:
        nbytes: that were needed; None: unknown.
        number: the errno.
    """
    if number == errno.EDQUOT:  # whose, only the file system's own tools can tell
        found = "a quota of the user, the group, the project or the directory is used up"
    elif number in (errno.ENOSPC, errno.EFBIG):
        found = _free(path, nbytes, is_full=number == errno.ENOSPC)
    else:
        return ""
    needed = "" if nbytes is None else f"needed {nbytes} B, "
    return found and f" ({needed}{found}; saving over a checkpoint needs room for both)"


def _free(path: Path, nbytes: int | None, *, is_full: bool) -> str:
    for place in (path, *path.parents):
        try:
            status = os.statvfs(place)
        except OSError:
            continue
        free = status.f_bavail * status.f_frsize
        is_elsewhere = is_full and free >= (_SMALL_BYTES if nbytes is None else nbytes)
        beneath = ", so full is a quota, the inodes, or what lies beneath the file system"
        return f"free {free} B{beneath if is_elsewhere else ''}"
    return ""
