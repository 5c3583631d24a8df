"""Who holds the root of a manager: what its record says of a process, and whether that still runs.

A process is known by its pid, when it began, and whose pid that is: of which boot of which
machine, in which container. Of other machines' nothing can be proved: `root_lock.py` watches
whether the record is renewed.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import uuid
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch_dcpx.storage.save_lock import UNKNOWN_BOOT, boot_id

_FORMAT = 1
_INODE = "inode:"  # at the beginning of `identity_of` of a directory
_OVER = frozenset("ZX")  # states of a process that holds nothing any more


class Holder(NamedTuple):
    """A process that holds a root, as its record says."""

    token: str  # new with each time that a lock is taken
    root: str  # by its `identity_of`: a record that names another root was copied with that
    host: str
    pid: int
    start: str  # of the process, in ticks since the boot; "": unknown
    boot: str
    space: str  # in which the pid counts; "": unknown
    since: str  # by that machine's clock: for people
    renewed: str  # as `since`; nobody compares it with another clock
    has_flock: bool = False  # it holds a flock on the record as long as it lives
    is_over: bool = False  # it has given the root back

    def __str__(self) -> str:
        return f"host={self.host} pid={self.pid} since={self.since}"

    @classmethod
    def own(cls, root: str) -> Holder:
        """Returns one for this process, from now on."""
        pid, now = os.getpid(), now_text()
        start, token = _start_of(pid) or "", uuid.uuid4().hex
        space, host = _own_space(), socket.gethostname()
        return cls(token, root, host, pid, start, boot_id(), space, now, now)

    @classmethod
    def decoded(cls, record: bytes) -> Holder | None:
        """Returns the holder that a record names; None of anything else."""
        try:
            found = json.loads(record)
            holder = cls(**{name: found[name] for name in cls._fields})
            is_ours = found["format"] == _FORMAT
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        wanted = (str, str, str, int, str, str, str, str, str, bool, bool)
        return holder if is_ours and tuple(map(type, holder)) == wanted else None

    def encoded(self) -> bytes:
        """Returns the line that `decoded` reads."""
        return json.dumps({"format": _FORMAT, **self._asdict()}).encode() + b"\n"

    @property
    def is_this_process(self) -> bool:
        """Whether this very process has written the record."""
        own = os.getpid(), _start_of(os.getpid()) or ""
        return (self.pid, self.start) == own and self._is_near

    @property
    def _is_near(self) -> bool:
        """Whether its pid means the same process here."""
        return self._is_of_this_boot and self.space == _own_space() != ""

    @property
    def _is_of_this_boot(self) -> bool:
        return self.boot == boot_id() != UNKNOWN_BOOT

    def is_of(self, root: str) -> bool:
        """Whether its root is this one, perhaps by another mount: its inode, or the store's URL."""
        ours, _, _ = root.partition("@") if root.startswith(_INODE) else (root, "", "")
        return self.root == root or (ours != root and self.root.startswith(f"{ours}@"))

    def fate(self, is_locked: bool | None, root: str) -> Literal["alive", "gone", "unknown"]:
        """Returns what can be proved of the process, as a holder of a root.

        Args:
            is_locked: whether somebody has a flock on the record; None: not known.
            root: by its `identity_of`.
        """
        if not self._is_of_this_boot:
            return "unknown"  # it may know this very root by another number; who lives renews
        if self.has_flock and is_locked:
            return "alive"
        if not self.is_of(root):
            return "gone"  # a copy
        # A mount of a file system without an id may not show the flocks of another one.
        is_one_mount = self.root == root and not root.endswith("@0")
        if self.has_flock and is_locked is False and is_one_mount:
            return "gone"  # its pid may live on behind an exec
        if self._is_near:
            return "alive" if _is_running(self.pid, self.start) else "gone"
        return "unknown"


def now_text() -> str:
    """Returns the time by this machine's clock, "2026-01-31T23:59:59.999Z"."""
    seconds, rest = divmod(time.time_ns() // 1_000_000, 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest:03}Z"


@cache
def _own_space() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _is_running(pid: int, start: str) -> bool:
    """Returns whether the process `pid` runs that began at `start`; True where nobody can tell."""
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", errno.ESRCH) == errno.ESRCH:
            return False
    found = _start_of(pid)
    return found != "" and (found is None or not start or found == start)


def _start_of(pid: int) -> str | None:
    """Returns when a process began; "" of one that has ended, None where nobody can tell."""
    try:
        status: Any = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if status[0] in _OVER else str(status[19])
    except (OSError, IndexError):
        return None
