"""The commit of a save to a store: of two at a time one wins, and no answer is no loss.

A commit may be done and not answered, not done and not answered, or be done long after its client
has given it up. Data objects stay as long as one of that can be.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from object_outcomes import (
    NEW,
    OLD,
    OTHER,
    LatePut,
    Store,
    error_of,
    interrupted,
    load,
    retries,
    save,
    state_of,
    unanswered,
)
from support.machine import seconds
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.rank_saves import write_ranks
from support.states import assert_same
from torch.distributed.checkpoint.api import CheckpointException

import torch_dcpx
from torch_dcpx import ConcurrentSaveError, DcpxWriter, OutcomeUnknownError, StorageError

_DEADLINE_S = seconds(120)
_METADATA = "/.metadata"
before_both = pytest.mark.parametrize("before", ["none", "old"])


# ---- Two saves at a time ------------------------------------------------------------------------


@before_both
@pytest.mark.parametrize("winner", [0, 1])
def test_later_of_two_commits_is_refused_and_leaves_nothing(
    store: Store, before: str, winner: int
) -> None:
    """Both have begun before the other commits."""
    store.prepared(before)
    with retries(0):
        states = [NEW, OTHER]
        saves = [write_ranks([state], store.url) for state in states]
        won, *won_takes = saves[winner]
        lost, *lost_takes = saves[1 - winner]
        won.finish(*won_takes)
        with pytest.raises(ConcurrentSaveError, match="another save has committed") as caught:
            lost.finish(*lost_takes)
        assert isinstance(caught.value, StorageError)
        assert store.found({}, states[winner]) == ("new", [])
        save(OLD, store.url)  # both writers are free, and nothing is in the way
        assert store.found({}, OLD) == ("new", [])


@before_both
def test_save_held_up_at_its_commit_is_refused_once_another_has_committed(
    store: Store, proxy: FaultProxy, before: str
) -> None:
    store.prepared(before)
    proxy.clear()
    go_on = threading.Event()

    def hold(_: Request) -> None:
        if not go_on.wait(_DEADLINE_S):
            raise TimeoutError

    proxy.hook("put_object", hold, key=_METADATA)
    with retries(0), ThreadPoolExecutor(1) as pool:
        try:
            held = pool.submit(error_of, lambda: save(OTHER, store.url))
            proxy.wait("put_object", key=_METADATA)
            save(NEW, store.url)
        finally:
            go_on.set()
        assert type(held.result(_DEADLINE_S)) is ConcurrentSaveError
        assert store.found({}, NEW) == ("new", [])


@before_both
def test_one_of_many_saves_that_commit_at_once_wins(
    store: Store, proxy: FaultProxy, before: str
) -> None:
    count = 4
    store.prepared(before)
    together = threading.Barrier(count)

    def meet(_: Request) -> None:
        together.wait(_DEADLINE_S)

    states = [state_of(10 + number) for number in range(count)]
    with retries(0), ThreadPoolExecutor(count) as pool:
        proxy.hook("put_object", meet, count, key=_METADATA)
        saves: list[Future[Any]] = [
            pool.submit(error_of, lambda state=state: save(state, store.url)) for state in states
        ]
        errors = [one.result(_DEADLINE_S) for one in saves]
        won = [state for state, error in zip(states, errors, strict=True) if error is None]
        assert len(won) == 1
        assert [type(error) for error in errors].count(ConcurrentSaveError) == count - 1
        proxy.heal()
        assert store.found({}, won[0]) == ("new", [])


def test_checkpoint_deleted_during_a_save_refuses_the_commit(store: Store) -> None:
    store.prepared("old")
    with retries(0):
        writer, *takes = write_ranks([NEW], store.url)
        store.delete(".metadata")
        with pytest.raises(ConcurrentSaveError):
            writer.finish(*takes)
    assert len([name for name in store.names() if "__" in name]) == 1  # which the old one named


# ---- Outcomes that nobody answers ---------------------------------------------------------------


@before_both
@pytest.mark.parametrize("times", [1, 2])
def test_commit_that_is_not_answered_is_settled_by_what_is_there(
    store: Store, proxy: FaultProxy, before: str, times: int
) -> None:
    old = store.prepared(before)
    for how in ("reset", "lost_answer", "500", "done_500", "412", "409"):
        store.reset(old)
        with retries(0):
            proxy.fail("put_object", how, times, key=_METADATA)
            save(NEW, store.url)
            proxy.heal()
            assert store.found(old, NEW) == ("new", []), how


@contextmanager
def _silent_from_commit(proxy: FaultProxy, how: str) -> Iterator[None]:
    """In the block the commit meets a fault, and after it the store answers nothing."""

    def fall_silent(_: Request) -> str:
        proxy.fail("any", "reset", times=None)
        return how

    proxy.hook("put_object", fall_silent, key=_METADATA)
    yield
    proxy.heal()


@before_both
@pytest.mark.parametrize("how", ["reset", "lost_answer"])
def test_store_that_falls_silent_at_the_commit_leaves_an_unknown_outcome(
    store: Store, proxy: FaultProxy, before: str, how: str
) -> None:
    old = store.prepared(before)
    with retries(0):
        with _silent_from_commit(proxy, how), pytest.raises(OutcomeUnknownError):
            save(NEW, store.url)
        assert store.found(old, NEW).what == ("new" if how == "lost_answer" else before)
        data = [name for name in store.names() if "__" in name]
        assert len(data) == 1 + len(old) // 2  # of both: what was not answered may yet be done
        save(OTHER, store.url)
        assert_same(OTHER, load(OTHER, store.url))


def test_unknown_outcome_is_raised_through_dcp_and_by_a_save_in_the_background(
    store: Store, proxy: FaultProxy
) -> None:
    old = store.prepared("old")
    with retries(0):
        with _silent_from_commit(proxy, "reset"):
            with pytest.raises(CheckpointException) as caught:
                dcp.save(NEW, storage_writer=DcpxWriter(store.url), no_dist=True)
            assert type(caught.value.failures[0][0]) is OutcomeUnknownError
        assert len(store.found(old, NEW).more) == 1
        with _silent_from_commit(proxy, "lost_answer"):
            handle = torch_dcpx.async_save(NEW, store.url, no_dist=True)
            with pytest.raises(OutcomeUnknownError):
                handle.result()
        assert store.found(old, NEW).what == "new"


def test_commit_refused_by_the_store_is_no_unknown_outcome(store: Store, proxy: FaultProxy) -> None:
    old = store.prepared("old")
    with retries(0):
        proxy.fail("put_object", "403", times=None, key=_METADATA)
        with pytest.raises(StorageError, match="AccessDenied"):
            save(NEW, store.url)
        proxy.heal()
        assert store.found(old, NEW) == ("old", [])


def test_refusal_of_a_retry_does_not_hide_that_the_commit_was_done(
    store: Store, proxy: FaultProxy
) -> None:
    """obstore repeats what was answered 500; it knows the last answer alone."""
    old = store.prepared("old")
    proxy.fail("put_object", "done_500", key=_METADATA)
    proxy.fail("put_object", "403", key=_METADATA)
    with retries(3):
        save(NEW, store.url)
        assert store.found(old, NEW) == ("new", [])


def test_damaged_answer_about_a_commit_is_read_again(store: Store, proxy: FaultProxy) -> None:
    old = store.prepared("old")
    proxy.fail("put_object", "lost_answer", key=_METADATA)
    proxy.fail("get_object", "flip", key=_METADATA, skip=1)  # the first is before it
    with retries(0):
        save(NEW, store.url)
        faults = [one.fault for one in proxy.requests() if one.fault]
        assert faults == ["lost_answer", "flip"]
        assert store.found(old, NEW) == ("new", [])


def test_damaged_checkpoint_is_replaced(store: Store, proxy: FaultProxy) -> None:
    old = store.prepared("old")
    damaged = bytearray(old[".metadata"])
    damaged[-300] ^= 1
    for how in ("", "reset", "lost_answer"):
        store.reset({**old, ".metadata": bytes(damaged)})
        if how:
            proxy.fail("put_object", how, key=_METADATA)
        with retries(0):
            save(NEW, store.url)
            # What the damaged one named, nobody knows.
            assert store.found({}, NEW).what == "new", how


# ---- Commits that arrive late -------------------------------------------------------------------


@before_both
def test_commit_that_arrives_late_is_found_by_its_retry(
    store: Store, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    old = store.prepared(before)
    with retries(0):
        late = LatePut(monkeypatch)
        late.before_next = late.arrive
        save(NEW, store.url)
        assert store.found(old, NEW) == ("new", [])


@before_both
@pytest.mark.parametrize("end", ["failures", "interrupt of a pause", "interrupt of a retry"])
def test_commit_that_arrives_after_its_save_has_ended_finds_its_data(
    store: Store, monkeypatch: pytest.MonkeyPatch, before: str, end: str
) -> None:
    old = store.prepared(before)
    with retries(0), monkeypatch.context() as patch:
        late = LatePut(patch)
        late.before_next = unanswered
        if end == "interrupt of a pause":
            patch.setattr("torch_dcpx.storage.object_place.time.sleep", interrupted)
        elif end == "interrupt of a retry":
            late.before_next = interrupted
        with pytest.raises(OutcomeUnknownError if end == "failures" else KeyboardInterrupt):
            save(NEW, store.url)
        assert store.found(old, NEW).what == before
        late.arrive()
        assert store.found(old, NEW).what == "new"


def test_commit_that_arrives_after_another_save_is_refused_by_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.prepared("old")
    with retries(0):
        late = LatePut(monkeypatch)
        late.before_next = unanswered
        assert type(error_of(lambda: save(NEW, store.url))) is OutcomeUnknownError
        late.before_next = lambda: None
        save(OTHER, store.url)
        with pytest.raises(StorageError):
            late.arrive()
        assert store.found({}, OTHER).what == "new"
