"""Measures the link to a store: how many bytes may be under way at a time, and if any move.

obstore shows no progress of a request. The kernel does: it counts what each socket has received and
its other end acknowledged. Nobody says whose request a socket carries. So what counts is what
lasts: bytes of one way alone, in two looks. A small request beside one that is stuck, such as the
renewal of a root's record, sends and receives.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

MIB = 1 << 20
# Under way, until it is known how long they take.
_FIRST_BYTES = 32 * MIB
_FIRST_READ_BYTES = 64 * MIB
_QUICK_S = 5.0  # bytes that take less let more be under way
_SLOW_S = 15.0  # bytes that take longer let less
_AIM_S = 10.0
_LOOK_S = 0.1
_SAMPLE_S = 0.25
_PAGE_BYTES = 64 << 10  # of a page of a long listing, or more
_USER_TIMEOUT_MS = 30_000  # which obstore's client sets its sockets, and hardly anybody else
_TCP_INFO = struct.Struct("=120xQQ")  # struct tcp_info: tcpi_bytes_acked, tcpi_bytes_received


class Window:
    """Bounds the bytes under way, by how long those before took. Thread-safe."""

    def __init__(self, first_bytes: int = _FIRST_BYTES) -> None:
        self.nbytes = first_bytes
        self._taken_bytes = 0
        self._changed = threading.Condition()
        self._cut_at = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether less may be under way than at first."""
        return self.nbytes < _FIRST_BYTES

    def take(self, nbytes: int, may_go: Callable[[], bool]) -> None:
        """Waits until so many more bytes may be under way; one request always may.

        Args:
            may_go: is asked now and then; True ends the wait.
        """
        with self._changed:
            while self._taken_bytes and self._taken_bytes + nbytes > self.nbytes:
                self._changed.wait(_LOOK_S)
                if may_go():
                    break
            self._taken_bytes += nbytes

    def give_back(self, nbytes: int, took_s: float | None = None) -> None:
        """Says that so many bytes are under way no more.

        Args:
            took_s: how long they were; None: they were given up.
        """
        with self._changed:
            is_full = 2 * self._taken_bytes > self.nbytes
            self._taken_bytes -= nbytes
            if took_s is not None and took_s < _QUICK_S:
                self.nbytes += nbytes if is_full else 0  # else it would forget what the link takes
            elif took_s is not None and took_s > _SLOW_S:
                now = time.monotonic()
                if now - self._cut_at > took_s:  # these were under way since the last cut
                    self._cut_at = now
                    self.nbytes = max(int(self.nbytes * _AIM_S / took_s), MIB)
            self._changed.notify_all()


class Sending(Protocol):
    """An upload under way."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that the store does not have yet, and that need nothing more of us."""


class Link:
    """Counts what is under way to and from one store. Thread-safe."""

    def __init__(self, endpoint: str = "") -> None:
        """Looks at nothing yet.

        Args:
            endpoint: the store's URL; "": not known, as of AWS, which has many addresses.
        """
        self.sending, self.reading = Window(), Window(_FIRST_READ_BYTES)
        self.uploads: set[Sending] = set()
        self._endpoint = endpoint
        self._peer: _Peer | None = None  # the store's address, where it has one and that matters
        self._guard = threading.Lock()
        self._counts: dict[str, _Count] = {}
        self._ways: dict[str, tuple[bool, bool]] = {}  # of the last bytes: sent, received
        self._looked_at = self._moved_at = self._listed_at = 0.0
        _links.add(self)

    def find_peer(self) -> None:
        """Finds the store's address once other stores are in use. It may wait for a server of
        names.
        """
        if self._endpoint and len(_links) > 1:
            parts = urlsplit(self._endpoint)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            with contextlib.suppress(OSError):  # obstore says so
                rows = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
                self._endpoint = ""
                found = {str(row[4][0]) for row in rows}
                if len(found) == 1:  # of many the next question may bring others
                    self._peer = found.pop(), port

    def _other_peers(self) -> set[_Peer]:
        """Returns addresses that are surely of other stores."""
        if self._peer is None:
            return set()
        return {link._peer for link in list(_links) if link._peer is not None} - {self._peer}

    def is_sending(self) -> bool:
        """Whether some upload has bytes under way."""
        return any(upload.sent_bytes for upload in list(self.uploads))

    def moved_at(self) -> float:
        """Returns when bytes have last moved, by `time.monotonic()`, as far as looks have shown it.
        It takes three looks.

        A new connection proves nothing: the kernel takes its first bytes for a stopped process.
        """
        self._look()
        return self._moved_at

    def listed_at(self) -> float:
        """Returns the same for a long listing, of which each page is a request."""
        self._look()
        return max(self._moved_at, self._listed_at)

    def _look(self) -> None:
        now = time.monotonic()
        if not self._guard.acquire(blocking=False):
            return  # another thread looks, or this one in a signal's handler
        try:
            if now - self._looked_at >= _SAMPLE_S:
                before, self._counts = self._counts, _counts_of_sockets(self._other_peers())
                self._looked_at = now
                self._note_moves(before, now)
        finally:
            self._guard.release()

    def _note_moves(self, before: dict[str, _Count], now: float) -> None:
        self._ways = {one: way for one, way in self._ways.items() if one in self._counts}
        for one in self._counts.keys() & before.keys():
            sent, received = (
                new - old for new, old in zip(self._counts[one], before[one], strict=True)
            )
            way = sent > 0, received > 0
            if any(way):
                if not all(way) and self._ways.get(one) == way:
                    self._moved_at = now
                if received >= _PAGE_BYTES:
                    self._listed_at = now
                self._ways[one] = way


_Peer = tuple[str, int]  # address and port
_Count = tuple[int, int]  # bytes that were acknowledged, and received
_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _counts_of_sockets(passed: set[_Peer]) -> dict[str, _Count]:
    """Returns the bytes of obstore's sockets but those to the addresses of other stores."""
    found: dict[str, _Count] = {}
    paths: list[Path] = []
    with contextlib.suppress(OSError):  # no descriptor is left
        paths.extend(Path("/proc/self/fd").iterdir())
    for path in paths:
        with contextlib.suppress(OSError):  # it is closed by now, or no socket of TCP
            link = str(path.readlink())
            if not link.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as own:
                level = socket.IPPROTO_TCP
                if own.getsockopt(level, socket.TCP_USER_TIMEOUT) == _USER_TIMEOUT_MS:
                    text = own.getsockopt(level, socket.TCP_INFO, _TCP_INFO.size)
                    if len(text) == _TCP_INFO.size and own.getpeername()[:2] not in passed:
                        found[link] = _TCP_INFO.unpack(text)
    return found
