"""Fixtures of tests of object stores: servers of the session, a fresh URL and a proxy a test.

def test_it(object_prefix, object_server):  # s3://checkpoints/<random>: ready to use by name
def test_it(object_prefix, object_proxy):   # the same, every request through the proxy
def test_it(object_prefix, object_endpoint): # the same, by an address that no variable has

Each such test runs on S3 (s3_server.py), and unless it is `s3_alone`, in `make test-azure` on Azure
as well. `make test-all` has a tenth of these on Azure, and a tenth on moto, which others wrote:
their servers take minutes for all.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from torch_dcpx.storage import root_lock

if TYPE_CHECKING:
    from object_outcomes import Store
    from object_roots import Root
    from support.object_proxy import FaultProxy
    from support.object_server import ObjectServer


AZURITE = Path(__file__).resolve().parents[2] / "build" / "azurite" / "node_modules" / "azurite"


def azure_missing() -> str:
    """Returns why Azurite cannot run, or ""."""
    if shutil.which("node") is None:
        return "no node, which Azurite needs"
    return "" if AZURITE.is_dir() else "no Azurite: `make azurite` installs it"


def pytest_report_header() -> str:
    return f"az:// is tested: {azure_missing() or 'yes'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sampled = {"moto"} if os.environ.get("DCPX_AZURE") else {"moto", "az"}
    left = [
        one for one in items if _server(one) in sampled and zlib.crc32(one.nodeid.encode()) % 10
    ]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [one for one in items if one not in left]


def _server(item: pytest.Item) -> str:
    call = getattr(item, "callspec", None)
    return call.params.get("object_server", "") if call is not None else ""


# Without Azurite there are no tests on it, and the header of a run says so.
_OTHERS = ["moto"] if azure_missing() else ["moto", "az"]
s3_alone = pytest.mark.parametrize("object_server", ["s3"], indirect=True)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[ObjectServer]:
    """An S3 server of this session, in a process of its own."""
    from support.object_server import ObjectServer

    yield from _used(ObjectServer)


@pytest.fixture(scope="session")
def moto_server() -> Iterator[ObjectServer]:
    """moto of this session, in a process of its own."""
    pytest.importorskip("moto.moto_server.werkzeug_app", exc_type=ImportError)
    from support.moto_server import MotoServer

    yield from _used(MotoServer)


@pytest.fixture(scope="session")
def azure_server() -> Iterator[ObjectServer]:
    """A server of Azure's blobs of this session, in a process of its own."""
    from support.azure_server import AzureServer

    yield from _used(AzureServer)


def _used(kind: type[ObjectServer]) -> Iterator[ObjectServer]:
    """Yields a running server of a kind, to which this process has spoken."""
    obstore = pytest.importorskip("obstore")
    from support.object_client import opened

    from torch_dcpx.storage import object_stream

    server = kind()
    # obstore's threads start with its first request and live on, as ours of uploads does: for
    # `no_leaks`, they are not new.
    object_stream.loop()
    with pytest.MonkeyPatch.context() as patch:
        enter(patch, server.environment())
        obstore.list(opened(server.root)).collect()
    yield server
    server.close()


@pytest.fixture(params=["s3", *(pytest.param(one, marks=pytest.mark.slow) for one in _OTHERS)])
def object_server(request: pytest.FixtureRequest) -> ObjectServer:
    """The server of the store that the test runs on."""
    fixtures = {"s3": "s3_server", "moto": "moto_server", "az": "azure_server"}
    server: ObjectServer = request.getfixturevalue(fixtures[request.param])
    return server


def forget_roots() -> None:
    """Forgets the roots of managers that a test has not closed, as the end of their job does; else
    requests come when the managers are collected.
    """
    for held in [*root_lock._held.values(), *root_lock._over]:
        held.stop()
    root_lock._held.clear()
    root_lock._over.clear()


@contextmanager
def used_prefix(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields a URL under which nothing is, `s3://bucket/random`; the environment can use it."""
    enter(monkeypatch, server.environment())
    # A test counts its requests: none are a thread's.
    for name in ("_RENEW_S", "_GONE_S"):
        monkeypatch.setattr(root_lock, name, 1e6)
    prefix = f"{server.root}/{secrets.token_hex(8)}"
    yield prefix
    forget_roots()
    server.remove(prefix)


@pytest.fixture
def object_prefix(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL under which nothing is, `s3://bucket/random`, and the environment to use it."""
    with used_prefix(object_server, monkeypatch) as prefix:
        yield prefix


@pytest.fixture
def object_endpoint(
    object_server: ObjectServer, object_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The address of the store, which no variable has."""
    for name in ("AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return object_server.url


@pytest.fixture
def object_proxy(
    object_server: ObjectServer,
    object_prefix: str,  # first: its environment is replaced
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[FaultProxy]:
    """A proxy before the server; the environment points at it."""
    from support.object_proxy import FaultProxy

    proxy = FaultProxy(object_server)
    enter(monkeypatch, proxy.environment())
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


def enter(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    """Sets these variables, and takes away all others that could name a store, and clients of them
    that fsspec keeps.
    """
    if "s3fs" in sys.modules:
        sys.modules["s3fs"].S3FileSystem.clear_instance_cache()
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "AZURITE_")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


# ---- For tests/objects ---------------------------------------------------------------------------


@pytest.fixture
def store(object_server: ObjectServer, object_prefix: str) -> Store:
    """A URL under which nothing is."""
    from object_outcomes import Store

    return Store(object_server, object_prefix)


@pytest.fixture
def root(object_server: ObjectServer, object_prefix: str) -> Root:
    """A place for a manager's root."""
    from object_roots import Root

    return Root(object_server, object_prefix)


@pytest.fixture
def proxy(request: pytest.FixtureRequest, object_proxy: FaultProxy) -> FaultProxy:
    """A proxy before the store, through which all requests go; `store.proxy` as well."""
    for name in {"store", "root"} & set(request.fixturenames):
        request.getfixturevalue(name).proxy = object_proxy
    return object_proxy


@pytest.fixture
def chosen(request: pytest.FixtureRequest, seed: int) -> Callable[[Sequence[Any]], list[Any]]:
    """Gives one of several points that should not differ, by the seed; all with --everything."""
    is_all, draw = request.config.getoption("--everything"), random.Random(seed)
    return lambda given: list(given) if is_all else [draw.choice(given)]
