"""The S3 server of benches answers as S3 does, and they run on it. No test asks how fast."""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

obstore = pytest.importorskip("obstore")

from object_server import BLOCK_BYTES, GROWTH_BYTES, ObjectServer, make_store  # noqa: E402
from support.warm import warm_parent  # noqa: E402


class Connection:
    """One connection to the server, which is kept between requests."""

    def __init__(self, server: ObjectServer) -> None:
        self._kept = http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=60)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        self._kept.request(method, path, body, names)
        found = self._kept.getresponse()
        return found.status, found.read()

    def close(self) -> None:
        self._kept.close()


@pytest.fixture(scope="module")
def _running() -> Iterator[ObjectServer]:
    with ObjectServer(mode="keep") as running:
        yield running


@pytest.fixture
def server(_running: ObjectServer) -> ObjectServer:
    _running.reset(latency_ms=0, is_empty=True)
    return _running


@pytest.fixture
def connection(server: ObjectServer) -> Iterator[Connection]:
    made = Connection(server)
    yield made
    made.close()


def test_a_multipart_upload_is_read_back_in_any_range_and_its_memory_serves_again(
    server: ObjectServer,
) -> None:
    store, data = make_store(server.endpoint), os.urandom(3 * BLOCK_BYTES + 17)
    view = memoryview(data)
    parts = [view[at : at + BLOCK_BYTES + 1] for at in range(0, len(view), BLOCK_BYTES + 1)]
    before = server.stats()["memory_bytes"]
    for _ in range(20):
        obstore.put(store, "a/b.distcp", iter(parts), chunk_size=BLOCK_BYTES + 1)
    middle = BLOCK_BYTES + 5
    for wanted in ((0, 1), (7, middle), (middle, len(data)), {"offset": middle}, {"suffix": 9}):
        answer = obstore.get(store, "a/b.distcp", options={"range": wanted})
        start, stop = answer.range
        assert bytes(answer.bytes()) == data[start:stop] and stop > start
    stats = server.stats()
    assert stats["requests"]["UploadPart"] == 20 * len(parts)
    assert stats["bytes_received"] >= 20 * len(data)
    assert stats["memory_bytes"] - before <= GROWTH_BYTES < 20 * len(data) // 2
    assert (stats["objects"], stats["open_uploads"]) == (1, 0)


# ---- What obstore does not send ----------------------------------------------------------------


def test_chunked_bodies_are_stored_without_their_frames(connection: Connection) -> None:
    chunks = (
        b"5;chunk-signature=abc\r\nhello\r\n3\r\n, w\r\n0\r\nx-amz-checksum-crc32:AAAA==\r\n\r\n"
    )
    headers = {"x_amz_content_sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"}
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunks), chunks)
    for body, more in ((chunks, {}), (framed, {"transfer_encoding": "chunked"})):
        assert connection.ask("PUT", "/b/a", body, **headers, **more)[0] == 200
        assert connection.ask("GET", "/b/a")[1] == b"hello, w"


def test_each_request_gets_its_status(connection: Connection) -> None:
    connection.ask("PUT", "/b/a", b"1234")
    wanted: list[tuple[str, str, dict[str, str], int]] = [
        ("GET", "/b/none", {}, 404),
        ("HEAD", "/b/none", {}, 404),
        ("PUT", "/b/none", {"if_match": '"1"'}, 404),
        ("PUT", "/b/a?partNumber=1&uploadId=none", {}, 404),
        ("GET", "/b/a", {"range": "bytes=4-"}, 416),
        ("GET", "/b/a", {"range": "bytes=-0"}, 416),
        ("GET", "/b/a", {"range": "bytes=1-9"}, 206),
        ("DELETE", "/b/none", {}, 200),
        ("PATCH", "/b/a", {}, 501),
    ]
    found = [
        (method, path, headers, connection.ask(method, path, **headers)[0])
        for method, path, headers, _ in wanted
    ]
    assert found == wanted
    assert connection.ask("GET", "/b/a") == (200, b"1234")  # the connection goes on


# ---- Modes, counts and benches -----------------------------------------------------------------


def test_drop_keeps_the_lengths_of_data_and_the_bytes_of_all_else() -> None:
    with ObjectServer(mode="drop") as server:
        store, data = make_store(server.endpoint), os.urandom(2 * BLOCK_BYTES + 3)
        obstore.put(store, "a.distcp", data)
        obstore.put(store, ".metadata", data)
        assert len(obstore.get(store, "a.distcp").bytes()) == len(data)
        assert bytes(obstore.get(store, ".metadata").bytes()) == data


def test_a_reset_sets_counts_and_latency_and_may_remove_all(
    server: ObjectServer, connection: Connection
) -> None:
    connection.ask("PUT", "/b/a", b"1")
    assert server.stats()["requests"] == {"PutObject": 1}
    server.reset(latency_ms=30)
    began = time.perf_counter()
    connection.ask("GET", "/b/a")
    assert time.perf_counter() - began >= 0.03
    server.reset(latency_ms=0, is_empty=True)
    stats = server.stats()
    assert (stats["requests"], stats["objects"], stats["latency_ms"]) == ({}, 0, 0)


def rows_of(script: str, *arguments: str) -> list[list[str]]:
    """Runs a bench; returns the rows of its table."""
    command = [str(Path(__file__).with_name(script)), *arguments, "--rounds", "1"]
    done = warm_parent().run(
        [*command, "--latency-ms", "0"], env=dict(os.environ), cwd=Path.cwd(), timeout_s=300
    )
    assert done.returncode == 0, done.stderr
    return [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]


def test_sides_are_timed_beside_obstore_alone() -> None:
    rows = rows_of("objects.py", "--scale", "256", "--slow-rounds", "0")
    sides = [
        ("save", "obstore alone"), ("save", "dcpx.save"), ("save", "dcp.save, DcpxWriter"),
        ("load", "obstore alone"), ("load", "dcpx.load"), ("load", "dcp.load, DcpxReader"),
    ]  # fmt: skip
    found = [(row[0], row[1], row[3]) for row in rows]
    assert found == [(case, *side) for case in ("large", "small") for side in sides]
    assert all(float(row[4].split()[0]) > 0 for row in rows)


def test_gaps_are_read_over_and_apart() -> None:
    rows = rows_of("object_gaps.py", "--mib", "8", "--gaps-kib", "64", "256")
    assert [row[0] for row in rows] == ["64 KiB", "256 KiB"]
    assert all(float(row[1].split()[0]) > 0 for row in rows)
