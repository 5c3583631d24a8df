"""One place for checkpoints after the other: the same test on each says what all of them promise.

def test_it(place):
    dcpx.save(state, place.url)   # by one client
    dcpx.load(state, place.seen)  # by the other one
    place.put(name, data)         # past both

On a directory both are one; on `two_clients` each has a mount of its own; of stores there are moto,
which others wrote, and Azurite where it is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fuse_fixture import MountedClient, fuse_missing
from support.object_fixture import azure_missing, used_prefix
from support.object_server import ObjectServer

_SERVERS = {"s3": "moto_server", "az": "azure_server"}
_PLACES = [
    "directory",
    pytest.param("two_clients", marks=[pytest.mark.root] if fuse_missing() else []),
    "s3",
    *([] if azure_missing() else [pytest.param("az", marks=pytest.mark.slow)]),
]


class Place:
    """Where a test's checkpoints are.

    Attributes:
        url: as the client that saves names it.
        seen: as the client that loads names it.
        is_store: whether it is a URL.
        is_shared: whether it is a file system, parts of which another client may not see.
    """

    is_store = False

    def __init__(self, stored: Path, clients: tuple[MountedClient, ...] = ()) -> None:
        self._stored, self._clients = stored, clients
        self.is_shared = bool(clients)
        self.url, self.seen = (
            (str(clients[0].path), str(clients[1].path))
            if clients
            else (
                str(stored),
                str(stored),
            )
        )

    def names(self, beneath: str = "") -> set[str]:
        """Returns the paths of all files, without locks, which stay."""
        top = self._stored / beneath
        found = {str(path.relative_to(top)) for path in top.rglob("*") if path.is_file()}
        return {name for name in found if not name.endswith((".lock", ".dcpx.root"))}

    def get(self, name: str) -> bytes:
        return (self._stored / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self._stored / name).parent.mkdir(parents=True, exist_ok=True)
        (self._stored / name).write_bytes(data)
        self.forget()

    def delete(self, name: str) -> None:
        (self._stored / name).unlink()
        self.forget()

    def forget(self) -> None:
        """Ends what clients keep of what they have seen, as time does."""
        for client in self._clients:
            client.forget()

    def data(self, beneath: str = "") -> str:
        """Returns the name of the one data file of a checkpoint."""
        (name,) = (name for name in self.names(beneath) if name.endswith(".distcp"))
        return f"{beneath}/{name}" if beneath else name


class StorePlace(Place):
    """As `Place`, in a store."""

    is_store, is_shared = True, False

    def __init__(self, server: ObjectServer, url: str) -> None:
        self._server, self.url, self.seen = server, url, url

    def names(self, beneath: str = "") -> set[str]:
        """Returns the names of all objects, without locks, which stay."""
        top = self._key(f"{beneath}/" if beneath else "")
        found = {key.removeprefix(top) for key in self._server.keys(top)}
        return {name for name in found if not name.endswith((".lock", ".dcpx.root"))}

    def get(self, name: str) -> bytes:
        return self._server.get(self._key(name))

    def put(self, name: str, data: bytes) -> None:
        self._server.put(self._key(name), data)

    def delete(self, name: str) -> None:
        self._server.delete(self._key(name))

    def forget(self) -> None:
        """Does nothing: clients of stores keep nothing."""

    def _key(self, name: str) -> str:
        return f"{self.url}/{name}".removeprefix(f"{self._server.root}/")


@pytest.fixture(params=_PLACES)
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """A place under which nothing is."""
    if request.param in _SERVERS:
        server: ObjectServer = request.getfixturevalue(_SERVERS[request.param])
        with used_prefix(server, monkeypatch) as url:
            yield StorePlace(server, url)
    elif request.param == "two_clients":
        clients = request.getfixturevalue("two_clients")
        yield Place(tmp_path / "clients" / "stored", clients)
    else:
        (tmp_path / "place").mkdir()
        yield Place(tmp_path / "place")
