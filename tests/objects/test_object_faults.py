"""One request of a save or a load to a store fails: what holds afterwards, for every request.

A save leaves the previous checkpoint or the new one, whole; it says which, unless it raises
OutcomeUnknownError. A failed save leaves no object and no upload of its own. With retries, a
lost request or answer is not noticed.
"""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from object_outcomes import (
    LARGE_NUMEL,
    LOST,
    REFUSED,
    Store,
    assert_settled,
    error_of,
    found,
    load,
    loaded_or_error,
    objects_at,
    retries,
    save,
    state_of,
)
from support.machine import seconds, spread
from support.object_fixture import s3_alone
from support.object_proxy import AFTER, FaultProxy
from support.object_requests import Request
from support.object_server import ObjectServer
from support.states import assert_same

from torch_dcpx import DcpxError, OutcomeUnknownError

# kind of save -> elements of the old state (0: there is none), of the new one
SAVES = {"first": (0, 3000), "over": (3000, 3000), "parts": (3000, LARGE_NUMEL)}
_AFTER_COMMIT = ("get_object", "list", "delete_many")  # what is needed for removals alone
_TRIES = 3
_DEADLINE_S = seconds(120)


@pytest.fixture
def store(object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy) -> Store:
    return Store(object_server, object_proxy, object_prefix)


def _states(kind: str, store: Store) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Returns the old checkpoint's objects and the new state."""
    old_numel, new_numel = SAVES[kind]
    old = store.saved(state_of(1, old_numel)) if old_numel else {}
    return old, state_of(2, new_numel)


def _requests_of(store: Store, old: dict[str, bytes], new: dict[str, Any]) -> list[Request]:
    """Returns the requests of a save without a fault."""
    store.reset(old)
    with retries(0):
        save(new, store.url)
        requests = store.proxy.requests()
        assert found(store.server, store.url, old, new) == ("new", [])
    return requests


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
        there = found(store.server, store.url, old, new)
    assert requests[number].fault == how
    hit = requests[number]
    where = f"{how} of {number}, {hit.kind} {hit.key}, {tries} tries: {error!r}, {there}"
    print(where)
    assert_settled(error, there.what, "old" if old else "none")
    is_committed_before = "complete" in {_step(one) for one in requests[:number]}
    if tries and how in LOST:
        assert error is None, where
    # What a store has begun and not answered, nobody knows to end.
    is_orphan = hit.kind == "create_upload" and how in AFTER
    if store.server.has_aborts:
        assert len(store.server.uploads(store.url)) == is_orphan, where
    _assert_removed(there.more, old, hit, where, is_committed=is_committed_before, error=error)


def _step(request: Request) -> str:
    is_commit = request.key.endswith("/.metadata") and request.kind == "put_object"
    return "complete" if is_commit and request.is_done else ""


def _assert_removed(
    more: Sequence[str],
    old: dict[str, bytes],
    hit: Request,
    where: str,
    *,
    is_committed: bool,
    error: DcpxError | None,
) -> None:
    """Asserts that nothing stays but what only the request that failed could have removed."""
    left = set(more)
    if isinstance(error, OutcomeUnknownError):
        return
    if hit.kind == "delete_many" and not is_committed:
        left = {name for name in left if not name.startswith(".dcpx.probe.")}
    if error is None and hit.kind in _AFTER_COMMIT:
        left -= set(old)
    assert not left, where


@pytest.mark.parametrize("kind", SAVES)
def test_fault_of_any_request_of_a_save_leaves_one_checkpoint_whole(
    store: Store, seed: int, kind: str
) -> None:
    """A sample: one fault a request."""
    old, new = _states(kind, store)
    draw = random.Random(seed)
    requests = _requests_of(store, old, new)
    begin = 0 if kind != "parts" else _first(requests, store.server.begins_upload)
    for number in spread(len(requests) - begin, seed):
        tries = draw.choice([0, _TRIES])
        _save_with_fault(store, old, new, begin + number, draw.choice([*LOST, *REFUSED]), tries)


def _first(requests: Sequence[Request], kind: str) -> int:
    return next(one.number for one in requests if one.kind == kind)


_OF_PARTS = ("reset", "503", "lost_answer", "403")  # the others are other words for them


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (kind, how)
        for kind in SAVES
        for how in (_OF_PARTS if kind == "parts" else [*LOST, *REFUSED])
    ],
)
@pytest.mark.parametrize("tries", [0, _TRIES])
def test_every_fault_of_every_request_of_a_save_leaves_one_checkpoint_whole(
    store: Store, seed: int, kind: str, how: str, tries: int
) -> None:
    old, new = _states(kind, store)
    requests = _requests_of(store, old, new)
    begin = 0 if kind != "parts" else _first(requests, store.server.begins_upload)
    for number in spread(len(requests) - begin, seed):
        _save_with_fault(store, old, new, begin + number, how, tries)


