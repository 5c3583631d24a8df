"""What a store holds after a save that met a fault: the previous checkpoint, the new one, or none.

A test records a checkpoint's objects once, puts them back before each point of a sweep, and asks
`Store.found` afterwards. The answers come from the server itself, past every proxy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.object_fixture import forget_roots
from support.object_proxy import LOSSES, FaultProxy
from support.object_server import ObjectServer
from support.states import assert_same, blank_like

import torch_dcpx
from torch_dcpx import DcpxError, OutcomeUnknownError, StorageError, WriteOptions
from torch_dcpx.manager import store_root
from torch_dcpx.metadata.file import decode_file_names
from torch_dcpx.storage import object_place, object_store, object_uploads
from torch_dcpx.storage.object_store import Bucket
from torch_dcpx.storage.object_url import ObjectUrl, location_of

MIB = 1 << 20
LOST = (*LOSSES, "done_500")  # faults after which a client may repeat the request
REFUSED = ("412", "409", "403")
MEMORY_BYTES = 25 * MIB  # the least: five parts of 5 MiB
LARGE_NUMEL = 3 * MIB  # 12 MiB, an upload of three parts


def state_of(seed: int, numel: int = 3000) -> dict[str, Any]:
    """Returns a state that differs by seed in every part."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(numel, generator=generator),
        "bias": torch.randn(7, generator=generator),
        "step": seed,
    }


OLD, NEW, OTHER = (state_of(seed) for seed in (1, 2, 3))


def save(state: dict[str, Any], url: str, **options: Any) -> None:
    """Saves with `MEMORY_BYTES`, unless `options` say something else."""
    chosen = {"host_memory_bytes": MEMORY_BYTES, **options}
    torch_dcpx.save(state, url, no_dist=True, options=WriteOptions(**chosen))


def load(state: dict[str, Any], url: str) -> dict[str, Any]:
    """Returns what a blank copy of `state` holds after the load."""
    target: dict[str, Any] = blank_like(state)
    torch_dcpx.load(target, url, no_dist=True)
    return target


class Store:
    """A URL of a test, on a server; `proxy` is there where the test asks for it."""

    proxy: FaultProxy

    def __init__(self, server: ObjectServer, url: str) -> None:
        self.server, self.url = server, url

    def key(self, name: str = "") -> str:
        return f"{self.url}/{name}".removeprefix(f"{self.server.root}/")

    def objects(self, beneath: str = "") -> dict[str, bytes]:
        """Returns name -> bytes of the objects beneath the URL, or beneath a name there."""
        prefix = self.key(f"{beneath}/" if beneath else "")
        return {key.removeprefix(prefix): self.server.get(key) for key in self.server.keys(prefix)}

    def names(self, beneath: str = "") -> set[str]:
        prefix = self.key(f"{beneath}/" if beneath else "")
        return {key.removeprefix(prefix) for key in self.server.keys(prefix)}

    def kinds(self, tag: str) -> set[str]:
        """Returns the names of a checkpoint's objects, "data" for each data file."""
        return {"data" if name.endswith(".distcp") else name for name in self.names(tag)}

    def data(self, beneath: str = "") -> str:
        """Returns the name of the one data file."""
        (name,) = (name for name in self.names(beneath) if name.endswith(".distcp"))
        return f"{beneath}/{name}" if beneath else name

    def get(self, name: str) -> bytes:
        return self.server.get(self.key(name))

    def put(self, name: str, data: bytes) -> None:
        self.server.put(self.key(name), data)

    def delete(self, *names: str) -> None:
        for name in names:
            self.server.delete(self.key(name))

    def put_all(self, objects: Mapping[str, bytes]) -> None:
        """Makes these the only objects."""
        self.server.remove(f"{self.url}/")
        for name, data in objects.items():
            self.put(name, data)

    def put_folder(self, folder: Path, beneath: str = "") -> dict[str, bytes]:
        """Puts a folder's files there; returns them."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for name, data in files.items():
            self.put(f"{beneath}/{name}" if beneath else name, data)
        return files

    def reset(self, objects: Mapping[str, bytes]) -> None:
        """Makes these the only objects; the next request's number is 0, and none fails."""
        forget_roots()
        self.put_all(objects)
        self.proxy.heal()
        self.proxy.clear()

    def saved(self, state: dict[str, Any], name: str = "") -> dict[str, bytes]:
        """Returns the objects of a checkpoint, which is there then."""
        with retries(0):
            save(state, f"{self.url}/{name}" if name else self.url)
        return self.objects(name)

    def prepared(self, what: str) -> dict[str, bytes]:
        """Returns the objects of what is there before: "old", or "none"."""
        return self.saved(OLD) if what == "old" else {}

    def found(self, old: Mapping[str, bytes], new_state: dict[str, Any], name: str = "") -> Found:
        """Says which checkpoint lies there, and fails unless it is whole.

        Args:
            old: the objects of the previous one; empty: there was none.
            new_state: what the other one must hold. It is loaded, by the environment's endpoint.
            name: beneath the URL.
        """
        url, objects = f"{self.url}/{name}" if name else self.url, self.objects(name)
        metadata = objects.pop(".metadata", None)
        if metadata is None:
            assert not old, "the previous checkpoint is lost"
            return Found("none", sorted(objects))
        named = decode_file_names(metadata, url)
        assert named <= set(objects), f"{url} lacks {named - set(objects)}"
        more = sorted(set(objects) - named)
        if metadata == old.get(".metadata"):
            assert all(objects[name] == old[name] for name in named)
            return Found("old", more)
        assert_same(new_state, load(new_state, url))
        return Found("new", more)

    def has_no_upload(self) -> bool:
        """Whether no upload is open, of those that somebody could have ended."""
        return not self.server.has_aborts or not self.server.uploads(self.url)


