"""The commit of a save to a store: of two at a time one wins, and no answer is no loss.

A commit may be done and not answered, not done and not answered, or be done long after its client
has given it up. Data objects stay as long as one of that can be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from object_outcomes import (
    NEW,
    OLD,
    OTHER,
    error_of,
    found,
    load,
    objects_at,
    prepared,
    retries,
    save,
    state_of,
)
from support.machine import seconds
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.object_server import ObjectServer
from support.rank_saves import write_ranks
from support.states import assert_same
from torch.distributed.checkpoint.api import CheckpointException

import torch_dcpx
from torch_dcpx import ConcurrentSaveError, DcpxWriter, OutcomeUnknownError, StorageError

_DEADLINE_S = seconds(120)
_METADATA = "/.metadata"


# ---- Two saves at a time ------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["none", "old"])
@pytest.mark.parametrize("winner", ["first", "second"])
def test_later_of_two_commits_is_refused_and_leaves_nothing(
    object_server: ObjectServer, object_prefix: str, before: str, winner: str
) -> None:
    """Both have begun before the other commits."""
    prepared(object_server, object_prefix, before)
    with retries(0):
        saves = [write_ranks([state], object_prefix) for state in (NEW, OTHER)]
        states = [NEW, OTHER]
        if winner == "second":
            saves.reverse()
            states.reverse()
        (won, *won_takes), (lost, *lost_takes) = saves
        won.finish(*won_takes)
        with pytest.raises(ConcurrentSaveError, match="another save has committed") as caught:
            lost.finish(*lost_takes)
        assert isinstance(caught.value, StorageError)
        assert found(object_server, object_prefix, {}, states[0]) == ("new", [])
        save(OLD, object_prefix)  # both writers are free, and nothing is in the way
        assert found(object_server, object_prefix, {}, OLD) == ("new", [])


@pytest.mark.parametrize("before", ["none", "old"])
def test_save_held_up_at_its_commit_is_refused_once_another_has_committed(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy, before: str
) -> None:
    prepared(object_server, object_prefix, before)
    go_on = threading.Event()
    object_proxy.clear()
    object_proxy.hook("put_object", _waits_for(go_on), key=_METADATA)
    with retries(0), ThreadPoolExecutor(1) as pool:
        try:
            held = pool.submit(error_of, lambda: save(OTHER, object_prefix))
            object_proxy.wait("put_object", key=_METADATA)
            save(NEW, object_prefix)
        finally:
            go_on.set()
        assert type(held.result(_DEADLINE_S)) is ConcurrentSaveError
        assert found(object_server, object_prefix, {}, NEW) == ("new", [])


def _waits_for(event: threading.Event) -> Callable[[Request], None]:
    def hook(_: Request) -> None:
        if not event.wait(_DEADLINE_S):
            raise TimeoutError

    return hook


@pytest.mark.parametrize("before", ["none", "old"])
def test_one_of_many_saves_that_commit_at_once_wins(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy, before: str
) -> None:
    count = 4
    prepared(object_server, object_prefix, before)
    together = threading.Barrier(count)

    def meet(_: Request) -> None:
        together.wait(_DEADLINE_S)

    states = [state_of(10 + number) for number in range(count)]
    with retries(0), ThreadPoolExecutor(count) as pool:
        object_proxy.hook("put_object", meet, count, key=_METADATA)
        saves: list[Future[Any]] = [
            pool.submit(error_of, lambda state=state: save(state, object_prefix))
            for state in states
        ]
        errors = [one.result(_DEADLINE_S) for one in saves]
        won = [state for state, error in zip(states, errors, strict=True) if error is None]
        assert len(won) == 1
        assert [type(error) for error in errors].count(ConcurrentSaveError) == count - 1
        object_proxy.heal()
        assert found(object_server, object_prefix, {}, won[0]) == ("new", [])


def test_checkpoint_deleted_during_a_save_refuses_the_commit(
    object_server: ObjectServer, object_prefix: str
) -> None:
    prepared(object_server, object_prefix, "old")
    with retries(0):
        writer, *takes = write_ranks([NEW], object_prefix)
        object_server.delete(f"{object_prefix}{_METADATA}")
        with pytest.raises(ConcurrentSaveError):
            writer.finish(*takes)
    named_by_old = [name for name in objects_at(object_server, object_prefix) if "__" in name]
    assert len(named_by_old) == 1


# ---- Outcomes that nobody answers ---------------------------------------------------------------


@pytest.mark.parametrize("before", ["none", "old"])
@pytest.mark.parametrize("how", ["reset", "lost_answer", "500", "done_500", "412", "409"])
@pytest.mark.parametrize("times", [1, 2])
def test_commit_that_is_not_answered_is_settled_by_what_is_there(
    object_server: ObjectServer,
    object_prefix: str,
    object_proxy: FaultProxy,
    before: str,
    how: str,
    times: int,
) -> None:
    old = prepared(object_server, object_prefix, before)
    with retries(0):
        object_proxy.fail("put_object", how, times, key=_METADATA)
        save(NEW, object_prefix)
        object_proxy.heal()
        assert found(object_server, object_prefix, old, NEW) == ("new", [])


@contextmanager
def _silent_from_commit(proxy: FaultProxy, how: str) -> Iterator[None]:
    """In the block the commit meets a fault, and after it the store answers nothing."""

    def fall_silent(_: Request) -> str:
        proxy.fail("any", "reset", times=None)
        return how

    proxy.hook("put_object", fall_silent, key=_METADATA)
    yield
    proxy.heal()


@pytest.mark.parametrize("before", ["none", "old"])
@pytest.mark.parametrize(("how", "is_done"), [("reset", False), ("lost_answer", True)])
def test_store_that_falls_silent_at_the_commit_leaves_an_unknown_outcome(
    object_server: ObjectServer,
    object_prefix: str,
    object_proxy: FaultProxy,
    before: str,
    how: str,
    is_done: bool,
) -> None:
    old = prepared(object_server, object_prefix, before)
    with retries(0):
        with _silent_from_commit(object_proxy, how), pytest.raises(OutcomeUnknownError):
            save(NEW, object_prefix)
        there = found(object_server, object_prefix, old, NEW)
        assert there.what == ("new" if is_done else before)
        data = [name for name in objects_at(object_server, object_prefix) if "__" in name]
        assert len(data) == 1 + len(old) // 2  # of both: what was not answered may yet be done
        save(OTHER, object_prefix)
        assert_same(OTHER, load(OTHER, object_prefix))


def test_unknown_outcome_is_raised_through_dcp_and_by_a_save_in_the_background(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    old = prepared(object_server, object_prefix, "old")
    with retries(0):
        with _silent_from_commit(object_proxy, "reset"):
            with pytest.raises(CheckpointException) as caught:
                dcp.save(NEW, storage_writer=DcpxWriter(object_prefix), no_dist=True)
            assert type(caught.value.failures[0][0]) is OutcomeUnknownError
        assert len(found(object_server, object_prefix, old, NEW).more) == 1
        with _silent_from_commit(object_proxy, "lost_answer"):
            handle = torch_dcpx.async_save(NEW, object_prefix, no_dist=True)
            with pytest.raises(OutcomeUnknownError):
                handle.result()
        assert found(object_server, object_prefix, old, NEW).what == "new"


def test_commit_refused_by_the_store_is_no_unknown_outcome(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    old = prepared(object_server, object_prefix, "old")
    with retries(0):
        object_proxy.fail("put_object", "403", times=None, key=_METADATA)
        with pytest.raises(StorageError, match="AccessDenied"):
            save(NEW, object_prefix)
        object_proxy.heal()
        assert found(object_server, object_prefix, old, NEW) == ("old", [])


def test_refusal_of_a_retry_does_not_hide_that_the_commit_was_done(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    """obstore repeats what was answered 500; it knows the last answer alone."""
    old = prepared(object_server, object_prefix, "old")
    object_proxy.fail("put_object", "done_500", key=_METADATA)
    object_proxy.fail("put_object", "403", key=_METADATA)
    with retries(3):
        save(NEW, object_prefix)
        assert found(object_server, object_prefix, old, NEW) == ("new", [])


def test_damaged_answer_about_a_commit_is_read_again(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    old = prepared(object_server, object_prefix, "old")
    object_proxy.fail("put_object", "lost_answer", key=_METADATA)
    object_proxy.fail("get_object", "flip", key=_METADATA, skip=1)  # the first is before it
    with retries(0):
        save(NEW, object_prefix)
        faults = [one.fault for one in object_proxy.requests() if one.fault]
        assert faults == ["lost_answer", "flip"]
        assert found(object_server, object_prefix, old, NEW) == ("new", [])


@pytest.mark.parametrize("how", ["", "reset", "lost_answer"])
def test_damaged_checkpoint_is_replaced(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy, how: str
) -> None:
    damaged = bytearray(prepared(object_server, object_prefix, "old")[".metadata"])
    damaged[-300] ^= 1
    object_server.put(f"{object_prefix}{_METADATA}", bytes(damaged))
    if how:
        object_proxy.fail("put_object", how, key=_METADATA)
    with retries(0):
        save(NEW, object_prefix)
        # What the damaged one named, nobody knows.
        assert found(object_server, object_prefix, {}, NEW).what == "new"