def test_fault_is_not_noticed_with_the_retries_of_a_user(store: Store) -> None:
    """As `_TRIES` above, but with what obstore chooses, which waits 0.1 s before a retry."""
    old, new = _states("over", store)
    for how in ("reset", "lost_answer", "503"):
        store.reset(old)
        store.proxy.fail("put_object", how, key=".distcp")
        store.proxy.fail("put_object", how, key="/.metadata")
        with retries(None):
            save(new, store.url)
            assert found(store.server, store.url, old, new) == ("new", [])
        assert [one.fault for one in store.proxy.requests()].count(how) == 2


# ---- Faults that stay ---------------------------------------------------------------------------

_KINDS = (
    "put_object",
    "head_object",
    "get_object",
    "create_upload",
    "upload_part",
    "complete_upload",
    "list",
    "delete_many",
)


def _slow(*values: str) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(
    "how",
    [
        "reset",
        "403",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("500", "lost_answer")),
    ],
)
def test_kind_of_request_that_always_fails_leaves_one_checkpoint_whole(
    store: Store, kind: str, how: str
) -> None:
    old, new = _states("parts", store)
    store.reset(old)
    kind = store.server.begins_upload if kind == "create_upload" else kind
    store.proxy.fail(kind, how, times=None)
    with retries(1):
        error = error_of(lambda: save(new, store.url))
        assert store.proxy.count(kind) > 0
        store.proxy.heal()
        there = found(store.server, store.url, old, new)
        print(f"{error!r}, {there}")
        assert_settled(error, there.what, "old")
        if kind not in _AFTER_COMMIT and how not in AFTER:  # what was done can be found
            assert error is not None
        is_orphan = kind == "create_upload" and how in AFTER
        if store.server.has_aborts:
            assert bool(store.server.uploads(store.url)) == is_orphan
        _assert_next_save_holds(store)


def _assert_next_save_holds(store: Store) -> None:
    newest = state_of(3)
    save(newest, store.url)
    assert_same(newest, load(newest, store.url))


@s3_alone
def test_upload_that_cannot_be_aborted_fails_the_save_all_the_same(store: Store) -> None:
    old, new = _states("parts", store)
    store.reset(old)
    store.proxy.fail("upload_part", "500", times=None)
    store.proxy.fail("abort_upload", "500", times=None)
    with retries(0):
        error = error_of(lambda: save(new, store.url))
        assert error is not None
        assert "upload" in str(error)
        store.proxy.heal()
        assert found(store.server, store.url, old, new) == ("old", [])
        assert store.proxy.count("abort_upload") > 0
        assert len(store.server.uploads(store.url)) == 1  # the test is able to see one
        _assert_next_save_holds(store)


def test_failed_upload_removes_the_files_that_are_there_already(store: Store) -> None:
    old, _ = _states("over", store)
    store.reset(old)
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
    assert found(store.server, store.url, old, new) == ("old", [])


def test_failed_save_whose_removal_fails_too_keeps_its_own_error(store: Store) -> None:
    old, new = _states("over", store)
    store.reset(old)
    with retries(0):
        store.proxy.fail("put_object", "403", key=".distcp")
        store.proxy.fail("delete_many", "500", times=None, skip=1)  # the probe's passes
        error = error_of(lambda: save(new, store.url))
        assert "AccessDenied" in str(error)
        assert ".distcp" in str(error)
        store.proxy.heal()
        assert found(store.server, store.url, old, new).what == "old"
        _assert_next_save_holds(store)


# ---- Faults at random ---------------------------------------------------------------------------


def _assert_survives(store: Store, seed: int, tries: int, rate: float, rounds: int) -> int:
    """Saves and loads over and over among random faults; returns how many calls failed."""
    draw = random.Random(seed)
    objects: dict[str, bytes] = {}
    state: dict[str, Any] = {}
    failed = 0
    store.reset({})
    for number in range(1, rounds + 1):
        new = state_of(number, draw.choice([3000, 3000, LARGE_NUMEL // 2]))
        with retries(tries):
            store.proxy.seeded(draw.randrange(1 << 30), rate, hows=(*LOST, "403"))
            error = error_of(lambda new=new: save(new, store.url))
            store.proxy.heal()
            # Data objects that a failed removal has left are named by nothing: they do not count.
            there = found(store.server, store.url, objects, new)
            assert_settled(error, there.what, "old" if objects else "none")
            failed += error is not None
            if there.what == "new":
                objects, state = objects_at(store.server, store.url), new
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
    failed = _assert_survives(store, seed, tries, 0.1, 8)
    print(f"{failed} of 16 calls failed")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_many_random_faults_lose_no_checkpoint(store: Store, seed: int, number: int) -> None:
    failed = _assert_survives(store, seed, number % 2 * _TRIES, 0.05 * (1 + number), 16)
    assert failed or number % 2  # with retries, all may succeed


def test_failed_save_keeps_no_tensor_and_no_thread(store: Store) -> None:
    old, _ = _states("parts", store)
    begins = store.server.begins_upload
    for kind in (begins, "upload_part", "complete_upload", "head_object"):
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
