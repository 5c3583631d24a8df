"""A rank whose process ends while a save is under way: the others learn it, or do without it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
from support.machine import seconds
from support.store_ranks import Ranks, Storage, ballots
from torch.distributed import HashStore, PrefixStore

from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import RankError
from torch_dcpx.ranks.ballot import Ballot
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.ranks.store import StoreExchange


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    found = Ranks(PrefixStore("group", HashStore()), 3)
    yield found
    found.close()


@pytest.mark.parametrize("has_voted", [False, True])
@pytest.mark.parametrize("leaving", [0, 2])
def test_rank_that_leaves_ends_the_vote_unless_the_others_can_do_without_it(
    ranks: Ranks, storage: Storage, leaving: int, has_voted: bool
) -> None:
    has_left = threading.Event()

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
