"""A directory as one client of it sees it: the answers to the requests of a FUSE mount.

A node is known by its inode, so that a name that another client gives to a new file is a new node,
and the one that the kernel still keeps under it has gone. `fuse_daemon.py` says what is played.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import threading
import time
from collections.abc import Callable

import fuse_wire as wire
from fuse_nodes import Handle, Node
from fuse_rules import Place, Rules

_BETWEEN_TRIES_S = 0.02  # to take a lock


class Tree:
    """What one client knows. Thread-safe: the kernel orders what must not run at once.

    Attributes:
        name_s: for how many seconds the kernel keeps a name; `attributes_s`: sizes and times;
            `missing_s`: that a name is missing.
        kept_s: for how many seconds the client itself keeps a file's attributes, whatever the
            kernel asks; `kept_missing_s`: that a name is missing.
    """

    def __init__(self, directory: str, rules: Rules) -> None:
        self.rules = rules
        self.name_s = self.attributes_s = self.kept_s = 1.0
        self.missing_s = self.kept_missing_s = 0.0
        self._lock = threading.RLock()
        root = Node(os.open(directory, os.O_PATH | os.O_DIRECTORY), "")
        self._nodes = {1: root}
        self._numbers: dict[tuple[int, int], int] = {}
        self._handles: dict[int, Handle] = {}
        self._names: set[tuple[int, str]] = set()  # that the kernel may keep
        self._known: dict[tuple[int, str], int] = {}  # nodes of names, as last seen
        self._missing: dict[tuple[int, str], float] = {}  # when a name was seen to be missing
        self._interrupted: set[int] = set()
        self._last_node, self._last_handle = 1, 0

    def answer(self, request: wire.Request) -> bytes:
        """Returns the body of the answer.

        Raises:
            OSError: the answer is this error. ENOSYS: the kernel does without such requests.
        """
        if (method := getattr(self, f"_{request.operation}", None)) is None:
            raise OSError(errno.ENOSYS, request.operation)
        self.rules.apply(request.operation, self._paths(request))
        body: bytes = method(request)
        return body

    def forget_all(self) -> tuple[list[int], list[tuple[int, str]]]:
        """Forgets what this client kept; returns nodes and names that the kernel is to forget."""
        with self._lock:
            self._missing.clear()
            self._known.clear()
            for node in self._nodes.values():
                node.forget()
            names = list(self._names)
            self._names.clear()
            return list(self._nodes), names

    def _paths(self, request: wire.Request) -> list[Place]:
        """Returns the paths that a request is about, from the root, and whether each is a file."""
        with self._lock:
            base = self._nodes[request.node]
        operation = request.operation
        if operation in ("lookup", "create", "mknod", "mkdir", "unlink", "rmdir"):
            return [self._told(base, request.names[0], operation)]
        if operation in ("rename", "rename2"):
            other = self._nodes[request.fields("Q")[0]]
            old, new = request.names[:2]
            path, is_file = self._told(base, old)
            return [(path, is_file), (_joined(other.path, new), is_file)]
        return [(base.path, not base.is_directory)]

    def _told(self, base: Node, name: str, operation: str = "lookup") -> Place:
        try:
            is_file = not stat.S_ISDIR(os.lstat(name, dir_fd=base.fd).st_mode)
        except OSError:  # there is none: what would be there
            is_file = operation in ("create", "mknod")
        return _joined(base.path, name), is_file

    def note(self, request: wire.Request) -> None:
        """Takes a request that has no answer: the kernel forgets nodes, or a caller ends."""
        if request.operation == "interrupt":
            self._interrupted.add(request.fields("Q")[0])
            return
        if request.operation == "forget":
            pairs = [(request.node, request.fields("Q")[0])]
        else:
            count = request.fields("I")[0]
            pairs = [struct.unpack_from("=QQ", request.body, 8 + 16 * n) for n in range(count)]
        with self._lock:
            for number, times in pairs:
                node = self._nodes[number]
                node.lookups -= times
                if node.lookups <= 0 and number != 1:
                    found = os.fstat(node.fd)
                    self._numbers.pop((found.st_dev, found.st_ino), None)
                    del self._nodes[number]
                    os.close(node.fd)

    # ---- Names ----------------------------------------------------------------------------------

    def _found(self, base: Node, number: int, name: str) -> bytes:
        """Returns the entry of a name that is there, counted as one more look-up."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=base.fd)
        found = os.fstat(fd)
        with self._lock:
            key = found.st_dev, found.st_ino
            if key in self._numbers:
                os.close(fd)
            else:
                self._last_node += 1
                self._numbers[key] = self._last_node
                self._nodes[self._last_node] = Node(fd, "")
            own = self._numbers[key]
            node = self._nodes[own]
            node.lookups += 1
            node.path = _joined(base.path, name)
            self._names.add((number, name))
            self._known[number, name] = own
        return wire.entry(own, node.seen(self.kept_s), self.name_s, self.attributes_s)

    def _lookup(self, request: wire.Request) -> bytes:
        base, name = self._nodes[request.node], request.names[0]
        key = request.node, name
        if time.monotonic() - self._missing.get(key, -1e9) < self.kept_missing_s:
            raise FileNotFoundError(errno.ENOENT, name)
        kept = self._kept_entry(key)
        if kept is not None:
            return kept
        try:
            self._missing.pop(key, None)
            return self._found(base, request.node, name)
        except FileNotFoundError:
            self._missing[key] = time.monotonic()
            self._known.pop(key, None)
            if self.missing_s:
                self._names.add(key)
                return wire.missing(self.missing_s)
            raise

    def _kept_entry(self, key: tuple[int, str]) -> bytes | None:
        """Returns what this client saw under a name, while it keeps the attributes of that."""
        with self._lock:
            number = self._known.get(key, 0)
            node = self._nodes.get(number)
            if node is None or not node.is_kept(self.kept_s):
                return None
            node.lookups += 1
        return wire.entry(number, node.seen(self.kept_s), self.name_s, self.attributes_s)

    def _made(self, request: wire.Request, make: Callable[[Node, str], object]) -> bytes:
        base, name = self._nodes[request.node], request.names[0]
        base.look()
        self._changes(request.node, name)
        make(base, name)
        return self._found(base, request.node, name)

    def _changes(self, number: int, name: str) -> None:
        """Forgets what was seen under a name: this client changes it."""
        self._missing.pop((number, name), None)
        self._known.pop((number, name), None)

    def _mkdir(self, request: wire.Request) -> bytes:
        mode = request.fields("I")[0]
        return self._made(request, lambda base, name: os.mkdir(name, mode, dir_fd=base.fd))

    def _mknod(self, request: wire.Request) -> bytes:
        mode = request.fields("I")[0]
        return self._made(request, lambda base, name: os.mknod(name, mode, dir_fd=base.fd))

    def _symlink(self, request: wire.Request) -> bytes:
        target = request.names[1]
        return self._made(request, lambda base, name: os.symlink(target, name, dir_fd=base.fd))

    def _link(self, request: wire.Request) -> bytes:
        other = self._nodes[request.fields("Q")[0]]
        return self._made(request, lambda base, name: os.link(other.proc, name, dst_dir_fd=base.fd))

    def _create(self, request: wire.Request) -> bytes:
        flags, mode = request.fields("II")
        fd = -1

        def make(base: Node, name: str) -> None:
            nonlocal fd
            kept = os.O_ACCMODE | os.O_CREAT | os.O_EXCL | os.O_TRUNC
            fd = os.open(name, flags & kept | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=base.fd)

        entry = self._made(request, make)
        node = self._nodes[struct.unpack_from("=Q", entry)[0]]
        node.forget()
        return entry + self._held(Handle(node, flags, fd))

    def _unlink(self, request: wire.Request) -> bytes:
        base, name = self._nodes[request.node], request.names[0]
        self._changes(request.node, name)
        self._open_all(base, name)
        os.unlink(name, dir_fd=base.fd)
        return b""

    def _open_all(self, base: Node, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(name, dir_fd=base.fd)
            node = self._nodes.get(self._numbers.get((found.st_dev, found.st_ino), 0))
            if node is not None:
                node.open_all()

    def _rmdir(self, request: wire.Request) -> bytes:
        self._changes(request.node, request.names[0])
        os.rmdir(request.names[0], dir_fd=self._nodes[request.node].fd)
        return b""

    def _rename(self, request: wire.Request) -> bytes:
        base, other = self._nodes[request.node], self._nodes[request.fields("Q")[0]]
        for one in (base, other):
            one.look()
        if request.operation == "rename2" and request.fields("QI")[1]:
            raise OSError(errno.EINVAL, "flags of renameat2")
        old, new = request.names[:2]
        self._changes(request.node, old)
        self._changes(request.fields("Q")[0], new)
        self._open_all(other, new)
        os.rename(old, new, src_dir_fd=base.fd, dst_dir_fd=other.fd)
        return b""

    _rename2 = _rename

    def _readlink(self, request: wire.Request) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=self._nodes[request.node].fd))

    # ---- Attributes -----------------------------------------------------------------------------

    def _getattr(self, request: wire.Request) -> bytes:
        found = self._nodes[request.node].seen(self.kept_s)
        return wire.attributes_answer(found, self.attributes_s)

    def _setattr(self, request: wire.Request) -> bytes:
        valid, _, number, size, _, *times = request.fields("IIQQQQQQIII")
        mode, _, uid, gid = struct.unpack_from("=IIII", request.body, 68)
        node = self._nodes[request.node]
        node.look()
        if valid & 1:
            os.chmod(node.proc, stat.S_IMODE(mode))
        if valid & 6:
            os.chown(node.proc, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            os.truncate(self._handles[number].fd() if valid & 64 else node.proc, size)
        if valid & (16 | 32):
            now = time.time_ns()
            past = os.stat(node.proc)
            accessed = now if valid & 128 else times[0] * 10**9 + times[3]
            changed = now if valid & 256 else times[1] * 10**9 + times[4]
            accessed = accessed if valid & 16 else past.st_atime_ns
            changed = changed if valid & 32 else past.st_mtime_ns
            os.utime(node.proc, ns=(accessed, changed))
        node.forget()
        return wire.attributes_answer(os.fstat(node.fd), self.attributes_s)

    def _statfs(self, request: wire.Request) -> bytes:
        return wire.statfs_answer(os.statvfs(self._nodes[1].proc))

    # ---- Open files -----------------------------------------------------------------------------

    def _held(self, handle: Handle) -> bytes:
        with self._lock:
            self._last_handle += 1
            self._handles[self._last_handle] = handle
            return struct.pack("=QII", self._last_handle, 0, 0)

    def _open(self, request: wire.Request) -> bytes:
        flags = request.fields("I")[0]
        self._nodes[request.node].promise()
        handle = Handle(self._nodes[request.node], flags)
        if flags & os.O_TRUNC:
            os.ftruncate(handle.fd(), 0)
            handle.node.forget()
        return self._held(handle)

    def _read(self, request: wire.Request) -> bytes:
        number, offset, size = request.fields("QQI")
        handle = self._handles[number]
        kept = handle.node.contents(handle, self.kept_s)
        if kept is not None:
            return kept[offset : offset + size]
        return os.pread(handle.fd(), size, offset)

    def _write(self, request: wire.Request) -> bytes:
        number, offset, size = request.fields("QQI")
        handle = self._handles[number]
        done = os.pwrite(handle.fd(), memoryview(request.body)[40 : 40 + size], offset)
        handle.node.forget()
        return struct.pack("=II", done, 0)

    def _fallocate(self, request: wire.Request) -> bytes:
        number, offset, nbytes, mode = request.fields("QQQI")
        if mode:
            raise OSError(errno.EOPNOTSUPP, "a mode of fallocate")
        handle = self._handles[number]
        os.posix_fallocate(handle.fd(), offset, nbytes)
        handle.node.forget()
        return b""

    def _flush(self, request: wire.Request) -> bytes:
        self._handles[request.fields("Q")[0]].fd()
        return b""

    _fsync = _flush  # a machine's loss is not played here

    def _release(self, request: wire.Request) -> bytes:
        with self._lock:
            handle = self._handles.pop(request.fields("Q")[0])
        handle.close()
        return b""

    # ---- Listings -------------------------------------------------------------------------------

    def _opendir(self, request: wire.Request) -> bytes:
        self._nodes[request.node].look()
        return self._held(Handle(self._nodes[request.node]))

    _releasedir = _release

    def _fsyncdir(self, request: wire.Request) -> bytes:
        return b""

    def _readdir(self, request: wire.Request) -> bytes:
        number, offset, size = request.fields("QQI")
        handle = self._handles[number]
        base = handle.node
        if offset == 0:
            base.look()
            handle.names = [".", "..", *os.listdir(base.proc)]
        rows = b""
        for place in range(offset, len(handle.names)):
            name = handle.names[place]
            if self.rules.is_left_out(self._told(base, name)):
                continue
            room = 160 + 8 * (len(os.fsencode(name)) // 8 + 1)
            if len(rows) + room > size:
                break
            rows += self._row(request, base, name, place + 1)
        return rows

    _readdirplus = _readdir

    def _row(self, request: wire.Request, base: Node, name: str, following: int) -> bytes:
        try:
            found = os.lstat(name, dir_fd=base.fd)
            head = b""
            if request.operation == "readdirplus":
                is_dot = name in (".", "..")
                head = wire.missing(0) if is_dot else self._found(base, request.node, name)
        except FileNotFoundError:
            return b""
        return wire.dirent(found.st_ino, following, found.st_mode, name, head)

    # ---- Locks ----------------------------------------------------------------------------------

    def _setlk(self, request: wire.Request) -> bytes:
        number, _, start, end, kind, _, flags = request.fields("QQQQIII")
        fd = self._handles[number].fd()
        if flags & 1:
            wanted = {0: fcntl.LOCK_SH, 1: fcntl.LOCK_EX, 2: fcntl.LOCK_UN}[kind]
            fcntl.flock(fd, wanted | fcntl.LOCK_NB)
        else:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wire.lock(kind, start, end))
        return b""

    def _setlkw(self, request: wire.Request) -> bytes:
        with self.rules.waiting():
            while request.unique not in self._interrupted:
                try:
                    return self._setlk(request)
                except BlockingIOError:
                    time.sleep(_BETWEEN_TRIES_S)
        raise InterruptedError(errno.EINTR, "the caller was interrupted")

    def _getlk(self, request: wire.Request) -> bytes:
        number, _, start, end, kind = request.fields("QQQQI")
        fd = self._handles[number].fd()
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wire.lock(kind, start, end))
        return wire.lock_answer(found)


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
