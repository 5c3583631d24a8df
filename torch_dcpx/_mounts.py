"""Tells what is mounted on this node, and what of it other nodes may mount, too, by names alone.

No call here waits for a server: it goes by /proc/self/mountinfo, and by links on this node.
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
_OF_ONE_NODE = frozenset(
    {"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.squashfuse", "fuse.encfs", "fuse.snapfuse"}
    | {"fuse.gvfsd-fuse", "fuse.portal"}
)
_ESCAPED = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}
_MOST_KEPT = 4096
_MOST_LINKS = 40


def is_shared_kind(kind: str) -> bool:
    """Returns whether other nodes may mount a file system of such a type, as "nfs4"."""
    return kind in _SHARED or (kind.startswith("fuse.") and kind not in _OF_ONE_NODE)


class Mount(NamedTuple):
    """A file system that is mounted somewhere, as /proc/self/mountinfo has it."""

    where: str
    kind: str  # such as "nfs4"
    options: tuple[str, ...]  # of the mount and of the file system
    device: int = -1

    @property
    def is_shared(self) -> bool:
        """Whether other nodes may mount it, by its type, or an automounter answers for it."""
        is_automounted = self.kind == "autofs" and not self.where.startswith("/proc/")
        return is_automounted or is_shared_kind(self.kind)


def _table() -> dict[str, Mount]:
    """Returns the mounts of this process by their places, of several at one place the last."""
    found: dict[str, Mount] = {}
    with suppress(OSError):  # no /proc
        for line in _TABLE.read_text(errors="surrogateescape").splitlines():
            fields, _, source = line.partition(" - ")
            device, _, where, options = fields.split()[2:6]
            if "\\" in where:
                for text, letter in _ESCAPED.items():
                    where = where.replace(text, letter)
            kind, _, more = source.split()[:3]
            number = os.makedev(*map(int, device.split(":")))
            found[where] = Mount(where, kind, (*options.split(","), *more.split(",")), number)
    return found


# Read at the import, and again by `note_device`. Where nothing shared is mounted, nobody asks for
# the file system of a path at all.
MOUNTS = _table()
HAS_SHARED = any(mount.is_shared for mount in MOUNTS.values())
LOCAL_DEVICES = {mount.device for mount in MOUNTS.values() if not mount.is_shared}
_kept: dict[str, Mount | None] = {}


def note_device(path: str, device: int) -> None:
    """Reads the table again if a path is on a device that is neither known nor known as shared."""
    global MOUNTS, HAS_SHARED
    if device in LOCAL_DEVICES or (HAS_SHARED and shared_mount(path) is not None):
        return
    MOUNTS = _table()
    HAS_SHARED = any(mount.is_shared for mount in MOUNTS.values())
    _kept.clear()
    if shared_mount(path) is None:
        LOCAL_DEVICES.add(device)  # of a subvolume, say, which the table does not have


def is_shared(path: str | os.PathLike[str]) -> bool:
    """Returns whether other nodes may mount the file system of a path, as it is mounted now."""
    return _looked_up(os.fspath(path), _table()) is not None


def shared_mount(path: str) -> Mount | None:
    """Returns the file system of a path if other nodes may mount it, else None.

    It goes by names, and by links on file systems of this node.
    """
    if not path.startswith("/"):  # the directory of the process may change
        path = _absolute(path)
    try:
        return _kept[path]
    except KeyError:
        pass
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    found = _kept[path] = _looked_up(path, MOUNTS)
    return found


def _absolute(path: str) -> str:
    """Returns "" where the directory of the process is gone, as the next call on the path says."""
    with suppress(OSError):
        return os.path.abspath(path)  # noqa: PTH100 - resolve() would ask a server
    return ""


def _looked_up(path: str, table: dict[str, Mount]) -> Mount | None:
    path = _absolute(path)
    root = table.get("/")
    if root is not None and root.kind in _SHARED:
        return _innermost(path, table)
    parts = path.split("/")[1:]
    at, links = "", 0
    while parts:
        part = parts.pop(0)
        at = os.path.dirname(at) if part == ".." else f"{at}/{part}"  # noqa: PTH120
        mount = table.get(at)
        if mount is not None and mount.is_shared:
            return _innermost("/".join([at, *parts]), table)
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


def _innermost(path: str, table: dict[str, Mount]) -> Mount | None:
    """Returns the file system of a path, by names alone, if other nodes may mount it."""
    above = (where for where in table if f"{path}/".startswith(f"{where.rstrip('/')}/"))
    found = table[max(above, key=len)]
    return found if found.is_shared else None
