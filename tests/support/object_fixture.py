"""Fixtures of tests of object stores: one S3 server a session, a fresh URL and a proxy a test.

def test_it(object_prefix, object_server):  # s3://checkpoints/<random>: ready to use by name
def test_it(object_prefix, object_proxy):   # the same, every request through the proxy
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.object_proxy import FaultProxy
    from support.object_server import ObjectServer


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectServer]:
    """An S3 server of this session, in a process of its own."""
    obstore = pytest.importorskip("obstore")
    pytest.importorskip("moto.moto_server.werkzeug_app", exc_type=ImportError)
    from support.object_client import opened
    from support.object_server import ObjectServer

    server = ObjectServer()
    # obstore's threads start with its first request and live on: for `no_leaks`, they are not new.
    with pytest.MonkeyPatch.context() as patch:
        _enter(patch, server.environment())
        obstore.list(opened(f"s3://{server.bucket}")).collect()
    yield server
    server.close()


@pytest.fixture
def object_prefix(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL under which nothing is, `s3://bucket/random`, and the environment to use it."""
    _enter(monkeypatch, object_server.environment())
    prefix = f"s3://{object_server.bucket}/{secrets.token_hex(8)}"
    yield prefix
    object_server.remove(prefix)


@pytest.fixture
def object_proxy(
    object_server: ObjectServer,
    object_prefix: str,  # first: its environment is replaced
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[FaultProxy]:
    """A proxy before the server; the environment points at it."""
    from support.object_proxy import FaultProxy

    proxy = FaultProxy(object_server)
    _enter(monkeypatch, proxy.environment())
    yield proxy
    proxy.close()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which the store's clock is ahead of the dates of its objects."""
    from torch_dcpx.storage.object_store import Bucket

    shift = [0.0]
    now_s = Bucket.now_s
    monkeypatch.setattr(Bucket, "now_s", lambda self, prefix: now_s(self, prefix) + shift[0])
    return shift


def _enter(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    """Sets these variables, and takes away all others that could name a store."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
