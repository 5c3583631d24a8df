"""One request of a save or a load to a store fails: what holds afterwards, for every request.

A save leaves the previous checkpoint or the new one, whole; it says which, unless it raises
OutcomeUnknownError. A failed save leaves no object and no upload of its own. What a load gets is
whole. With retries, a lost request or answer is not noticed.
"""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from object_outcomes import (
    LARGE_NUMEL,
    LOST,
    REFUSED,
    Store,
    assert_settled,
    error_of,
    load,
    loaded_or_error,
    retries,
    save,
    state_of,
)
from support.machine import seconds, spread
from support.object_fixture import s3_alone
from support.object_proxy import AFTER
from support.object_requests import Request
from support.states import assert_same

from torch_dcpx import OutcomeUnknownError

pytestmark = pytest.mark.usefixtures("proxy")

# kind of save -> elements of the old state (0: there is none), of the new one
SAVES = {"first": (0, 3000), "over": (3000, 3000), "parts": (3000, LARGE_NUMEL)}
_AFTER_COMMIT = ("get_object", "list", "delete_many")  # what is needed for removals alone
_TRIES = 3
_DEADLINE_S = seconds(120)


def _states(kind: str, store: Store) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Returns the old checkpoint's objects, which are there, and the new state."""
    old_numel, new_numel = SAVES[kind]
    old = store.saved(state_of(1, old_numel)) if old_numel else {}
    store.reset(old)
    return old, state_of(2, new_numel)


def _numbers(store: Store, old: dict[str, bytes], new: dict[str, Any], seed: int) -> list[int]:
    """Returns those of the requests that a sweep fails: of an upload by parts, the upload's."""
    with retries(0):
        save(new, store.url)
        requests = store.proxy.requests()
        assert store.found(old, new) == ("new", [])
    begins = [one.number for one in requests if one.kind == store.server.begins_upload]
    begin = begins[0] if begins else 0
    return [begin + number for number in spread(len(requests) - begin, seed)]


def _save_with_fault(
    store: Store, old: dict[str, bytes], new: dict[str, Any], number: int, how: str, tries: int
) -> None:
    """Saves while one request fails, and asserts what must hold."""
    store.reset(old)
    store.proxy.fail(number, how)
    with retries(tries):
        error = error_of(lambda: save(new, store.url))
        requests = store.proxy.requests()
        store.proxy.heal()
        there = store.found(old, new)
    hit = requests[number]
    where = f"{how} of {number}, {hit.kind} {hit.key}, {tries} tries: {error!r}, {there}"
    print(where)
    assert hit.fault == how
    assert_settled(error, there.what, "old" if old else "none")
    if tries and how in LOST:
        assert error is None, where
    # What a store has begun and not answered, nobody knows to end.
    is_orphan = hit.kind == "create_upload" and how in AFTER
    if store.server.has_aborts:
        assert len(store.server.uploads(store.url)) == is_orphan, where
    if not isinstance(error, OutcomeUnknownError):
        left = _left(there.more, old, requests, number, is_committed=error is None)
        assert not left, where


def _left(
    more: Sequence[str],
    old: dict[str, bytes],
    requests: Sequence[Request],
    number: int,
    *,
    is_committed: bool,
) -> set[str]:
    """Returns what stays there besides what only the request that failed could have removed."""
    left, hit = set(more), requests[number]
    commits = [one for one in requests[:number] if one.kind == "put_object" and one.is_done]
    if hit.kind == "delete_many" and not any(one.key.endswith("/.metadata") for one in commits):
        left = {name for name in left if not name.startswith(".dcpx.probe.")}
    return left - set(old) if is_committed and hit.kind in _AFTER_COMMIT else left


@pytest.mark.parametrize("kind", SAVES)
def test_fault_of_any_request_of_a_save_leaves_one_checkpoint_whole(
    store: Store, seed: int, kind: str
) -> None:
    """A sample: one fault a request."""
    old, new = _states(kind, store)
    draw = random.Random(seed)
    for number in _numbers(store, old, new, seed):
        tries = draw.choice([0, _TRIES])
        _save_with_fault(store, old, new, number, draw.choice([*LOST, *REFUSED]), tries)


# Others are other words for these: 500 and 503 for a reset, a cut answer for a lost one.
_HOWS = ("reset", "lost_answer", "done_500", "412", "409", "403")


