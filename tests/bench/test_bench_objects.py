"""The S3 server of benches answers as S3 does, and they run on it. No test asks how fast."""

from __future__ import annotations

import http.client
import os
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

obstore = pytest.importorskip("obstore")

from object_probe import make_store  # noqa: E402
from object_server import BLOCK_BYTES, GROWTH_BYTES, ObjectServer  # noqa: E402
from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: E402
from support.warm import warm_parent  # noqa: E402

Answer = tuple[int, dict[str, str], bytes]
Ask = Callable[..., Answer]


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with ObjectServer(mode="keep") as running:
        yield running


@pytest.fixture
def ask(server: ObjectServer) -> Iterator[Ask]:
    """Sends a request over one kept connection."""
    connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=60)

    def send(method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, names)
        found = connection.getresponse()
        return found.status, dict(found.getheaders()), found.read()

    yield send
    connection.close()


def ranges_of(nbytes: int) -> list[Any]:
    middle = BLOCK_BYTES + 5
    return [(0, 1), (7, middle), (middle, nbytes), {"offset": middle}, {"suffix": middle}]


def test_a_multipart_upload_is_read_back_in_any_range_and_its_memory_serves_again(
    server: ObjectServer,
) -> None:
    store, data = make_store(server.endpoint), os.urandom(3 * BLOCK_BYTES + 17)
    view = memoryview(data)
    parts = [view[at : at + BLOCK_BYTES + 1] for at in range(0, len(view), BLOCK_BYTES + 1)]
    before = server.stats()["memory_bytes"]
    for _ in range(20):
        obstore.put(store, "a/b.distcp", iter(parts), chunk_size=BLOCK_BYTES + 1)
    assert bytes(obstore.get(store, "a/b.distcp").bytes()) == data
    for wanted in ranges_of(len(data)):
        answer = obstore.get(store, "a/b.distcp", options={"range": wanted})
        start, stop = answer.range
        assert bytes(answer.bytes()) == data[start:stop] and stop > start
    stats = server.stats()
    assert stats["requests"]["UploadPart"] == 20 * len(parts)
    assert stats["bytes_received"] >= 20 * len(data)
    assert stats["memory_bytes"] - before == GROWTH_BYTES < 20 * len(data) // 2
    assert (stats["objects"], stats["open_uploads"]) == (1, 0)


def test_an_upload_whose_source_fails_is_aborted(server: ObjectServer) -> None:
    def source() -> Iterator[bytes]:
        yield bytes(BLOCK_BYTES)
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        obstore.put(make_store(server.endpoint), "a", source(), chunk_size=BLOCK_BYTES)
    stats = server.stats()
    assert (stats["objects"], stats["open_uploads"]) == (0, 0)
    assert stats["requests"]["AbortMultipartUpload"] == 1


def test_conditions_of_put_and_get_hold(server: ObjectServer) -> None:
    store = make_store(server.endpoint)
    first = obstore.put(store, "a", b"1", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a", b"2", mode="create")
    second = obstore.put(store, "a", b"3", mode={"e_tag": first["e_tag"]})
    with pytest.raises(PreconditionError):
        obstore.put(store, "a", b"4", mode={"e_tag": first["e_tag"]})
    with pytest.raises(PreconditionError):
        obstore.get(store, "a", options={"if_match": first["e_tag"]})
    answer = obstore.get(store, "a", options={"if_match": second["e_tag"]})
    assert bytes(answer.bytes()) == b"3"
    assert server.stats()["refused"] == {"412": 3}


def test_of_many_that_create_one_key_exactly_one_succeeds(server: ObjectServer) -> None:
    store, won, barrier = make_store(server.endpoint), [], threading.Barrier(8)

    def create(number: int) -> None:
        barrier.wait()
        try:
            obstore.put(store, "a", bytes([number]), mode="create")
        except AlreadyExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bytes([number]) for number in won] == [bytes(obstore.get(store, "a").bytes())]


def test_lists_have_pages_and_common_prefixes_and_deletes_remove(
    server: ObjectServer, ask: Ask
) -> None:
    store = make_store(server.endpoint)
    keys = [f"run/{number:04}/a & <b>.distcp" for number in range(1005)] + ["other"]
    for key in keys:
        obstore.put(store, key, b"x")
    listed = obstore.list(store, "run").collect()
    assert [found["path"] for found in listed] == keys[:-1]
    assert {found["size"] for found in listed} == {1}
    page = ask("GET", "/bench?list-type=2&max-keys=3&start-after=run")[2]
    assert page.count(b"<Key>") == 3 and b"<IsTruncated>true</IsTruncated>" in page
    found = obstore.list_with_delimiter(store, "run")
    assert len(found["common_prefixes"]) == 1005 and not found["objects"]
    obstore.delete(store, keys[:-1])
    assert [found["path"] for found in obstore.list(store).collect()] == ["other"]
    assert server.stats()["requests"]["DeleteObjects"] == 2


