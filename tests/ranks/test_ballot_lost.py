"""The vote where ranks, the coordinator or the store are lost, or a process leaves as it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
from support.machine import seconds
from support.store_ranks import FULL, Killed, Ranks, Storage, ballots
from torch.distributed import HashStore, PrefixStore

from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import (
    OutcomeUnknownError,
    RankError,
    RankLostError,
    StorageError,
    StoreLostError,
)
from torch_dcpx.ranks.ballot import Ballot
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.ranks.store import StoreExchange


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    found = Ranks(PrefixStore("group", HashStore()), 4)
    yield found
    found.close()


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("has_voted", [False, True])
def test_rank_lost_before_the_decision_is_named_on_all_others(
    ranks: Ranks, storage: Storage, lost: int, has_voted: bool
) -> None:
    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        exchange.note_phase("writing")
        if exchange.rank != lost or has_voted:
            ballot.vote(1)
        if exchange.rank == lost:
            raise Killed
        return ballot.settle(storage.commit, storage.was_committed)

    got = ballots(ranks, body, timeout_s=seconds(1))
    survivors = [outcome for rank, outcome in enumerate(got) if rank != lost]
    if (lost, has_voted) == (2, True):
        assert survivors == ["result"] * 3  # its files are durable: nobody misses it
        return
    assert [type(e) for e in survivors] == [RankLostError] * 3
    assert {(e.ranks, e.phases) for e in survivors} == {((lost,), ("writing",))}
    assert storage.committed == []


@pytest.mark.parametrize("is_committed", [False, True])
def test_coordinator_lost_in_its_commit_is_looked_up_in_the_storage(
    ranks: Ranks, storage: Storage, is_committed: bool
) -> None:
    def commit(payloads: list[Any]) -> None:
        if is_committed:
            storage.commit(payloads)
        raise Killed

    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        ballot.vote(1)
        if exchange.rank == 0:
            ballot._publish = lambda _: None  # type: ignore[method-assign]
        return ballot.settle(commit, storage.was_committed)

    got = ballots(ranks, body, timeout_s=seconds(1))
    assert type(got[0]) is Killed
    if is_committed:
        assert got[1:] == [None] * 3
    else:
        assert [type(e) for e in got[1:]] == [OutcomeUnknownError] * 3
        assert all("rank 0 decided to commit" in str(e) for e in got[1:])


class LosableStore:
    """A store that raises for one rank from the moment it is lost."""

    def __init__(self, store: Any, is_lost: threading.Event) -> None:
        self.store, self.is_lost = store, is_lost

    def clone(self) -> Any:
        return LosableStore(self.store.clone(), self.is_lost)

    def __getattr__(self, name: str) -> Any:
        if self.is_lost.is_set():
            raise RuntimeError("Connection reset by peer")
        return getattr(self.store, name)


@pytest.mark.parametrize("when", ["vote", "decision", "commit", "after"])
def test_lost_store_is_never_a_success_without_the_save_in_the_storage(
    storage: Storage, when: str
) -> None:
    is_lost = threading.Event()
    is_over = threading.Event()
    all_entered = threading.Barrier(3, timeout=seconds(60))
    ranks = Ranks(LosableStore(HashStore(), is_lost), 3)

    def commit(payloads: list[Any]) -> str:
        if when == "commit":
            is_lost.set()
        result = storage.commit(payloads)
        if when == "after":
            is_lost.set()
        is_over.set()
        return result

    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        all_entered.wait()
        if when == "vote" and exchange.rank == 1:
            is_lost.set()
        if when == "decision" and exchange.rank == 0:
            claim = exchange.propose

            def propose(*args: Any) -> str:
                is_lost.set()
                return claim(*args)

            exchange.propose = propose  # type: ignore[method-assign]
        ballot.vote(1)

        def was_committed() -> bool:
            if when in ("commit", "after"):
                assert is_over.wait(seconds(60))
            return storage.was_committed()

        return ballot.settle(commit, was_committed)

    got = ballots(ranks, body)
    if when in ("commit", "after"):
        assert got == ["result", None, None]  # the store's loss changes nothing about it
    else:
        assert [type(e) for e in got] == [StoreLostError, *[OutcomeUnknownError] * 2]
        assert storage.committed == []
    ranks.close()


def test_rank_that_failed_itself_says_so_though_the_store_is_lost(storage: Storage) -> None:
    is_lost = threading.Event()
    all_entered = threading.Barrier(2, timeout=seconds(60))
    ranks = Ranks(LosableStore(HashStore(), is_lost), 2)

    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        all_entered.wait()
        is_lost.set()
        ballot.fail(FULL, "writing")
        return ballot.settle(storage.commit, storage.was_committed)

    got = ballots(ranks, body)
    assert [type(e) for e in got] == [StorageError] * 2
    assert [e.__cause__ is None for e in got] == [False, False]
    ranks.close()


def test_storage_that_cannot_be_looked_at_leaves_the_outcome_unknown(ranks: Ranks) -> None:
    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        ballot.vote(1)
        if exchange.rank == 0:
            exchange.propose("ballot", "committing", [], exchange.deadline)
            raise Killed

        def was_committed() -> bool:
            raise FULL

        return ballot.settle(lambda _: None, was_committed)

    got = ballots(ranks, body, timeout_s=seconds(1))
    assert [type(e) for e in got[1:]] == [OutcomeUnknownError] * 3
    assert {e.__cause__ for e in got[1:]} == {FULL}


# ---- A process that ends while a save is under way -----------------------------------------------


@pytest.mark.parametrize("has_voted", [False, True])
@pytest.mark.parametrize("leaving", [0, 2])
def test_rank_that_leaves_ends_the_vote_unless_the_others_can_do_without_it(
    storage: Storage, leaving: int, has_voted: bool
) -> None:
    ranks, has_left = Ranks(HashStore(), 3), threading.Event()

    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        if exchange.rank == leaving:
            if has_voted:
                ballot.vote(exchange.rank)
            ballot.leave(Deadline(seconds(10)))
            has_left.set()
            return "left"
        if not (leaving == 0 and has_voted and exchange.rank == 1):
            ballot.vote(exchange.rank)
        else:
            assert has_left.wait(seconds(60))  # else the vote is complete before
            ballot.vote(exchange.rank)
        return ballot.settle(storage.commit, storage.was_committed)

    got = ballots(ranks, body)
    ranks.close()
    assert got.pop(leaving) == "left"
    if has_voted and leaving != 0:
        assert got == ["result"] * 2
        assert storage.committed == [[0, 1, 2]]
        return
    assert [type(error) for error in got] == [RankError] * 2
    assert all(f"the process of rank {leaving} ends" in str(error) for error in got)
    assert storage.committed == []


def test_leave_once_it_commits_changes_nothing(storage: Storage) -> None:
    exchange = Exchange(60)
    ballot = Ballot(exchange, exchange.deadline)
    ballot.vote(1)

    def commit(payloads: list[Any]) -> str:
        ballot.leave(Deadline(seconds(10)))
        return storage.commit(payloads)

    assert ballot.settle(commit, storage.was_committed) == "result"


def test_alone_a_save_that_is_left_is_not_committed(storage: Storage) -> None:
    exchange = Exchange(60)
    ballot = Ballot(exchange, exchange.deadline)
    ballot.vote(1)
    ballot.leave(Deadline(seconds(10)))
    with pytest.raises(RankError, match="the process of rank 0 ends") as caught:
        ballot.settle(storage.commit, storage.was_committed)
    assert type(caught.value.__cause__) is CancelledError
    assert storage.committed == []


def test_leave_does_not_wait_for_whoever_waits_for_a_silent_store() -> None:
    exchange = Exchange(60)
    ballot = Ballot(exchange, exchange.deadline)
    with ballot._guard:  # as `check` holds it
        ballot.leave(Deadline(0))
    assert ballot.cancel() is True  # nobody has claimed it
