"""A small, fast S3 server: what a client costs is not hidden behind what the server costs.

    cd tests; python -m support.s3_server --mode drop --latency-ms 20 --core 1

Tests start it by `object_server.ObjectServer`, as strict as S3 (`--strict`), and benches by theirs.

Each connection has a thread. `keep` holds what it gets in memory. `drop` receives all bodies of
data objects (`*.distcp`) into one block, and serves that block's bytes, whatever they are by then,
at the right length. It knows PUT, GET, HEAD, DELETE and COPY of objects, multipart uploads,
ListObjectsV2 and DeleteObjects, with their conditions and ranges. It checks no signature and no
checksum, and its ETags are not MD5 sums. Strict, it has the buckets that were made and no others,
and takes no part of less than 5 MiB but the last.

GET /__stats__ tells requests by kind, bytes, and the server's own CPU seconds since the last POST
/__reset__ (`?latency_ms=20` sets the delay, `?empty=1` removes objects and uploads). Neither is
counted or delayed.
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import socket
import sys
import threading
import time
import urllib.parse
from http import HTTPStatus
from pathlib import Path
from typing import Any

from support.s3_bucket import BLOCK_BYTES, Answer, Blocks, Body, Bucket, Refusal, Request, kind_of

TESTS = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "support.s3_server"]  # in TESTS
DATA_SUFFIX = ".distcp"
VIEWS_AT_ONCE = 256  # of one sendmsg; the kernel takes 1024
HEAD_BYTES = 1 << 16


class Counts:
    """What was asked since the last reset. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self._requests: collections.Counter[str] = collections.Counter()
            self._refused: collections.Counter[str] = collections.Counter()
            self._received = self._sent = 0
            self._began = time.perf_counter(), time.process_time()

    def add(self, kind: str, received: int, sent: int, status: int) -> None:
        with self._lock:
            self._requests[kind] += 1
            self._received += received
            self._sent += sent
            if status >= 300:
                self._refused[str(status)] += 1

    def read(self) -> dict[str, Any]:
        with self._lock:
            return {
                "requests": dict(self._requests),
                "refused": dict(self._refused),
                "bytes_received": self._received,
                "bytes_sent": self._sent,
                "wall_s": time.perf_counter() - self._began[0],
                "cpu_s": time.process_time() - self._began[1],
            }


class State:
    """What all connections share."""

    def __init__(
        self, mode: str, latency_s: float, memory_bytes: int, *, is_strict: bool = False
    ) -> None:
        self.mode, self.latency_s = mode, latency_s
        self.blocks, self.bucket, self.counts = Blocks(memory_bytes), Bucket(is_strict), Counts()
        self.connections = 0

    def control(self, path: str, query: dict[str, str]) -> Answer:
        """Answers /__stats__ and /__reset__."""
        if path == "/__reset__":
            if "latency_ms" in query:
                self.latency_s = float(query["latency_ms"]) / 1000
            if query.get("empty", "0") != "0":
                self.bucket = Bucket(self.bucket.is_strict)
            self.counts.reset()
        found = {
            **self.counts.read(),
            "mode": self.mode,
            "latency_ms": self.latency_s * 1000,
            "objects": len(self.bucket.objects),
            "open_uploads": len(self.bucket.uploads),
            "connections": self.connections,
            "memory_bytes": self.blocks.nbytes,
        }
        data = memoryview(json.dumps(found).encode())
        return Answer(200, {"Content-Type": "application/json"}, [data])


