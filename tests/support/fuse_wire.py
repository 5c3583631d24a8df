"""The messages of /dev/fuse: what a request holds, what an answer looks like, the mount itself.

The kernel's protocol 7.31 and later (include/uapi/linux/fuse.h), as far as `fuse_daemon.py` needs
it. Numbers are native, as both ends are one machine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import NamedTuple

OPERATIONS = {
    1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 5: "readlink", 6: "symlink",
    8: "mknod", 9: "mkdir", 10: "unlink", 11: "rmdir", 12: "rename", 13: "link", 14: "open",
    15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync", 25: "flush", 26: "init",
    27: "opendir", 28: "readdir", 29: "releasedir", 30: "fsyncdir", 31: "getlk", 32: "setlk",
    33: "setlkw", 35: "create", 36: "interrupt", 38: "destroy", 42: "batch_forget",
    43: "fallocate", 44: "readdirplus", 45: "rename2",
}  # fmt: skip

REQUEST = struct.Struct("=IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, 2 unused
_ANSWER = struct.Struct("=IiQ")  # length, -errno, unique
_ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("=QQQQII")  # node, generation, seconds of the name, of attributes, their ns
_DIRENT = struct.Struct("=QQII")  # inode, offset of the next one, length of the name, type
_INIT = struct.Struct("=IIIIHHIIHHI28x")
_LOCK = struct.Struct("hhqqi4x")  # type, whence, start, bytes, pid: struct flock
_END = (1 << 63) - 1
_STATFS = struct.Struct("=QQQQQIII28x")

_INVALIDATE_INODE, _INVALIDATE_NAME = 2, 3
MAX_WRITE_BYTES = 1 << 20
BUFFER_BYTES = MAX_WRITE_BYTES + (1 << 12)

# ASYNC_READ, ATOMIC_O_TRUNC, BIG_WRITES, AUTO_INVAL_DATA, DO_READDIRPLUS, PARALLEL_DIROPS,
# MAX_PAGES: what GlusterFS's client asks for.
_FLAGS = 1 << 0 | 1 << 3 | 1 << 5 | 1 << 12 | 1 << 13 | 1 << 18 | 1 << 22
_LOCKS = 1 << 1 | 1 << 10  # POSIX_LOCKS, FLOCK_LOCKS: else the kernel locks within one mount

_libc = ctypes.CDLL(None, use_errno=True)
_NOSUID_NODEV, _DETACH = 2 | 4, 2


class Request(NamedTuple):
    operation: str
    unique: int
    node: int
    body: bytes

    @property
    def names(self) -> list[str]:
        """The names at the end of the body, behind what `fields` reads."""
        skip = {"mknod": 16, "mkdir": 8, "rename": 8, "rename2": 16, "link": 8, "create": 16}
        parts = self.body[skip.get(self.operation, 0) :].split(b"\0")
        return [os.fsdecode(part) for part in parts[:-1]]

    def fields(self, layout: str) -> tuple[int, ...]:
        """Returns the numbers at the head of the body."""
        return struct.unpack_from("=" + layout, self.body)


def parsed(message: bytes) -> Request:
    """Returns the request that one read of /dev/fuse gave."""
    _, opcode, unique, node, *_ = REQUEST.unpack_from(message)
    operation = OPERATIONS.get(opcode, str(opcode))
    return Request(operation, unique, node, message[REQUEST.size :])


def answer(unique: int, body: bytes = b"", failed: int = 0) -> bytes:
    """Returns an answer: a body, or the number of an error."""
    return _ANSWER.pack(_ANSWER.size + len(body), -failed, unique) + body


def stale_node(node: int) -> bytes:
    """Returns a message without a request: the kernel is to ask for attributes anew."""
    return _notice(_INVALIDATE_INODE, struct.pack("=Qqq", node, -1, 0))


def stale_name(node: int, name: str) -> bytes:
    """Returns a message without a request: the kernel is to look a name up anew."""
    raw = os.fsencode(name)
    return _notice(_INVALIDATE_NAME, struct.pack("=QII", node, len(raw), 0) + raw + b"\0")


def _notice(code: int, body: bytes) -> bytes:
    return _ANSWER.pack(_ANSWER.size + len(body), code, 0) + body


def attributes(found: os.stat_result) -> bytes:
    """Returns the attributes of a file as the kernel takes them."""
    times = [found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns]
    return _ATTRIBUTES.pack(
        found.st_ino, found.st_size, found.st_blocks,
        *(ns // 10**9 for ns in times), *(ns % 10**9 for ns in times),
        found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev,
        found.st_blksize, 0,
    )  # fmt: skip


def attributes_answer(found: os.stat_result, valid_s: float) -> bytes:
    return struct.pack("=QII", *_split(valid_s), 0) + attributes(found)


def entry(node: int, found: os.stat_result, name_s: float, attributes_s: float) -> bytes:
    """Returns what a look-up found, and for how many seconds the kernel need not ask again."""
    whole, ns = _split(name_s)
    whole_of_attributes, ns_of_attributes = _split(attributes_s)
    head = _ENTRY.pack(node, 0, whole, whole_of_attributes, ns, ns_of_attributes)
    return head + attributes(found)


def missing(name_s: float) -> bytes:
    """Returns an entry that says for how many seconds a name is missing."""
    whole, ns = _split(name_s)
    return _ENTRY.pack(0, 0, whole, 0, ns, 0) + bytes(_ATTRIBUTES.size)


def dirent(inode: int, following: int, mode: int, name: str, head: bytes = b"") -> bytes:
    """Returns one name of a listing; `head` is its `entry`, for READDIRPLUS."""
    raw = os.fsencode(name)
    row = head + _DIRENT.pack(inode, following, len(raw), mode >> 12 & 15) + raw
    return row + bytes(-len(row) % 8)


def statfs_answer(found: os.statvfs_result) -> bytes:
    return _STATFS.pack(
        found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree,
        found.f_bsize, found.f_namemax, found.f_frsize,
    )  # fmt: skip


def lock(kind: int, first: int, last: int) -> bytes:
    """Returns a lock of these bytes of a file, as fcntl takes it."""
    return _LOCK.pack(kind, 0, first, 0 if last >= _END else last - first + 1, 0)


def lock_answer(found: bytes) -> bytes:
    kind, _, first, nbytes, _ = _LOCK.unpack(found)
    return struct.pack("=QQII", first, first + nbytes - 1 if nbytes else _END, kind, 0)


def init_answer(request: Request, has_locks: bool) -> bytes:
    """Returns the answer to the first request, which agrees on the protocol."""
    major, minor, readahead, flags = request.fields("IIII")
    flags &= _FLAGS | (_LOCKS if has_locks else 0)
    minor = min(minor, 38)
    return _INIT.pack(
        major, minor, readahead, flags, 64, 48, MAX_WRITE_BYTES, 1, MAX_WRITE_BYTES >> 12, 0, 0
    )


def _split(seconds: float) -> tuple[int, int]:
    return int(seconds), int(seconds % 1 * 10**9)


def mount(where: str | os.PathLike[str]) -> int:
    """Mounts a file system there whose requests the returned descriptor of /dev/fuse gives.

    Raises:
        OSError: no /dev/fuse, or no right to mount.
    """
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    if _libc.mount(
        b"clients", os.fsencode(where), b"fuse.clients", _NOSUID_NODEV, options.encode()
    ):
        code = ctypes.get_errno()
        os.close(device)
        raise OSError(code, f"mount {where}: {os.strerror(code)}")
    return device


def unmount(where: str | os.PathLike[str]) -> None:
    """Takes the mount away, also where files of it are open. That there is none is no error."""
    if _libc.umount2(os.fsencode(where), _DETACH) and ctypes.get_errno() != errno.EINVAL:
        raise OSError(ctypes.get_errno(), f"umount {os.fspath(where)}")