@pytest.mark.slow
@pytest.mark.parametrize("how", _HOWS)
@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.parametrize("tries", [0, _TRIES])
def test_every_fault_of_every_request_of_a_save_leaves_one_checkpoint_whole(
    store: Store, seed: int, kind: str, how: str, tries: int
) -> None:
    old, new = _states(kind, store)
    for number in _numbers(store, old, new, seed):
        _save_with_fault(store, old, new, number, how, tries)


def test_fault_is_not_noticed_with_the_retries_of_a_user(store: Store) -> None:
    """As `_TRIES` above, but with what obstore chooses, which waits 0.1 s before a retry."""
    old, new = _states("over", store)
    for how in ("reset", "lost_answer", "503"):
        store.reset(old)
        store.proxy.fail("put_object", how, key=".distcp")
        store.proxy.fail("put_object", how, key="/.metadata")
        with retries(None):
            save(new, store.url)
            assert store.found(old, new) == ("new", [])
        assert [one.fault for one in store.proxy.requests()].count(how) == 2


# ---- Faults that stay ---------------------------------------------------------------------------

_UPLOAD = ("create_upload", "upload_part", "complete_upload")
_KINDS = ("put_object", "head_object", *_UPLOAD, *_AFTER_COMMIT)


@pytest.mark.parametrize("kind", _KINDS)
def test_kind_of_request_that_always_fails_leaves_one_checkpoint_whole(
    store: Store, kind: str
) -> None:
    old, new = _states("parts", store)
    kind = store.server.begins_upload if kind == "create_upload" else kind
    for how in ("reset", "403", "lost_answer"):
        store.reset(old)
        store.proxy.fail(kind, how, times=None)
        with retries(1):
            error = error_of(lambda: save(new, store.url))
            assert store.proxy.count(kind) > 0
            store.proxy.heal()
            there = store.found(old, new)
            print(f"{how}: {error!r}, {there}")
            assert_settled(error, there.what, "old")
            if kind not in _AFTER_COMMIT and how not in AFTER:  # what was done can be found
                assert error is not None, how
            is_orphan = kind == "create_upload" and how in AFTER
            if store.server.has_aborts:
                assert bool(store.server.uploads(store.url)) == is_orphan, how
            _assert_next_save_holds(store)


def _assert_next_save_holds(store: Store) -> None:
    newest = state_of(3)
    save(newest, store.url)
    assert_same(newest, load(newest, store.url))


@s3_alone
def test_upload_that_cannot_be_aborted_fails_the_save_all_the_same(store: Store) -> None:
    old, new = _states("parts", store)
    store.proxy.fail("upload_part", "500", times=None)
    store.proxy.fail("abort_upload", "500", times=None)
    with retries(0):
        assert "upload" in str(error_of(lambda: save(new, store.url)))
        store.proxy.heal()
        assert store.found(old, new) == ("old", [])
        assert store.proxy.count("abort_upload") > 0
        assert len(store.server.uploads(store.url)) == 1  # the test is able to see one
        _assert_next_save_holds(store)


def test_failed_upload_removes_the_files_that_are_there_already(store: Store) -> None:
    old, _ = _states("over", store)
    new = {f"tensor{number}": torch.full((1000,), float(number)) for number in range(6)}
    others = threading.Semaphore(0)

    def refuse(_: Request) -> str:
        for _ in range(2):
            if not others.acquire(timeout=_DEADLINE_S):
                raise TimeoutError
        return "403"

    store.proxy.hook("put_object", refuse, key="/__0_2.")
    store.proxy.hook("put_object", lambda _: others.release(), 2, key=".distcp", is_done=True)
    with retries(0):
        error = error_of(lambda: save(new, store.url, files_per_rank=3))
    assert "/__0_2." in str(error)
    assert store.proxy.count("put_object", ".distcp") == 3
    store.proxy.heal()
    assert store.found(old, new) == ("old", [])


def test_failed_save_whose_removal_fails_too_keeps_its_own_error(store: Store) -> None:
    old, new = _states("over", store)
    with retries(0):
        store.proxy.fail("put_object", "403", key=".distcp")
        store.proxy.fail("delete_many", "500", times=None, skip=1)  # the probe's passes
        error = error_of(lambda: save(new, store.url))
        assert "AccessDenied" in str(error) and ".distcp" in str(error)
        store.proxy.heal()
        assert store.found(old, new).what == "old"
        _assert_next_save_holds(store)