# ---- What obstore does not send ----------------------------------------------------------------


def test_chunked_bodies_are_stored_without_their_frames(ask: Ask) -> None:
    chunks = (
        b"5;chunk-signature=abc\r\nhello\r\n3\r\n, w\r\n0\r\nx-amz-checksum-crc32:AAAA==\r\n\r\n"
    )
    streaming = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
    assert ask("PUT", "/b/a", chunks, x_amz_content_sha256=streaming)[0] == 200
    assert ask("GET", "/b/a")[2] == b"hello, w"
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunks), chunks)
    headers = {"transfer_encoding": "chunked", "x_amz_content_sha256": streaming}
    assert ask("PUT", "/b/c", framed, **headers)[0] == 200
    assert ask("GET", "/b/c")[2] == b"hello, w"


def test_a_client_that_expects_100_continue_gets_it_first(server: ObjectServer) -> None:
    url = urllib.parse.urlsplit(server.endpoint)
    connection = http.client.HTTPConnection(url.netloc, timeout=60)
    connection.putrequest("PUT", "/b/a")
    connection.putheader("Content-Length", "2")
    connection.putheader("Expect", "100-continue")
    connection.endheaders()
    assert connection.sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.send(b"hi")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/b/none", {}, 404),
        ("HEAD", "/b/none", {}, 404),
        ("PUT", "/b/none", {"if_match": '"1"'}, 404),
        ("PUT", "/b/a?partNumber=1&uploadId=none", {}, 404),
        ("GET", "/b/a", {"range": "bytes=4-"}, 416),
        ("GET", "/b/a", {"range": "bytes=-0"}, 416),
        ("GET", "/b/a", {"range": "bytes=1-9"}, 206),
        ("HEAD", "/b/a", {"range": "bytes=-3"}, 206),
        ("DELETE", "/b/none", {}, 200),
        ("PATCH", "/b/a", {}, 501),
    ],
)
def test_each_request_gets_its_status(
    ask: Ask, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    ask("PUT", "/b/a", b"1234")
    found = ask(method, path, **headers)
    assert found[0] == status
    if status == 206:
        assert found[1]["Content-Length"] == "3"
    assert ask("GET", "/b/a")[2] == b"1234"  # the connection goes on


# ---- Modes, counts and benches -----------------------------------------------------------------


def test_an_answer_on_its_way_keeps_the_bytes_of_an_object_that_is_gone(
    server: ObjectServer, ask: Ask
) -> None:
    first, second = (bytes([number]) * (16 * BLOCK_BYTES) for number in (1, 2))
    ask("PUT", "/b/a", first)
    slow = http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=60)
    slow.request("GET", "/b/a")
    answer = slow.getresponse()  # the rest waits for this reader
    assert ask("PUT", "/b/a", second)[0] == 200
    assert ask("PUT", "/b/c", second)[0] == 200
    assert answer.read() == first
    slow.close()


def test_drop_keeps_the_lengths_of_data_and_the_bytes_of_all_else() -> None:
    with ObjectServer(mode="drop") as server:
        store, data = make_store(server.endpoint), os.urandom(2 * BLOCK_BYTES + 3)
        obstore.put(store, "a.distcp", data)
        obstore.put(store, ".metadata", data)
        assert len(obstore.get(store, "a.distcp").bytes()) == len(data)
        assert bytes(obstore.get(store, ".metadata").bytes()) == data


def test_a_reset_sets_counts_and_latency_and_may_remove_all(server: ObjectServer, ask: Ask) -> None:
    ask("PUT", "/b/a", b"1")
    assert server.stats()["requests"] == {"PutObject": 1}
    server.reset(latency_ms=30)
    began = time.perf_counter()
    ask("GET", "/b/a")
    assert time.perf_counter() - began >= 0.03
    server.reset(latency_ms=0, is_empty=True)
    stats = server.stats()
    assert (stats["requests"], stats["objects"], stats["latency_ms"]) == ({}, 0, 0)
    assert stats["cpu_s"] >= 0


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
