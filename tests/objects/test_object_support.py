"""The fault proxy that tests of object stores use passes requests on, or breaks the named ones."""

from __future__ import annotations

import hashlib
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import pytest
from support.machine import seconds
from support.object_client import opened
from support.object_fixture import enter, s3_alone
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.object_server import ObjectServer

obstore = pytest.importorskip("obstore")

pytestmark = s3_alone

MIB = 1 << 20
CHUNK_BYTES = 5 * MIB  # the least that S3 takes, but of the last part
_DEADLINE_S = seconds(120)


# ---- The proxy without faults -------------------------------------------------------------------


def test_requests_pass_unchanged_and_are_recorded(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    store = opened(object_prefix)
    tag = obstore.put(store, "a", b"12345", mode="create")["e_tag"]
    obstore.put(store, "a", b"1234567", mode={"e_tag": tag})
    assert bytes(obstore.get_range(store, "a", start=2, length=3)) == b"345"
    assert obstore.head(store, "a")["size"] == 7
    assert [one["path"] for one in obstore.list(store).collect()] == ["a"]
    obstore.delete(store, "a")

    key = object_prefix.removeprefix("s3://checkpoints/")
    requests = object_proxy.requests()
    assert [one.number for one in requests] == list(range(6))
    assert requests[:4] == [
        Request(0, "put_object", f"{key}/a", if_none_match="*", sent_bytes=5, status=200),
        Request(1, "put_object", f"{key}/a", if_match=tag, sent_bytes=7, status=200),
        Request(2, "get_object", f"{key}/a", range="bytes=2-4", received_bytes=3, status=206),
        Request(3, "head_object", f"{key}/a", status=200),
    ]
    assert [(one.kind, one.key, one.status) for one in requests[4:]] == [
        ("list", f"{key}/", 200),
        ("delete_many", "", 200),
    ]
    assert object_proxy.count() == 6
    assert object_proxy.count("put_object", "/a") == 2
    object_proxy.clear()
    assert object_proxy.count() == 0
    assert not object_server.keys(object_prefix)


def test_large_object_passes_both_ways_in_parts(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    data = random.Random(1).randbytes(64 * MIB)
    store = opened(object_prefix)
    obstore.put(store, "big", data, chunk_size=8 * MIB, max_concurrency=3)
    read = bytes(obstore.get(store, "big").bytes())
    assert hashlib.sha256(read).digest() == hashlib.sha256(data).digest()
    parts = object_proxy.requests("upload_part")
    assert sorted(one.part for one in parts) == list(range(1, 9))
    assert {one.sent_bytes for one in parts} == {8 * MIB}
    assert object_proxy.requests("get_object")[0].received_bytes == len(data)
    assert object_proxy.count("create_upload") == object_proxy.count("complete_upload") == 1
    assert not object_server.uploads(object_prefix)


def test_process_reaches_the_proxy_by_its_environment_alone(
    object_prefix: str, object_proxy: FaultProxy, run_python: Any
) -> None:
    code = (
        "import sys, obstore; from obstore.store import from_url\n"
        "store = from_url(sys.argv[1]); obstore.put(store, 'key', b'1')"
    )
    run_python(code, object_prefix, timeout_s=120)
    assert [one.kind for one in object_proxy.requests()] == ["put_object"]


def test_closed_proxy_leaves_no_thread_and_no_socket(
    object_server: ObjectServer, object_prefix: str, no_leaks: None
) -> None:
    proxy = FaultProxy(object_server)
    port = int(proxy.url.rsplit(":", 1)[1])
    key = object_prefix.removeprefix("s3:/")
    idle = socket.create_connection(("127.0.0.1", port), timeout=_DEADLINE_S)
    proxy.fail("get_object", "delay", seconds=3600)
    with socket.create_connection(("127.0.0.1", port), timeout=_DEADLINE_S) as client:
        client.sendall(f"GET {key}/x HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        proxy.wait("get_object")
        proxy.close()  # does not wait for the hour
    idle.close()


# ---- Faults -------------------------------------------------------------------------------------

# fault -> what obstore raises, and whether the object is there all the same
PUT_FAULTS = {
    "reset": ("GenericError", "error sending request", False),
    "500": ("GenericError", "500 Internal Server Error", False),
    "503": ("GenericError", "SlowDown", False),
    "403": ("PermissionDeniedError", "AccessDenied", False),
    "409": ("AlreadyExistsError", "ConditionalRequestConflict", False),
    "412": ("AlreadyExistsError", "PreconditionFailed", False),
    "200": ("GenericError", "ETag Header missing", False),
    "lost_answer": ("GenericError", "error sending request", True),
    "truncate": ("GenericError", "error sending request", True),
    "done_500": ("GenericError", "500 Internal Server Error", True),
}


@pytest.mark.parametrize("how", PUT_FAULTS)
def test_conditional_put_without_retries_meets_each_fault(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy, how: str
) -> None:
    error, text, is_there = PUT_FAULTS[how]
    store = opened(object_prefix)
    object_proxy.fail("put_object", how)
    with pytest.raises(getattr(obstore.exceptions, error), match=text):
        obstore.put(store, "key", b"1", mode="create")
    assert bool(object_server.keys(object_prefix)) == is_there
    assert object_proxy.requests()[0].fault == how
    obstore.put(store, "other", b"2", mode="create")  # the fault was for one request
    assert object_server.get(f"{object_prefix}/other") == b"2"


@pytest.mark.parametrize("how", ["reset", "lost_answer"])
def test_reset_is_one_on_the_wire(object_prefix: str, object_proxy: FaultProxy, how: str) -> None:
    object_proxy.fail("get_object", how)
    port = int(object_proxy.url.rsplit(":", 1)[1])
    key = object_prefix.removeprefix("s3:/")
    with socket.create_connection(("127.0.0.1", port), timeout=_DEADLINE_S) as client:
        client.sendall(f"GET {key}/x HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        with pytest.raises(ConnectionResetError):
            client.recv(1)


@pytest.mark.parametrize("how", ["reset", "lost_answer", "500", "503", "done_500"])
def test_put_with_retries_outlasts_as_many_faults(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy, how: str
) -> None:
    object_proxy.fail("put_object", how, times=3)
    obstore.put(opened(object_prefix, retries=3), "key", b"1")
    assert [one.fault for one in object_proxy.requests()] == [how] * 3 + [""]
    assert object_server.get(f"{object_prefix}/key") == b"1"


def test_truncated_get_is_an_error_and_a_retry_reads_the_rest(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    data = random.Random(2).randbytes(MIB)
    object_server.put(f"{object_prefix}/key", data)
    object_proxy.fail("get_object", "truncate", times=2)
    with pytest.raises(obstore.exceptions.GenericError, match="body error"):
        obstore.get(opened(object_prefix), "key").bytes()
    assert bytes(obstore.get(opened(object_prefix, retries=1), "key").bytes()) == data
    halves = [one.received_bytes for one in object_proxy.requests("get_object")]
    assert halves == [MIB // 2] * 3


def test_flip_changes_one_bit_in_the_middle(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    object_server.put(f"{object_prefix}/key", bytes(3 * MIB))
    object_proxy.fail("get_object", "flip")
    read = bytes(obstore.get(opened(object_prefix), "key").bytes())
    assert len(read) == 3 * MIB
    assert [at for at, byte in enumerate(read) if byte] == [3 * MIB // 2]
    assert bytes(obstore.get(opened(object_prefix), "key").bytes()) == bytes(3 * MIB)


def test_partial_list_pages_key_by_key(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    for number in range(4):
        object_server.put(f"{object_prefix}/key{number}", b"")
    store = opened(object_prefix)
    object_proxy.fail("list", "partial_list", times=None)
    expected = [f"key{number}" for number in range(4)]
    assert [one["path"] for one in obstore.list(store).collect()] == expected
    assert object_proxy.count("list") == 4
    object_proxy.heal()
    assert [one["path"] for one in obstore.list(store).collect()] == expected
    assert object_proxy.count("list") == 5


def test_delay_holds_a_request_back_until_its_end_or_the_proxys(
    object_server: ObjectServer, object_prefix: str
) -> None:
    proxy = FaultProxy(object_server)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = opened(object_prefix)
        proxy.fail("put_object", "delay", seconds=0.05)
        began = time.monotonic()
        obstore.put(store, "short", b"1")
        assert time.monotonic() - began >= 0.05
        proxy.fail("put_object", "delay", seconds=3600)
        put = pool.submit(obstore.put, store, "long", b"2")
        proxy.wait("put_object", 2)
        proxy.close()
        with pytest.raises(obstore.exceptions.GenericError, match="error sending request"):
            put.result(_DEADLINE_S)
    assert [key[-6:] for key in object_server.keys(object_prefix)] == ["/short"]


def test_upload_whose_abort_is_lost_is_listed_and_removed(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    def parts() -> Iterator[bytes]:
        yield bytes(CHUNK_BYTES)
        raise RuntimeError("the source fails")

    object_proxy.fail("abort_upload", "reset")
    with pytest.raises(obstore.exceptions.GenericError):  # of the abort: it hides the source's
        obstore.put(opened(object_prefix), "big", parts(), chunk_size=CHUNK_BYTES)
    assert not object_server.keys(object_prefix)
    (upload,) = object_server.uploads(object_prefix)
    assert upload.key.endswith("/big")
    object_server.remove(object_prefix)
    assert not object_server.uploads(object_prefix)


@pytest.mark.parametrize("how", ["200", "lost_answer"])
def test_upload_whose_completion_fails_once_is_complete_with_retries(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy, how: str
) -> None:
    data = [bytes([number]) * CHUNK_BYTES for number in range(2)]
    object_proxy.fail("complete_upload", how)
    obstore.put(opened(object_prefix, retries=1), "big", iter(data), chunk_size=CHUNK_BYTES)
    assert object_proxy.count("complete_upload") == 2
    assert object_server.get(f"{object_prefix}/big") == b"".join(data)
    assert not object_server.uploads(object_prefix)


UPLOADS = f"""
import sys, obstore
from obstore.store import from_url
store = from_url(sys.argv[1])
obstore.put(store, "big", iter([bytes({CHUNK_BYTES})] * 2), chunk_size={CHUNK_BYTES})
"""


@pytest.mark.parametrize("is_done", [False, True])
def test_hook_kills_a_client_before_or_after_its_request(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy, is_done: bool
) -> None:
    statuses = []

    def kill(request: Request) -> str | None:
        statuses.append(request.status)
        child.kill()
        return None if is_done else "reset"

    object_proxy.hook("complete_upload", kill, is_done=is_done)
    child = subprocess.Popen([sys.executable, "-c", UPLOADS, object_prefix])
    try:
        assert child.wait(_DEADLINE_S) == -9
    finally:
        child.kill()
    assert statuses == [200 if is_done else 0]
    assert len(object_server.keys(object_prefix)) == is_done
    assert len(object_server.uploads(object_prefix)) == (not is_done)


def test_rules_choose_by_key_number_and_order(object_prefix: str, object_proxy: FaultProxy) -> None:
    store = opened(object_prefix)
    object_proxy.fail("put_object", "500", key="/b", skip=1)
    object_proxy.fail(4, "503")
    object_proxy.fail("any", "reset", times=None, key="never")
    for key in ("a", "b", "a", "b", "a", "b"):
        try:
            obstore.put(store, key, b"1")
        except obstore.exceptions.GenericError:
            continue
    assert [one.fault for one in object_proxy.requests()] == ["", "", "", "500", "503", ""]


def test_seed_decides_which_requests_fail_and_how(
    object_prefix: str, object_proxy: FaultProxy, seed: int
) -> None:
    store = opened(object_prefix, retries=10)

    def faults(of: int) -> list[str]:
        object_proxy.clear()
        object_proxy.seeded(of, 0.3)
        for _ in range(60):
            obstore.put(store, "key", b"1")
        return [one.fault for one in object_proxy.requests()][:60]

    first = faults(seed)
    assert 0 < sum(map(bool, first)) < 60
    assert faults(seed) == first
    assert faults(seed + 1) != first


def test_error_of_a_hook_is_raised_by_close(
    object_server: ObjectServer, object_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = FaultProxy(object_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)

    def broken(request: Request) -> None:
        raise ZeroDivisionError(request.kind)

    proxy.hook("put_object", broken)
    with pytest.raises(obstore.exceptions.GenericError, match="error sending request"):
        obstore.put(opened(object_prefix), "key", b"1")
    with pytest.raises(ZeroDivisionError, match="put_object"):
        proxy.close()


def test_unknown_kind_and_unknown_fault_are_refused(object_proxy: FaultProxy) -> None:
    with pytest.raises(ValueError, match="no kind of request: 'put'"):
        object_proxy.fail("put", "reset")
    with pytest.raises(ValueError, match="no fault: 'explode'"):
        object_proxy.fail("put_object", "explode")


def test_clients_of_fsspec_are_not_those_of_the_test_before(
    object_prefix: str, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs may be a proxy that is closed."""
    before = fsspec.filesystem("s3")
    assert fsspec.filesystem("s3") is before
    enter(monkeypatch, object_server.environment())
    assert fsspec.filesystem("s3") is not before