class Connection:
    """One client's connection: requests in, answers out, one after the other."""

    def __init__(self, sock: socket.socket, state: State) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._state = sock, state
        self._buffer = bytearray(HEAD_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what of the buffer is not yet used

    def serve(self) -> None:
        self._state.connections += 1
        try:
            while self._serve_one():
                pass
        except ConnectionError:
            pass  # the client is gone
        finally:
            self._state.connections -= 1
            self._sock.close()

    def _serve_one(self) -> bool:
        """Returns whether the connection stays open."""
        head = self._read_head()
        if head is None:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        path, _, text = target.partition("?")
        query = dict(urllib.parse.parse_qsl(text, keep_blank_values=True)) if text else {}
        if headers.get("expect", "").lower() == "100-continue":
            self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        is_dropped = self._state.mode == "drop" and method == "PUT" and path.endswith(DATA_SUFFIX)
        body = self._read_body(headers, is_dropped)
        if path in ("/__stats__", "/__reset__"):
            self._send(self._state.control(path, query))
            return True
        bucket, _, key = urllib.parse.unquote(path).lstrip("/").partition("/")
        kind = kind_of(method, key, query, headers)
        try:
            answer = self._state.bucket.answer(
                kind, Request(method, bucket, key, query, headers, body)
            )
        except Refusal as error:
            text = f"<Code>{error.code}</Code><Message>{error.code} {path}</Message>"
            answer = Answer.xml("Error", text, error.status)
        sent = sum(map(len, answer.views))
        self._state.counts.add(kind, body.nbytes, sent, answer.status)
        if self._state.latency_s:
            time.sleep(self._state.latency_s)
        self._send(answer if method != "HEAD" else answer._replace(views=()))
        return headers.get("connection", "").lower() != "close"

    def _read_head(self) -> bytes | None:
        """Returns a request's line and headers; None where the client has closed."""
        while True:
            found = self._buffer.find(b"\r\n\r\n", self._start, self._end)
            if found >= 0:
                head = bytes(self._view[self._start : found])
                self._start = found + 4
                return head
            if not self._fill():
                return None

    def _fill(self) -> int:
        """Receives more into the buffer, once what it holds has moved to its front."""
        if self._start:
            held = self._end - self._start
            self._view[:held] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, held
        if self._end == HEAD_BYTES:
            raise ConnectionError("a head or a line is longer than the buffer")
        received = self._sock.recv_into(self._view[self._end :])
        self._end += received
        return received

    def _read_into(self, view: memoryview) -> None:
        held = min(self._end - self._start, len(view))
        if held:
            view[:held] = self._view[self._start : self._start + held]
            self._start += held
        while held < len(view):
            received = self._sock.recv_into(view[held:], 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionError("closed within a body")
            held += received

    def _read_line(self) -> bytes:
        while (found := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if not self._fill():
                raise ConnectionError("closed within a body")
        line = bytes(self._view[self._start : found])
        self._start = found + 2
        return line

    def _read_body(self, headers: dict[str, str], is_dropped: bool) -> Body:
        is_aws_chunked = headers.get("x-amz-content-sha256", "").startswith("STREAMING-")
        if headers.get("transfer-encoding", "").lower() == "chunked":
            data = self._read_chunks()
        elif not is_aws_chunked:
            return self._read_plain(int(headers.get("content-length", 0)), is_dropped)
        else:
            data = bytes(self._read_plain(int(headers["content-length"]), False))
        if is_aws_chunked:
            data = decode_chunks(data)
        return Body([memoryview(data)])

    def _read_plain(self, nbytes: int, is_dropped: bool) -> Body:
        blocks = self._state.blocks
        whole, rest = divmod(nbytes, BLOCK_BYTES)
        views = [blocks.shared if is_dropped else blocks.take() for _ in range(whole)]
        if rest:
            views.append(blocks.shared[:rest] if is_dropped else memoryview(bytearray(rest)))
        body = Body(views, None if is_dropped else blocks)  # from here on it gives them back
        for view in views:
            self._read_into(view)
        return body

    def _read_chunks(self) -> bytes:
        """Returns a body of HTTP's own chunks."""
        data = bytearray()
        while nbytes := int(self._read_line().partition(b";")[0], 16):
            data += bytes(self._read_plain(nbytes, False))
            self._read_line()
        while self._read_line():
            pass  # trailers
        return bytes(data)

    def _send(self, answer: Answer) -> None:
        nbytes = sum(map(len, answer.views)) if answer.nbytes is None else answer.nbytes
        lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        if answer.status not in (204, 304):
            lines.append(f"Content-Length: {nbytes}")
        head = memoryview("\r\n".join([*lines, "", ""]).encode("latin-1"))
        views = [head, *answer.views]
        for at in range(0, len(views), VIEWS_AT_ONCE):
            some = views[at : at + VIEWS_AT_ONCE]
            sent = self._sock.sendmsg(some)
            for view in some:  # a signal may cut a send short
                if sent < len(view):
                    self._sock.sendall(view[sent:])
                sent = max(0, sent - len(view))


def decode_chunks(data: bytes) -> bytes:
    """Returns the content of an aws-chunked body, without signatures and trailers."""
    source, found = io.BytesIO(data), bytearray()
    while nbytes := int(source.readline().partition(b";")[0], 16):
        found += source.read(nbytes)
        source.readline()
    return bytes(found)


def wait_for_end() -> None:
    """Ends the process when whoever started it is gone."""
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=("keep", "drop"), default="keep")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="before each answer")
    parser.add_argument("--memory-mib", type=int, default=0, help="touched before the first PUT")
    parser.add_argument("--core", type=int, help="the core to stay on (default: any)")
    parser.add_argument("--port", type=int, default=0, help="(default: a free one, printed)")
    parser.add_argument("--strict", action="store_true", help="ask what S3 asks of buckets, parts")
    parser.add_argument("--until-eof", action="store_true", help="end when stdin closes")
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    memory_bytes = args.memory_mib << 20
    state = State(args.mode, args.latency_ms / 1000, memory_bytes, is_strict=args.strict)
    listener = socket.create_server(("127.0.0.1", args.port), backlog=1024)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    if args.until_eof:
        threading.Thread(target=wait_for_end, daemon=True).start()
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=Connection(sock, state).serve, daemon=True).start()


if __name__ == "__main__":
    main()
