"""A link of so many bytes a second to a store, in each direction, that all connections share."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.parse

_BLOCK_BYTES = 16 << 10


class SlowLink:
    """Relays connections to the server at a URL. `close` ends them all."""

    def __init__(self, url: str, bytes_per_s: float) -> None:
        there = urllib.parse.urlparse(url)
        self._there = there.hostname or "", there.port or 0
        self._bytes_per_s = bytes_per_s
        self._guard = threading.Lock()
        self._free_at = {True: 0.0, False: 0.0}  # of each direction
        self.sent = self.received = 0  # bytes, as the client sees them
        self._listener = socket.socket()
        # Else the kernel takes megabytes that have not gone anywhere.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):  # it has ended by itself
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._there)
                self._sockets += [near, far]
                for pair in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, dest: socket.socket, is_sent: bool) -> None:
        with contextlib.suppress(OSError):  # the other end is gone
            while data := source.recv(_BLOCK_BYTES):
                with self._guard:
                    free_at = max(time.monotonic(), self._free_at[is_sent])
                    self._free_at[is_sent] = free_at = free_at + len(data) / self._bytes_per_s
                    self.sent += len(data) * is_sent
                    self.received += len(data) * (not is_sent)
                time.sleep(max(0.0, free_at - time.monotonic()))
                dest.sendall(data)
        for one in (source, dest):
            with contextlib.suppress(OSError):  # closed
                one.shutdown(socket.SHUT_RDWR)
