"""Processes that are nodes of their own, on one machine: a mount, a host name and a boot id each.

A process that has entered a node sees another client's mount under the path at which the first
one's is, as on a cluster where each node mounts the file system at one place. Root only.
"""

from __future__ import annotations

import ctypes
import os
import tempfile

_NEW_MOUNTS, _NEW_HOST_NAME = 0x00020000, 0x04000000  # CLONE_NEWNS, CLONE_NEWUTS
_BIND, _RECURSIVE, _PRIVATE = 1 << 12, 1 << 14, 1 << 18  # MS_BIND, MS_REC, MS_PRIVATE
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def enter_node(number: int, path: str | os.PathLike[str], own: str | os.PathLike[str]) -> None:
    """Makes this process, which has one thread yet, and its children a node.

    Args:
        number: of the node, 0 to 9; 0 stays what it is.
        path: at which the file system is on all nodes.
        own: the mount that this node has there.

    Raises:
        OSError: no right to make namespaces or mounts.
    """
    if number == 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str | None, target: str, flags: int) -> None:
        raw = None if source is None else os.fsencode(source)
        _checked(libc.mount(raw, os.fsencode(target), None, flags, None), f"mount {target}")

    host = f"node{number}".encode()
    has_entered = os.uname().nodename == host.decode()  # and has threads: another mount for all
    if not has_entered:
        _checked(libc.unshare(_NEW_MOUNTS | _NEW_HOST_NAME), "unshare")
        mount(None, "/", _RECURSIVE | _PRIVATE)
    if not os.path.samefile(path, own) or os.path.realpath(path) != os.path.realpath(own):
        mount(os.fspath(own), os.fspath(path), _BIND)
    if has_entered:
        return
    _checked(libc.sethostname(host, len(host)), "sethostname")
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(f"{number:08d}-0000-4000-8000-000000000000\n")
        file.flush()
        mount(file.name, _BOOT_ID, _BIND)


def _checked(code: int, what: str) -> None:
    if code:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
