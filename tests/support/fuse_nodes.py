"""The nodes and open files of one client: what it knows, and what it saw of each."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time

_SMALL_BYTES = 1 << 16  # files whose contents are kept with their attributes


class GoneError(OSError):
    """What another client has taken away: ESTALE, or `code` of other file systems."""

    code = errno.ESTALE

    def __init__(self) -> None:
        super().__init__(self.code, "another client took it away")


class Node:
    """One file or directory that the kernel knows: it stays the same one under another name."""

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd  # O_PATH: while it is open, its inode's number is not given again
        self.path = path  # as last looked up, from the root
        self.is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        self.lookups = 0
        self.handles: set[Handle] = set()
        self._is_promised = False  # a file that has gone was opened without asking
        self._kept_at = -1e9
        self._kept: os.stat_result | None = None
        self._contents: bytes | None = None

    @property
    def proc(self) -> str:
        return f"/proc/self/fd/{self.fd}"

    def look(self) -> os.stat_result:
        """Returns its attributes now.

        Raises:
            GoneError: no name leads to it, and no file of this client that it has used does.
        """
        found = os.fstat(self.fd)
        if found.st_nlink == 0 and not any(handle.is_open for handle in self.handles):
            raise GoneError
        return found

    def seen(self, kept_s: float) -> os.stat_result:
        """Returns its attributes as this client sees them: kept for `kept_s` since it looked."""
        if not self.is_kept(kept_s):
            self._kept, self._kept_at, self._contents = self.look(), time.monotonic(), None
        assert self._kept is not None
        return self._kept

    def contents(self, handle: Handle, kept_s: float) -> bytes | None:
        """Returns the bytes that are kept with its attributes; None: they are to be read."""
        if self._kept is None or not self.is_kept(kept_s) or self._kept.st_size > _SMALL_BYTES:
            return None
        if self._contents is None:
            self._contents = os.pread(handle.fd(), self._kept.st_size, 0)
        return self._contents

    def forget(self) -> None:
        """Ends what is kept: this client changes it, or its time is over."""
        self._kept = self._contents = None

    def open_all(self) -> None:
        """Opens the files that were only promised: this client takes the name away."""
        for handle in list(self.handles):
            handle.fd()

    def is_kept(self, kept_s: float) -> bool:
        """True for a file at which this client looked within `kept_s`."""
        if self._kept is None or self.is_directory:
            return False
        return time.monotonic() - self._kept_at < kept_s

    def promise(self) -> None:
        """Takes an open, which asks nobody; raises what the one before heard meanwhile."""
        if os.fstat(self.fd).st_nlink == 0:
            if self._is_promised:
                raise GoneError
            self._is_promised = True


class Handle:
    """An open file, which is opened in the directory when it is first used; or a listing."""

    def __init__(self, node: Node, flags: int = 0, fd: int = -1) -> None:
        self.node = node
        self.names: list[str] = []
        self._flags, self._fd = flags, fd
        self._lock = threading.Lock()
        node.handles.add(self)

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def fd(self) -> int:
        """Returns the descriptor of the file in the directory.

        Raises:
            GoneError: nobody had used this one when another client took the file away.
        """
        with self._lock:
            if self._fd < 0:
                if os.fstat(self.node.fd).st_nlink == 0:
                    raise GoneError
                self._fd = os.open(self.node.proc, self._flags & os.O_ACCMODE | os.O_CLOEXEC)
            return self._fd

    def close(self) -> None:
        self.node.handles.discard(self)
        if self._fd >= 0:
            os.close(self._fd)
