"""A client's connection to the fault proxy: HTTP/1.1, relayed to the server or broken off."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http.client import HTTPMessage, HTTPResponse
from typing import TYPE_CHECKING

from support.object_requests import REFUSALS, Request, read_request, refusal, with_one_key

if TYPE_CHECKING:
    from support.object_proxy import FaultProxy

_BLOCK_BYTES = 1 << 18
_UPSTREAM_S = 300.0
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}


@dataclass
class Record:
    """A request as far as it has come; the proxy's `note` replaces it."""

    request: Request


class Connection:
    """A client's connection: one request after the other, on a connection to the server each.

    Only `cut` may be called by another thread.
    """

    def __init__(self, proxy: FaultProxy, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._proxy = proxy
        self._client = client
        self._reader = io.BufferedReader(socket.SocketIO(client, "r"), _BLOCK_BYTES)
        self._upstream = http.client.HTTPConnection(
            proxy.server.host, proxy.server.port, timeout=_UPSTREAM_S
        )

    def serve(self) -> bool:
        """Serves requests until the client has no more; returns whether to reset the connection."""
        while line := self._reader.readline(_BLOCK_BYTES):
            method, target, _ = line.decode("latin-1").split()
            headers = http.client.parse_headers(self._reader)
            end = self._exchange(method, target, headers)
            if end:
                return end == "reset"
        return False

    def cut(self) -> None:
        for connection in (self._client, self._upstream.sock):
            if connection is not None:
                with contextlib.suppress(OSError):  # its end came first
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self, *, is_reset: bool) -> None:
        """Ends it; with `is_reset` the client's next call fails with ECONNRESET."""
        if is_reset:
            self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._reader.close()
        self._client.close()
        self._upstream.close()

    def _exchange(self, method: str, target: str, headers: HTTPMessage) -> str:
        """Serves one request; returns "reset" or "close" where the connection ends with it."""
        record, how, seconds = self._proxy.begin(read_request(method, target, headers))
        if headers.get("Expect"):
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if how == "delay" and self._proxy.closing.wait(seconds):
            return "reset"  # what close() cut off is lost, not let through
        body = self._body(int(headers.get("Content-Length", "0")), record)
        end = "close" if headers.get("Connection", "").lower() == "close" else ""
        if how == "reset" or how in REFUSALS:
            for _ in body:
                pass
            if how == "reset":
                return "reset"
            self._refuse(how, method, record)
            return end
        if how == "partial_list":
            target = with_one_key(target)
        is_kept = False
        try:
            answer = self._forward(method, target, headers, body)
            self._proxy.note(record, status=answer.status)
            how = self._proxy.after(record)
            if how == "done_500":
                self._refuse("500", method, record)
                return end
            end = self._relay(answer, how, record) or end
            is_kept = self._proxy.server.keeps_connections
            return end
        finally:
            if not is_kept:
                self._upstream.close()

    def _body(self, length: int, record: Record) -> Iterator[bytes]:
        """Gives the client's body in blocks. Raises ConnectionError: it has gone."""
        left = length
        while left:
            block = self._reader.read1(min(left, _BLOCK_BYTES))
            if not block:
                raise ConnectionError(f"the client sent {length - left} B of {length}")
            left -= len(block)
            self._proxy.note(record, sent_bytes=length - left)
            yield block

    def _forward(
        self, method: str, target: str, headers: HTTPMessage, body: Iterable[bytes]
    ) -> HTTPResponse:
        """Has the server do the request; its body goes there while it comes."""
        self._upstream.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            if name.lower() not in _HOP_BY_HOP:
                self._upstream.putheader(name, value)
        self._upstream.endheaders()
        for block in body:
            self._upstream.send(block)
        return self._upstream.getresponse()

    def _relay(self, answer: HTTPResponse, how: str, record: Record) -> str:
        """Sends the client the server's answer, or what the fault leaves of it; as `_exchange`."""
        headers = {name: value for name, value in answer.getheaders()
                   if name.lower() not in _HOP_BY_HOP}  # fmt: skip
        length = answer.length
        if length is None:  # it came in chunks
            whole = answer.read()
            length, blocks = len(whole), iter([whole])
        else:
            blocks = iter(lambda: answer.read(_BLOCK_BYTES), b"")
        if how == "lost_answer" or (how in ("truncate", "flip") and not length):
            for _ in blocks:
                pass
            return "reset"
        if how == "flip":
            blocks = _flipped(blocks, length // 2)
        if how == "truncate":
            blocks = _first(blocks, length // 2)
        self._proxy.note(record, received_bytes=length // 2 if how == "truncate" else length)
        if answer.status != 204 and answer.getheader("Content-Length") is None:
            headers["Content-Length"] = str(length)
        self._send(answer.status, headers, blocks)
        return "close" if how == "truncate" else ""

    def _refuse(self, fault: str, method: str, record: Record) -> None:
        status, text = refusal(fault)
        self._proxy.note(record, status=status, received_bytes=len(text))
        headers = {"Content-Type": "application/xml", "Content-Length": str(len(text))}
        self._send(status, headers, [] if method == "HEAD" else [text])

    def _send(self, status: int, headers: dict[str, str], blocks: Iterable[bytes]) -> None:
        lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, '')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        waiting = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        for block in blocks:
            self._client.sendall(waiting + block)
            waiting = b""
        self._client.sendall(waiting)


def _first(blocks: Iterable[bytes], length: int) -> Iterator[bytes]:
    """Gives the first `length` bytes."""
    for block in blocks:
        yield block[:length]
        length = max(0, length - len(block))


def _flipped(blocks: Iterable[bytes], at: int) -> Iterator[bytes]:
    """Gives the blocks with the lowest bit of byte `at` flipped."""
    for block in blocks:
        if 0 <= at < len(block):
            yield block[:at] + bytes([block[at] ^ 1]) + block[at + 1 :]
        else:
            yield block
        at -= len(block)
