"""One request of an export to a store fails: the old artifact or the new one is there, whole.

An export that returned is there, and one that raised left what was there, unless it raises
OutcomeUnknownError. A failed one leaves no object and no upload of its own. With retries, a lost
request or answer is not noticed.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from object_exports import (
    INDEX,
    KINDS,
    SINGLE,
    export,
    exported,
    is_same,
    names_at,
    tensors_of,
)
from object_outcomes import (
    LARGE_NUMEL,
    LOST,
    REFUSED,
    Store,
    error_of,
    objects_at,
    retries,
    save,
)
from support.machine import spread
from support.object_proxy import AFTER, FaultProxy
from support.object_requests import Request
from support.object_server import ObjectServer

from torch_dcpx import OutcomeUnknownError, StorageError
from torch_dcpx.artifacts.sources import LiveSource

# kind of the old artifact, of the new one
EXPORTS = [
    ("", "single"),
    ("single", "single"),
    ("shards", "shards"),
    ("single", "shards"),
    ("shards", "single"),
    ("shards", "parts"),
]
_TRIES = 3


@pytest.fixture
def store(object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy) -> Store:
    return Store(object_server, object_proxy, object_prefix)


def _prepared(store: Store, kind: str) -> dict[str, bytes]:
    """Returns the objects of an artifact of this kind; of none: a file of a user's."""
    store.reset({"notes.txt": b"a user's own"})
    if kind:
        with retries(0):
            export(tensors_of(1), store.url, kind)
    return objects_at(store.server, store.url)


def _what(store: Store, old: str, new: dict[str, torch.Tensor]) -> str:
    """Returns which artifact is there, whole: "old", "new" or "none"."""
    there = names_at(store.server, store.url)
    assert "notes.txt" in there
    if not {SINGLE, INDEX} & there:
        assert not old
        return "none"
    found, _ = exported(store.server, store.url)
    if is_same(found, new):
        return "new"
    assert old and is_same(found, tensors_of(1))
    return "old"


def _export_with_fault(
    store: Store,
    kinds: tuple[str, str],
    objects: dict[str, bytes],
    number: int,
    how: str,
    tries: int,
) -> Request | None:
    """Exports while one request fails, and asserts what must hold. Returns that request."""
    old, kind = kinds
    new = tensors_of(2, KINDS[kind][0])
    store.reset(objects)
    store.proxy.fail(number, how)
    with retries(tries):
        error = error_of(lambda: export(new, store.url, kind))
    requests = store.proxy.requests()
    store.proxy.heal()
    if number >= len(requests):
        assert error is None
        return None
    hit, what = requests[number], _what(store, old, new)
    where = f"{how} of {number}, {hit.kind} {hit.key}, {tries} tries: {error!r}, {what}"
    print(where)
    if error is None:
        assert what == "new", where
    elif not isinstance(error, OutcomeUnknownError):
        assert what == ("old" if old else "none"), where
    if tries and how in LOST:
        assert error is None, where
    is_orphan = hit.kind == "create_upload" and how in AFTER
    if store.server.has_aborts:
        assert len(store.server.uploads(store.url)) == is_orphan, where
    there = names_at(store.server, store.url)
    if hit.kind == "delete_many" or isinstance(error, OutcomeUnknownError):
        return hit
    used = exported(store.server, store.url)[1] if what == "new" else set(objects)
    assert there == {"notes.txt", *used}, where
    return hit


def _sweep(store: Store, seed: int, kinds: tuple[str, str], hows: Any, tries: Any) -> None:
    objects = _prepared(store, kinds[0])
    for number in spread(200, seed):
        if _export_with_fault(store, kinds, objects, number, hows(), tries()) is None:
            break
    assert number > 2


@pytest.mark.parametrize("kinds", EXPORTS, ids="-".join)
def test_fault_of_any_request_of_an_export_leaves_one_artifact_whole(
    store: Store, seed: int, kinds: tuple[str, str]
) -> None:
    """A sample: one fault a request."""
    draw = random.Random(seed)
    hows, tries = (*LOST, *REFUSED), (0, _TRIES)
    _sweep(store, seed, kinds, lambda: draw.choice(hows), lambda: draw.choice(tries))


