"""One request of an export to a store fails: the old artifact or the new one is there, whole.

An export that returned is there, and one that raised left what was there, unless it raises
OutcomeUnknownError. A failed one leaves no object and no upload of its own. With retries, a lost
request or answer is not noticed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from object_exports import INDEX, KINDS, SINGLE, export, exported, is_same, tensors_of
from object_outcomes import LARGE_NUMEL, LOST, REFUSED, Store, error_of, retries, save
from support.machine import spread
from support.object_proxy import AFTER
from support.object_requests import Request

from torch_dcpx import OutcomeUnknownError, StorageError
from torch_dcpx.artifacts.sources import LiveSource

pytestmark = pytest.mark.usefixtures("proxy")

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


def _prepared(store: Store, kind: str) -> dict[str, bytes]:
    """Returns the objects of an artifact of this kind and a user's; no more fails, none is asked
    for yet.
    """
    store.reset({})
    store.put("notes.txt", b"a user's own")
    if kind:
        with retries(0):
            export(tensors_of(1), store.url, kind)
    objects = store.objects()
    store.reset(objects)
    return objects


def _what(store: Store, old: str, new: dict[str, torch.Tensor]) -> str:
    """Returns which artifact is there, whole: "old", "new" or "none"."""
    there = store.names()
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
) -> bool:
    """Exports while one request fails, and asserts what must hold. Returns whether it came."""
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
        return False
    hit, what = requests[number], _what(store, old, new)
    where = f"{how} of {number}, {hit.kind} {hit.key}, {tries} tries: {error!r}, {what}"
    print(where)
    if error is None:
        assert what == "new", where
    elif not isinstance(error, OutcomeUnknownError):
        assert what == ("old" if old else "none"), where
    if tries and how in LOST:
        assert error is None, where
    if store.server.has_aborts:
        is_orphan = hit.kind == "create_upload" and how in AFTER
        assert len(store.server.uploads(store.url)) == is_orphan, where
    if hit.kind != "delete_many" and not isinstance(error, OutcomeUnknownError):
        used = exported(store.server, store.url)[1] if what == "new" else set(objects)
        assert store.names() == {"notes.txt", *used}, where
    return True


def _sweep(
    store: Store, seed: int, kinds: tuple[str, str], fault: Callable[[], tuple[str, int]]
) -> None:
    objects = _prepared(store, kinds[0])
    for number in spread(200, seed):
        if not _export_with_fault(store, kinds, objects, number, *fault()):
            break
    assert number > 2


@pytest.mark.parametrize("kinds", EXPORTS, ids="-".join)
def test_fault_of_any_request_of_an_export_leaves_one_artifact_whole(
    store: Store, seed: int, kinds: tuple[str, str]
) -> None:
    """A sample: one fault a request."""
    draw = random.Random(seed)
    _sweep(store, seed, kinds, lambda: (draw.choice([*LOST, *REFUSED]), draw.choice([0, _TRIES])))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reset", "lost_answer", "done_500", *REFUSED])
@pytest.mark.parametrize("kinds", EXPORTS, ids="-".join)
def test_every_fault_of_every_request_of_an_export_leaves_one_artifact_whole(
    store: Store, seed: int, kinds: tuple[str, str], how: str
) -> None:
    for tries in (0, _TRIES):
        _sweep(store, seed, kinds, lambda tries=tries: (how, tries))


# ---- Faults that stay ---------------------------------------------------------------------------

_LAST = {"shards": INDEX, "single": SINGLE}  # kind -> whose PUT ends an export


@pytest.mark.parametrize("how", ["reset", "lost_answer"])
@pytest.mark.parametrize("kind", _LAST)
def test_unknown_outcome_of_the_last_put_leaves_what_either_outcome_needs(
    store: Store, kind: str, how: str
) -> None:
    objects, new = _prepared(store, kind), tensors_of(2)

    def fall_silent(_: Request) -> str:
        store.proxy.fail("any", "reset", times=None)
        return how

    store.proxy.hook("put_object", fall_silent, key=_LAST[kind])
    with retries(0), pytest.raises(OutcomeUnknownError, match="its outcome is unknown"):
        export(new, store.url, kind)
    store.proxy.heal()
    assert _what(store, kind, new) == ("old" if how == "reset" else "new")
    assert set(objects) <= store.names()


@pytest.mark.parametrize("kind", _LAST)
def test_put_that_nobody_answers_is_not_forgotten_when_the_next_is_refused(
    store: Store, kind: str
) -> None:
    """It may be done later: what it needs has to be there then."""
    objects = _prepared(store, kind)

    def lost(_: Request) -> str:
        store.proxy.fail("put_object", "403", times=None)
        return "reset"

    store.proxy.hook("put_object", lost, key=_LAST[kind])
    with retries(0), pytest.raises(OutcomeUnknownError, match="its outcome is unknown"):
        export(tensors_of(2), store.url, kind)
    store.proxy.heal()
    assert _what(store, kind, tensors_of(2)) == "old"
    if kind == "shards":
        late = store.names() - set(objects)
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
        assert store.names() == set(objects) and store.has_no_upload()
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
    assert store.objects() == objects and store.has_no_upload()
    assert not [one for one in threading.enumerate() if one.name.startswith("dcpx-upload")]


def test_failed_removal_of_the_old_single_file_says_so(store: Store) -> None:
    _prepared(store, "single")
    store.proxy.fail("delete_many", "403", times=None)
    with retries(0):
        error = error_of(lambda: export(tensors_of(2), store.url, "shards"))
    assert isinstance(error, StorageError) and str(error.path).endswith(SINGLE)
    store.proxy.heal()
    assert _what(store, "single", tensors_of(2)) == "old"  # loaders take it first
    store.delete(SINGLE)
    assert _what(store, "single", tensors_of(2)) == "new"
