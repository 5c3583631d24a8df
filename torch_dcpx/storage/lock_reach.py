"""Says once where the lock of a save ends at its own node, so that others do not notice it.

Known is that of some types of file systems and mount options. What a program in user space makes of
flock no call tells: there a rank of another node tries the lock that its coordinator holds.
"""

from __future__ import annotations

import logging
from pathlib import Path

from torch_dcpx import _mounts
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.names import LOCK_NAME
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.save_lock import is_held_elsewhere

logger = logging.getLogger("torch_dcpx")

# FUSE programs that leave flock to the kernel of their node.
_LOCAL_LOCKS = frozenset(
    {
        "fuse.blobfuse",
        "fuse.blobfuse2",
        "fuse.curlftpfs",
        "fuse.davfs",
        "fuse.gcsfuse",
        "fuse.geesefs",
        "fuse.goofys",
        "fuse.mountpoint-s3",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
    }
)
_LOCAL_LOCK_OPTIONS = frozenset(
    {"local_lock=all", "local_lock=flock", "localflock", "localflocks", "nolock", "nobrl"}
)
_known: set[str] = set()  # mounts that were warned of, or where a lock was seen from another node


def locks_of_one_node(mount: _mounts.Mount) -> str:
    """Returns by what a flock there keeps out processes of its own node only: the type, or an
    option; "" where nothing is known.
    """
    if mount.kind in _LOCAL_LOCKS:
        return mount.kind
    return min(_LOCAL_LOCK_OPTIONS.intersection(mount.options), default="")


def warn_of_one_node(path: Path) -> None:
    """Warns, once a mount, where its type or options say that its locks end at this node."""
    mount = _mounts.shared_mount(str(path)) if _mounts.HAS_SHARED else None
    why = "" if mount is None else locks_of_one_node(mount)
    if mount is not None and why and mount.where not in _known:
        _warn(path, mount, why)


def check_reach(location: Location) -> None:
    """Warns, once a mount, where the lock that the coordinator of this save holds on another
    machine does not keep this one out. REQUIRES: it holds the lock until this rank has answered.
    Raises: StorageError.
    """
    if not isinstance(location, Path):
        return  # a store has no locks
    mount = _mounts.shared_mount(str(location)) if _mounts.HAS_SHARED else None
    if mount is None or mount.where in _known:
        return
    with Directory(location) as directory:
        is_held = is_held_elsewhere(directory, LOCK_NAME)
    if is_held:
        _known.add(mount.where)
    elif is_held is False:
        _warn(location, mount, f"{mount.kind}: the coordinator's lock is free here")


def _warn(path: Path, mount: _mounts.Mount, why: str) -> None:
    _known.add(mount.where)
    logger.warning(
        "'%s': locks on '%s' end at each node (%s): a save of another node at the same time would "
        "not be noticed, and no removal waits for its loads; save there from one job at a time",
        path,
        mount.where,
        why,
    )
