"""The lock of a save between nodes: where it ends at its own one, and what a lost node leaves.

Where it ends at its node, others do not notice it, which is said once. Known is that of some types
of file systems and mount options. What a program in user space makes of flock no call tells: there
a rank of another node tries the lock that its coordinator holds.

A client that was killed, or lost its node, leaves its locks until the servers end its session.
"""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torch_dcpx import _mounts
from torch_dcpx._answers import current_timeout
from torch_dcpx.errors import ConcurrentSaveError
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.names import LOCK_NAME
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.save_lock import SaveLock, boot_id, is_held_elsewhere

if TYPE_CHECKING:
    from torch_dcpx.storage.running_save import RunningSave

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
_MOST_LEFT_S = 150.0  # CephFS ends a session after 60 s, NFS after 90 s
_LOOK_S = 0.5
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


def lock_of(
    directory: Directory, name: str, save: RunningSave, *, is_shared: bool = False
) -> SaveLock:
    """As `SaveLock`; where nodes share the file system it waits for a lock of a process that does
    not run on this node: that may be lost. Raises as `SaveLock`.
    """
    until = None
    while True:
        try:
            return SaveLock(directory, name, save, is_shared=is_shared)
        except ConcurrentSaveError as error:
            is_shared_mount = _mounts.HAS_SHARED and _mounts.shared_mount(str(directory.path))
            if not is_shared_mount or not _may_be_left(error.owner):
                raise
            now = time.monotonic()
            if until is None:
                wait_s = min(current_timeout().wait_s, _MOST_LEFT_S)
                until = now + wait_s
                logger.warning("%s; waits up to %.0f s: it may be of a lost node", error, wait_s)
            if now >= until:
                raise
        time.sleep(_LOOK_S)


def _may_be_left(owner: str | None) -> bool:
    """Returns whether the line of a lock's record names a process that is not on this node now."""
    words = dict(word.partition("=")[::2] for word in (owner or "").split())
    if (words.get("boot"), words.get("host")) != (boot_id(), socket.gethostname()):
        return "boot" in words
    return not Path(f"/proc/{words.get('pid')}").exists()


def _warn(path: Path, mount: _mounts.Mount, why: str) -> None:
    _known.add(mount.where)
    logger.warning(
        "'%s': locks on '%s' end at each node (%s): a save of another node at the same time would "
        "not be noticed, and no removal waits for its loads; save there from one job at a time",
        path,
        mount.where,
        why,
    )