def test_failed_save_keeps_no_tensor_and_no_thread(store: Store) -> None:
    old, _ = _states("parts", store)
    for kind in (store.server.begins_upload, "upload_part", "complete_upload", "head_object"):
        store.reset(old)
        store.proxy.fail(kind, "500")
        new = state_of(2, LARGE_NUMEL)
        held = weakref.ref(new["weight"])
        with retries(0):
            assert error_of(lambda new=new: save(new, store.url)) is not None
        del new
        gc.collect()
        assert held() is None, kind
        assert not [one for one in threading.enumerate() if one.name.startswith("dcpx-upload")]


# ---- Faults at random ---------------------------------------------------------------------------


def _assert_survives(store: Store, seed: int, tries: int, rate: float, rounds: int) -> int:
    """Saves and loads over and over among random faults; returns how many calls failed."""
    draw = random.Random(seed)
    objects: dict[str, bytes] = {}
    state: dict[str, Any] = {}
    failed = 0
    for number in range(1, rounds + 1):
        new = state_of(number, draw.choice([3000, 3000, LARGE_NUMEL // 2]))
        with retries(tries):
            store.proxy.seeded(draw.randrange(1 << 30), rate, hows=(*LOST, "403"))
            error = error_of(lambda new=new: save(new, store.url))
            store.proxy.heal()
            # Data objects that a failed removal has left are named by nothing: they do not count.
            there = store.found(objects, new)
            assert_settled(error, there.what, "old" if objects else "none")
            failed += error is not None
            if there.what == "new":
                objects, state = store.objects(), new
            if not state:
                continue
            store.proxy.seeded(draw.randrange(1 << 30), rate, hows=(*LOST, "flip"))
            error, loaded = loaded_or_error(state, store.url)
            store.proxy.heal()
            failed += error is not None
            if error is None:
                assert_same(state, loaded)
    with retries(tries):
        _assert_next_save_holds(store)
    return failed


@pytest.mark.parametrize("tries", [0, _TRIES])
def test_random_faults_lose_no_checkpoint(store: Store, seed: int, tries: int) -> None:
    print(_assert_survives(store, seed, tries, 0.1, 8), "of 16 calls failed")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_many_random_faults_lose_no_checkpoint(store: Store, seed: int, number: int) -> None:
    failed = _assert_survives(store, seed, number % 2 * _TRIES, 0.05 * (1 + number), 16)
    assert failed or number % 2  # with retries, all may succeed


# ---- Loads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["ours", "stock's"])
def test_fault_of_any_request_of_a_load_is_an_error_or_not_noticed(
    store: Store, tmp_path: Path, written: str, chosen: Callable[[Sequence[Any]], list[Any]]
) -> None:
    # Stock's files have no checksum that a load compares (docs/explain/guarantees.md).
    hows = [*LOST, *REFUSED]
    state = state_of(1, 800_000 if written == "ours" else 300_000)  # more than one slot
    if written == "ours":
        store.saved(state)
        hows.append("flip")
    else:
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
        store.put_folder(tmp_path)
    store.proxy.clear()
    assert_same(state, load(state, store.url))
    count, seen = store.proxy.count(), set()
    assert count >= 3  # metadata, a file's end, payloads
    points = [(number, how) for number in range(count) for how in hows]
    for number, how, tries in [(*one, tries) for one in points for tries in chosen([0, _TRIES])]:
        store.proxy.heal()
        store.proxy.clear()
        store.proxy.fail(number, how)
        with retries(tries):
            error, loaded = loaded_or_error(state, store.url)
        hit = store.proxy.requests()[number]
        where = f"{how} of {hit}, {tries} tries: {error!r}"
        assert hit.fault == how
        if error is None:
            assert_same(state, loaded, where)
        if tries and how in LOST:
            assert error is None, where
        elif how not in ("flip", "412"):  # bytes between the payloads; a load that begins anew
            assert error is not None, where
        seen.add(type(error).__name__)
    assert seen >= {"StorageError"} | ({"CorruptionError"} if written == "ours" else set())
