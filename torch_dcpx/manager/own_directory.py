"""A checkpoint's directory as a manager changes it: what the root itself holds under that name.

A link of the user's, `latest -> step-300`, may be read. What is done through it would be done to
another checkpoint, or outside of the root.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from torch_dcpx.errors import StorageError, UnsupportedError
from torch_dcpx.storage.directory import Directory, storage_error
from torch_dcpx.storage.system_calls import uninterrupted

_NO_LINK = frozenset({errno.EINVAL, errno.ENOENT, errno.ENOTDIR})
_LINK_OPENED = frozenset({errno.ELOOP, errno.ENOTDIR})  # by O_NOFOLLOW, with O_DIRECTORY


class OwnDirectory(Directory):
    """An open directory that no link leads to, whenever somebody has put it there. The root, and
    directories above it, may be links.
    """

    FLAGS = Directory.FLAGS | os.O_NOFOLLOW

    def __init__(self, path: Path, doing: str = "save") -> None:
        """Opens `path`, to do something to it. Raises: StorageError; as `lies_there`."""
        try:
            super().__init__(path)
        except StorageError as error:
            if error.errno in _LINK_OPENED:
                lies_there(path, doing)
            raise


def lies_there(path: Path, doing: str) -> bool:
    """Returns whether there is anything at a path that is about to be changed.

    Args:
        path: of a checkpoint beneath a manager's root.
        doing: what is to be done to it, for the message: "delete".

    Raises:
        UnsupportedError: a symbolic link, leading to something or not.
        StorageError: nobody can say.
    """
    try:
        target = uninterrupted(os.readlink, path)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise storage_error("read link", path, error, is_read=True) from error
        return error.errno == errno.EINVAL
    raise UnsupportedError(
        f"{doing} '{path}': it is a symbolic link to '{target}', and a manager changes nothing "
        "through links; use the name of what it leads to, or another one"
    )
