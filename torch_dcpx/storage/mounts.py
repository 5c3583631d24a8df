"""Tells which file systems other nodes mount as well: what one node sees there may be a second old.

It asks /proc/self/mountinfo by the device of a directory: no server is asked but for that device.
"""

from __future__ import annotations

import os
from pathlib import Path

_TABLE = Path("/proc/self/mountinfo")
# The kernel's names. A FUSE file system is "fuse.NAME", "fuse" where its program gives none.
_SHARED = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "fhgfs", "wekafs", "panfs", "orangefs"}
    | {"pvfs2", "glusterfs", "9p", "virtiofs", "cifs", "smb3", "smbfs", "afs", "coda", "ocfs2"}
    | {"gfs2", "acfs", "vxfs", "fuse"}
)
_OF_ONE_NODE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.squashfuse", "fuse.encfs"})


def type_at(path: str | os.PathLike[str]) -> str:
    """Returns the type of the file system of a path, such as "nfs4"; "" where nobody knows.

    Of a missing path it is that of the nearest directory above it.
    """
    place = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would ask for each link
    for each in (place, *place.parents):
        try:
            device = os.stat(each).st_dev  # noqa: PTH116 - no object is made of it
        except OSError:
            continue
        return _types().get(device, "")
    return ""


def _types() -> dict[int, str]:
    """Returns the types of all mounts of this process, by their devices."""
    found: dict[int, str] = {}
    try:
        lines = _TABLE.read_text(errors="surrogateescape").splitlines()
    except OSError:  # no /proc: a mount cannot be told from a local disk
        return found
    for line in lines:
        fields, _, source = line.partition(" - ")
        major, _, minor = fields.split()[2].partition(":")
        found[os.makedev(int(major), int(minor))] = source.split()[0]
    return found


def is_shared(path: str | os.PathLike[str]) -> bool:
    """Returns whether other nodes may mount the file system of a path, by its type."""
    name = type_at(path)
    is_fuse = name.startswith("fuse.") and name not in _OF_ONE_NODE
    return is_fuse or name in _SHARED
