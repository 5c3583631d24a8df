"""The servers that tests of object stores use do what S3 and Azure do, and the fault proxy before
them passes requests on, or breaks the named ones.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from object_outcomes import MIB, Store
from support.machine import seconds
from support.object_client import opened
from support.object_fixture import enter, s3_alone
from support.object_proxy import FaultProxy
from support.object_requests import Request

obstore = pytest.importorskip("obstore")

TESTS = Path(__file__).resolve().parents[1]
CHUNK_BYTES = 5 * MIB  # the least that S3 takes, but of the last part
_DEADLINE_S = seconds(120)


def _send(proxy: FaultProxy, store: Store) -> socket.socket:
    """Returns a connection over which a request for "x" has gone to the proxy."""
    client = socket.create_connection(
        ("127.0.0.1", int(proxy.url.rsplit(":", 1)[1])), timeout=_DEADLINE_S
    )
    key = store.url.removeprefix("s3:/")
    client.sendall(f"GET {key}/x HTTP/1.1\r\nHost: here\r\n\r\n".encode())
    return client


# ---- Servers ------------------------------------------------------------------------------------


def test_helper_calls_put_find_read_and_delete_also_beyond_one_page(store: Store) -> None:
    store.put("a b+é", b"one")
    names = [f"key{number:04}" for number in range(1003)]
    for name in names:
        store.put(name, b"")
    key = store.key()
    assert store.server.keys(store.url) == [f"{key}a b+é", *(f"{key}{name}" for name in names)]
    assert store.server.sizes(f"{store.url}/a") == {f"{key}a b+é": 3}
    assert store.get("a b+é") == b"one"
    store.delete("a b+é")
    with pytest.raises(KeyError):
        store.get("a b+é")
    assert store.names() == set(names)


def test_threads_that_create_one_key_have_one_winner(store: Store) -> None:
    stores = [opened(store.url) for _ in range(8)]
    barrier = threading.Barrier(len(stores))

    def create(writer: int, key: str) -> bool:
        barrier.wait(_DEADLINE_S)
        try:
            obstore.put(stores[writer], key, str(writer).encode(), mode="create")
        except obstore.exceptions.AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(len(stores)) as pool:
        for key in map(str, range(10)):
            won = list(pool.map(create, range(len(stores)), [key] * len(stores)))
            assert sum(won) == 1
            assert store.get(key) == str(won.index(True)).encode()


@s3_alone
def test_parts_are_of_5_mib_at_least_and_buckets_are_made_before(store: Store) -> None:
    small = [bytes(CHUNK_BYTES - 1)] * 2
    with pytest.raises(obstore.exceptions.GenericError, match="EntityTooSmall"):
        obstore.put(opened(store.url), "a", iter(small), chunk_size=CHUNK_BYTES - 1)
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        obstore.put(opened("s3://nothere"), "a", b"")
    assert store.names() == set()


@pytest.mark.parametrize("is_proxied", [False, True])
def test_body_that_ends_early_is_not_stored(
    store: Store, proxy: FaultProxy, is_proxied: bool
) -> None:
    port = int(proxy.url.rsplit(":", 1)[1]) if is_proxied else store.server.port
    fields = {"Host": "here", "Content-Length": "100", **store.server.headers()}
    lines = [f"PUT {store.server.target(store.key('x'))} HTTP/1.1", *map(": ".join, fields.items())]
    with socket.create_connection(("127.0.0.1", port), timeout=_DEADLINE_S) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode() + b"half")
        client.shutdown(socket.SHUT_WR)
        try:
            answer = client.recv(1000)
        except ConnectionResetError:
            answer = b""
    assert not answer or (not is_proxied and answer.startswith(b"HTTP/1.1 400"))
    assert not store.names()


def test_killed_server_is_an_error_of_the_client_and_hangs_nobody(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = type(store.server)()
    proxy = FaultProxy(server)
    try:
        enter(monkeypatch, proxy.environment())
        client = opened(store.url)
        obstore.put(client, "key", b"1")
        server.kill()
        with pytest.raises(obstore.exceptions.GenericError, match="error sending request"):
            obstore.put(client, "key", b"2")
        assert proxy.broken
    finally:
        proxy.close()
        server.close()


def test_server_ends_with_the_process_that_started_it(run_warm: Any, store: Store) -> None:
    kind = type(store.server)
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        f"from {kind.__module__} import {kind.__name__}\n"
        f"print({kind.__name__}().port, flush=True); os.kill(os.getpid(), 9)"
    )
    port = int(run_warm(code, str(TESTS), timeout_s=120, check=False).stdout)
    give_up_at = time.monotonic() + _DEADLINE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=_DEADLINE_S).close()
        except (ConnectionRefusedError, ConnectionResetError):
            return
        assert time.monotonic() < give_up_at


# ---- The proxy without faults -------------------------------------------------------------------


@s3_alone
def test_requests_pass_unchanged_and_are_recorded(store: Store, proxy: FaultProxy) -> None:
    client = opened(store.url)
    tag = obstore.put(client, "a", b"12345", mode="create")["e_tag"]
    obstore.put(client, "a", b"1234567", mode={"e_tag": tag})
    assert bytes(obstore.get_range(client, "a", start=2, length=3)) == b"345"
    assert obstore.head(client, "a")["size"] == 7
    assert [one["path"] for one in obstore.list(client).collect()] == ["a"]
    obstore.delete(client, "a")
    key = store.key()
    requests = proxy.requests()
    assert [one.number for one in requests] == list(range(6))
    assert requests[:4] == [
        Request(0, "put_object", f"{key}a", if_none_match="*", sent_bytes=5, status=200),
        Request(1, "put_object", f"{key}a", if_match=tag, sent_bytes=7, status=200),
        Request(2, "get_object", f"{key}a", range="bytes=2-4", received_bytes=3, status=206),
        Request(3, "head_object", f"{key}a", status=200),
    ]
    assert [(one.kind, one.key, one.status) for one in requests[4:]] == [
        ("list", key, 200),
        ("delete_many", "", 200),
    ]
    assert proxy.count("put_object", "/a") == 2
    proxy.clear()
    assert proxy.count() == 0 and not store.names()


@s3_alone
def test_closed_proxy_leaves_no_thread_and_no_socket_and_raises_what_a_hook_raised(
    store: Store, no_leaks: None
) -> None:
    proxy = FaultProxy(store.server)
    idle = socket.create_connection(("127.0.0.1", int(proxy.url.rsplit(":", 1)[1])))

    def broken(request: Request) -> None:
        raise ZeroDivisionError(request.kind)

    proxy.fail("get_object", "delay", seconds=3600)
    proxy.hook("get_object", broken)
    with _send(proxy, store):
        proxy.wait("get_object")
        with _send(proxy, store) as client:
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            with pytest.raises(ZeroDivisionError, match="get_object"):
                proxy.close()  # does not wait for the hour
    idle.close()


@s3_alone
def test_upload_that_nobody_ended_is_seen_and_removed(store: Store, proxy: FaultProxy) -> None:
    proxy.fail("complete_upload", "reset")
    proxy.fail("abort_upload", "reset")
    with pytest.raises(obstore.exceptions.GenericError):
        obstore.put(opened(store.url), "big", iter([b"1"]), chunk_size=CHUNK_BYTES)
    assert [one.key for one in store.server.uploads(store.url)] == [store.key("big")]
    store.server.remove(store.url)
    assert not store.server.uploads(store.url) and not store.names()


@s3_alone
def test_clients_of_fsspec_are_not_those_of_the_test_before(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs may be a proxy that is closed."""
    before = fsspec.filesystem("s3")
    assert fsspec.filesystem("s3") is before
    enter(monkeypatch, store.server.environment())
    assert fsspec.filesystem("s3") is not before