class Found(NamedTuple):
    """What lies beneath a URL."""

    what: str  # "none", "old" or "new": whole, bit for bit
    more: list[str]  # names of objects that the checkpoint does not name


def bucket_of(url: str) -> tuple[Bucket, str]:
    """Returns the bucket of a URL, and the key."""
    place = location_of(url)
    assert isinstance(place, ObjectUrl)
    return object_store.bucket_of(place), place.key


def error_of(call: Callable[[], object]) -> DcpxError | None:
    """Returns the error that the call raises; one that is not ours fails the test."""
    try:
        call()
    except DcpxError as error:
        return error
    return None


def loaded_or_error(state: dict[str, Any], url: str) -> tuple[DcpxError | None, dict[str, Any]]:
    """Returns the error of a load, or what it has loaded."""
    try:
        return None, load(state, url)
    except DcpxError as error:
        return error, {}


def assert_settled(error: DcpxError | None, what: str, before: str) -> None:
    """Asserts that what lies there is what the save has said.

    Args:
        what: of `Found`.
        before: what was there: "none" or "old".
    """
    if error is None:
        assert what == "new", "a save returned and is not there"
    elif isinstance(error, OutcomeUnknownError):
        assert what in (before, "new")
    else:
        assert what == before, f"a save failed and is there: {error!r}"


@contextmanager
def retries(count: int | None) -> Iterator[None]:
    """In the block, obstore repeats a request so often, and with 0 we do not, either; without a
    pause. None: all as it is for a user.

    The bucket is opened anew, and asked again what it can do.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_store, "_buckets", {})
        if count is not None:
            short, long = timedelta(milliseconds=1), timedelta(milliseconds=5)
            retry_config = {
                "max_retries": count,
                "retry_timeout": timedelta(minutes=3),
                "backoff": {"init_backoff": short, "max_backoff": long, "base": 2},
            }
            patch.setattr(object_store, "_CLIENT", {"retry_config": retry_config})
            patch.setattr(object_place, "_COMMIT_PAUSE_S", 0.0)
            patch.setattr(store_root, "_PAUSE_S", 0.0)
            for module in (object_store, object_uploads):
                patch.setattr(module, "_PAUSE_S", 0.0)
                if count == 0:
                    patch.setattr(module, "_TRIES", 1)
        yield


class LatePut:
    """Keeps the first conditional PUT of metadata back: its client learns that it has failed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._put: Any = Bucket.put_if
        self._held: tuple[Any, ...] | None = None
        self.before_next: Callable[[], None] = lambda: None  # called before each later PUT
        self.takes: Callable[[str], bool] = lambda _: True  # which keys this is about

        def put_if(*arguments: Any) -> None:
            self._called(*arguments)

        patch.setattr(Bucket, "put_if", put_if)

    def _called(
        self, bucket: Bucket, key: str, pieces: Sequence[Any], replaced: str | None
    ) -> None:
        if not self.takes(key):
            self._put(bucket, key, pieces, replaced)
            return
        if self._held is None:
            self._held = bucket, key, [bytes(piece) for piece in pieces], replaced
            raise StorageError("put: timed out", errno=5)
        self.before_next()
        self._put(bucket, key, pieces, replaced)

    def arrive(self) -> None:
        """The store does it now."""
        assert self._held is not None
        self._put(*self._held)


def unanswered() -> None:
    raise StorageError("put: the store is gone", errno=5)


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
