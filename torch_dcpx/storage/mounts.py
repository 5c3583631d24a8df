"""Tells which file systems other nodes mount as well: what one node sees there may be a second old.

It goes by names, by /proc/self/mountinfo and by links on other file systems: no server is asked, so
that no call waits for one.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TABLE = Path("/proc/self/mountinfo")
# The kernel's names. A FUSE file system is "fuse.NAME", "fuse" where its program gives none.
_SHARED = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "fhgfs", "wekafs", "panfs", "orangefs"}
    | {"pvfs2", "glusterfs", "9p", "virtiofs", "cifs", "smb3", "smbfs", "afs", "coda", "ocfs2"}
    | {"gfs2", "acfs", "vxfs", "fuse"}
)
_OF_ONE_NODE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.squashfuse", "fuse.encfs"})


class Mount(NamedTuple):
    """A file system that is mounted somewhere, as /proc/self/mountinfo has it."""

    where: str
    kind: str  # such as "nfs4"
    options: tuple[str, ...]  # of the mount and of the file system

    @property
    def is_shared(self) -> bool:
        """Whether other nodes may mount it, by its type, or an automounter answers for it."""
        is_fuse = self.kind.startswith("fuse.") and self.kind not in _OF_ONE_NODE
        return is_fuse or self.kind in _SHARED or self.kind == "autofs"


_ESCAPED = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}
_MOST_KEPT = 4096
_MOST_LINKS = 40


def _table() -> dict[str, Mount]:
    """Returns the mounts of this process by their places, of several at one place the last."""
    found: dict[str, Mount] = {}
    with suppress(OSError):  # no /proc
        for line in _TABLE.read_text(errors="surrogateescape").splitlines():
            fields, _, source = line.partition(" - ")
            where, options = fields.split()[4:6]
            for text, letter in _ESCAPED.items():
                where = where.replace(text, letter)
            kind, _, more = source.split()[:3]
            found[where] = Mount(where, kind, (*options.split(","), *more.split(",")))
    return found


# Read once: what is mounted later counts as of this node. Where nothing shared is mounted, nobody
# asks for the file system of a path at all.
MOUNTS = _table()
HAS_SHARED = any(mount.is_shared for mount in MOUNTS.values())
_kept: dict[str, Mount | None] = {}


def is_shared(path: str | os.PathLike[str]) -> bool:
    """Returns whether other nodes may mount the file system of a path, as it is mounted now."""
    return _looked_up(os.fspath(path), _table()) is not None


def shared_mount(path: str) -> Mount | None:
    """Returns the file system of a path if other nodes may mount it, else None."""
    try:
        return _kept[path]
    except KeyError:
        pass
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    found = _kept[path] = _looked_up(path, MOUNTS)
    return found


def _looked_up(path: str, table: dict[str, Mount]) -> Mount | None:
    parts = os.path.abspath(path).split("/")[1:]  # noqa: PTH100 - resolve() would ask a server
    at, links = "", 0
    while parts:
        part = parts.pop(0)
        at = os.path.dirname(at) if part == ".." else f"{at}/{part}"  # noqa: PTH120
        mount = table.get(at)
        if mount is not None and mount.is_shared:
            inner = [where for where in table if where.startswith(f"{at}/")]
            rest = "/".join([at, *parts])
            best = max((w for w in inner if f"{rest}/".startswith(f"{w}/")), key=len, default=at)
            return table[best] if table[best].is_shared else None
        try:
            link = os.readlink(at)  # noqa: PTH115
        except OSError:
            continue
        links += 1
        if links > _MOST_LINKS:
            return None
        at = "" if link.startswith("/") else os.path.dirname(at)  # noqa: PTH120
        parts = [each for each in link.split("/") if each not in ("", ".")] + parts
    return None


# FUSE programs that leave flock to the kernel of their node.
_LOCAL_LOCKS = frozenset(
    {"fuse.sshfs", "fuse.rclone", "fuse.s3fs", "fuse.goofys", "fuse.geesefs", "fuse.gcsfuse"}
    | {"fuse.mountpoint-s3", "fuse.blobfuse", "fuse.blobfuse2", "fuse.curlftpfs", "fuse.davfs"}
)
_LOCAL_LOCK_OPTIONS = frozenset(
    {"local_lock=all", "local_lock=flock", "localflock", "localflocks", "nolock", "nobrl"}
)


def locks_of_one_node(mount: Mount) -> str:
    """Returns by what a flock there keeps out processes of its own node only: the type, or an
    option; "" where nothing is known.
    """
    if mount.kind in _LOCAL_LOCKS:
        return mount.kind
    return min(_LOCAL_LOCK_OPTIONS.intersection(mount.options), default="")