@pytest.mark.slow
@pytest.mark.parametrize("tries", [0, _TRIES])
@pytest.mark.parametrize("how", [*LOST, *REFUSED])
@pytest.mark.parametrize("kinds", EXPORTS, ids="-".join)
def test_every_fault_of_every_request_of_an_export_leaves_one_artifact_whole(
    store: Store, seed: int, kinds: tuple[str, str], how: str, tries: int
) -> None:
    _sweep(store, seed, kinds, lambda: how, lambda: tries)


# ---- Faults that stay ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["reset", "lost_answer"])
@pytest.mark.parametrize("kinds", [("shards", "shards"), ("single", "single")], ids="-".join)
def test_unknown_outcome_of_the_last_put_leaves_what_either_outcome_needs(
    store: Store, kinds: tuple[str, str], how: str
) -> None:
    objects = _prepared(store, kinds[0])
    new = tensors_of(2)

    def fall_silent(_: Request) -> str:
        store.proxy.fail("any", "reset", times=None)
        return how

    store.reset(objects)
    store.proxy.hook("put_object", fall_silent, key=INDEX if kinds[1] == "shards" else SINGLE)
    with retries(0), pytest.raises(OutcomeUnknownError, match="its outcome is unknown"):
        export(new, store.url, kinds[1])
    store.proxy.heal()
    assert _what(store, kinds[0], new) == ("old" if how == "reset" else "new")
    assert set(objects) <= names_at(store.server, store.url)


@pytest.mark.parametrize("kinds", [("shards", "shards"), ("single", "single")], ids="-".join)
def test_put_that_nobody_answers_is_not_forgotten_when_the_next_is_refused(
    store: Store, kinds: tuple[str, str]
) -> None:
    """It may be done later: what it needs has to be there then."""
    objects = _prepared(store, kinds[0])

    def lost(_: Request) -> str:
        store.proxy.fail("put_object", "403", times=None)
        return "reset"

    store.reset(objects)
    last = INDEX if kinds[1] == "shards" else SINGLE
    store.proxy.hook("put_object", lost, key=last)
    with retries(0), pytest.raises(OutcomeUnknownError, match="its outcome is unknown"):
        export(tensors_of(2), store.url, kinds[1])
    store.proxy.heal()
    assert _what(store, kinds[0], tensors_of(2)) == "old"
    if kinds[1] == "shards":
        late = [name for name in names_at(store.server, store.url) if name not in objects]
        assert late and all(name.endswith(".safetensors") for name in late)


@pytest.mark.parametrize("kind", ["parts", "shards"])
def test_source_that_fails_aborts_the_upload(store: Store, kind: str) -> None:
    """The checkpoint lies in the store as well; its second half is not to be had."""
    objects = _prepared(store, "shards")
    new = tensors_of(2, LARGE_NUMEL)
    ckpt = f"{store.url}-ckpt"
    with retries(0):
        save(new, ckpt)
        store.reset(objects)
        store.proxy.fail("get_object", "403", times=None, key="-ckpt/__0_0", skip=5)
        error = error_of(lambda: export(ckpt, store.url, kind))
        assert isinstance(error, StorageError) and "-ckpt/__0_0" in str(error.path)
        store.proxy.heal()
        assert _what(store, "shards", new) == "old"
        assert names_at(store.server, store.url) == set(objects)
        assert not store.server.uploads(store.url) or not store.server.has_aborts
        export(ckpt, store.url, kind)
        assert _what(store, "shards", new) == "new"


def test_interrupt_aborts_the_upload(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = _prepared(store, "shards")
    fill, calls = LiveSource.fill, []

    def interrupted(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        fill(*arguments)

    monkeypatch.setattr(LiveSource, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(tensors_of(2, LARGE_NUMEL), store.url, "parts")
    assert objects_at(store.server, store.url) == objects
    assert not store.server.uploads(store.url) or not store.server.has_aborts
    assert not [one for one in threading.enumerate() if one.name.startswith("dcpx-upload")]


def test_failed_removal_of_the_old_single_file_says_so(store: Store) -> None:
    objects = _prepared(store, "single")
    store.reset(objects)
    store.proxy.fail("delete_many", "403", times=None)
    with retries(0):
        error = error_of(lambda: export(tensors_of(2), store.url, "shards"))
    assert isinstance(error, StorageError) and str(error.path).endswith(SINGLE)
    store.proxy.heal()
    assert _what(store, "single", tensors_of(2)) == "old"  # loaders take it first
    store.server.delete(f"{store.url}/{SINGLE}")
    assert _what(store, "single", tensors_of(2)) == "new"
