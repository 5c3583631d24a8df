"""The servers that tests of object stores use do what S3 and Azure do."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.machine import seconds
from support.object_client import opened
from support.object_proxy import FaultProxy
from support.object_server import ObjectServer

obstore = pytest.importorskip("obstore")

TESTS = Path(__file__).resolve().parents[1]
_DEADLINE_S = seconds(120)


def test_helper_calls_put_find_read_and_delete(
    object_server: ObjectServer, object_prefix: str
) -> None:
    object_server.put(f"{object_prefix}/a b+é", b"one")
    object_server.put(f"{object_prefix}/b/c", b"")
    key = object_prefix.removeprefix(f"{object_server.root}/")
    assert object_server.keys(object_prefix) == [f"{key}/a b+é", f"{key}/b/c"]
    assert object_server.sizes(f"{object_prefix}/a") == {f"{key}/a b+é": 3}
    assert object_server.get(f"{key}/a b+é") == b"one"
    object_server.delete(f"{object_prefix}/a b+é")
    with pytest.raises(KeyError):
        object_server.get(f"{object_prefix}/a b+é")
    assert object_server.keys(object_prefix) == [f"{key}/b/c"]


def test_helper_calls_find_keys_beyond_one_page(
    object_server: ObjectServer, object_prefix: str
) -> None:
    names = [f"{object_prefix}/key{number:04}" for number in range(1003)]
    for name in names:
        object_server.put(name, b"")
    found = [f"{object_server.root}/{key}" for key in object_server.keys(object_prefix)]
    assert found == names


def test_threads_that_create_one_key_have_one_winner(
    object_server: ObjectServer, object_prefix: str
) -> None:
    stores = [opened(object_prefix) for _ in range(8)]
    barrier = threading.Barrier(len(stores))

    def create(writer: int, key: str) -> bool:
        barrier.wait(_DEADLINE_S)
        try:
            obstore.put(stores[writer], key, str(writer).encode(), mode="create")
        except obstore.exceptions.AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(len(stores)) as pool:
        for attempt in range(10):
            key = f"key{attempt}"
            won = list(pool.map(create, range(len(stores)), [key] * len(stores)))
            assert sum(won) == 1
            assert object_server.get(f"{object_prefix}/{key}") == str(won.index(True)).encode()


@pytest.mark.parametrize("is_proxied", [False, True])
def test_body_that_ends_early_is_not_stored(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy, is_proxied: bool
) -> None:
    port = int(object_proxy.url.rsplit(":", 1)[1]) if is_proxied else object_server.port
    key = object_prefix.removeprefix(f"{object_server.root}/")
    fields = {"Host": "here", "Content-Length": "100", **object_server.headers()}
    lines = [f"PUT {object_server.target(f'{key}/x')} HTTP/1.1", *map(": ".join, fields.items())]
    head = "\r\n".join([*lines, "", ""])
    with socket.create_connection(("127.0.0.1", port), timeout=_DEADLINE_S) as client:
        client.sendall(head.encode() + b"half")
        client.shutdown(socket.SHUT_WR)
        try:
            answer = client.recv(1000)
        except ConnectionResetError:
            answer = b""
    assert not answer or (not is_proxied and answer.startswith(b"HTTP/1.1 400"))
    assert not object_server.keys(object_prefix)


def test_killed_server_is_an_error_of_the_client_and_hangs_nobody(
    object_prefix: str, object_server: ObjectServer
) -> None:
    server = type(object_server)()
    proxy = FaultProxy(server)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in proxy.environment().items():
                patch.setenv(name, value)
            store = opened(object_prefix)
            obstore.put(store, "key", b"1")
            server.kill()
            with pytest.raises(obstore.exceptions.GenericError, match="error sending request"):
                obstore.put(store, "key", b"2")
        assert proxy.broken
    finally:
        proxy.close()
        server.close()


def test_server_ends_with_the_process_that_started_it(
    run_python: Any, object_server: ObjectServer
) -> None:
    kind = type(object_server)
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        f"from {kind.__module__} import {kind.__name__}\n"
        f"print({kind.__name__}().port, flush=True); os.kill(os.getpid(), 9)"
    )
    port = int(run_python(code, str(TESTS), timeout_s=120, check=False).stdout)
    give_up_at = time.monotonic() + _DEADLINE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=_DEADLINE_S).close()
        except (ConnectionRefusedError, ConnectionResetError):
            return
        assert time.monotonic() < give_up_at