# ---- Its faults ---------------------------------------------------------------------------------

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


@s3_alone
@pytest.mark.parametrize("how", PUT_FAULTS)
def test_put_meets_each_fault_once_and_retries_outlast_it(
    store: Store, proxy: FaultProxy, how: str
) -> None:
    error, text, is_there = PUT_FAULTS[how]
    client = opened(store.url)
    proxy.fail("put_object", how)
    with pytest.raises(getattr(obstore.exceptions, error), match=text):
        obstore.put(client, "key", b"1", mode="create")
    assert bool(store.names()) == is_there
    assert proxy.requests()[0].fault == how
    obstore.put(client, "other", b"2", mode="create")  # the fault was for one request
    assert store.get("other") == b"2"
    if how in ("reset", "lost_answer", "500", "503", "done_500"):
        proxy.clear()
        proxy.fail("put_object", how, times=3)
        obstore.put(opened(store.url, retries=3), "key", b"3")
        assert [one.fault for one in proxy.requests()] == [how] * 3 + [""]
        assert store.get("key") == b"3"


@s3_alone
def test_get_may_be_cut_or_have_one_bit_flipped(store: Store, proxy: FaultProxy) -> None:
    store.put("key", bytes(3 * MIB))
    proxy.fail("get_object", "truncate", times=2)
    with pytest.raises(obstore.exceptions.GenericError, match="body error"):
        obstore.get(opened(store.url), "key").bytes()
    assert bytes(obstore.get(opened(store.url, retries=1), "key").bytes()) == bytes(3 * MIB)
    halves = [one.received_bytes for one in proxy.requests("get_object")]
    assert halves == [3 * MIB // 2] * 3
    proxy.fail("get_object", "flip")
    read = bytes(obstore.get(opened(store.url), "key").bytes())
    assert len(read) == 3 * MIB and [at for at, b in enumerate(read) if b] == [3 * MIB // 2]
    for how in ("reset", "lost_answer"):
        proxy.fail("get_object", how)
        with _send(proxy, store) as client, pytest.raises(ConnectionResetError):
            client.recv(1)


@s3_alone
def test_rules_choose_by_key_number_and_order_and_known_names_alone(
    store: Store, proxy: FaultProxy
) -> None:
    client = opened(store.url)
    proxy.fail("put_object", "500", key="/b", skip=1)
    proxy.fail(4, "503")
    proxy.fail("any", "reset", times=None, key="never")
    for key in "ababab":
        try:
            obstore.put(client, key, b"1")
        except obstore.exceptions.GenericError:
            continue
    assert [one.fault for one in proxy.requests()] == ["", "", "", "500", "503", ""]
    with pytest.raises(ValueError, match="no kind of request: 'put'"):
        proxy.fail("put", "reset")
    with pytest.raises(ValueError, match="no fault: 'explode'"):
        proxy.fail("put_object", "explode")


@s3_alone
def test_seed_decides_which_requests_fail_and_how(
    store: Store, proxy: FaultProxy, seed: int
) -> None:
    client = opened(store.url, retries=10)

    def faults(of: int) -> list[str]:
        proxy.clear()
        proxy.seeded(of, 0.3)
        for _ in range(60):
            obstore.put(client, "key", b"1")
        return [one.fault for one in proxy.requests()][:60]

    first = faults(seed)
    assert 0 < sum(map(bool, first)) < 60
    assert faults(seed) == first
    assert faults(seed + 1) != first
