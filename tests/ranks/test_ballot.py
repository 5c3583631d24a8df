"""The vote that ends a save: all ranks see it committed, or all see an error."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any, NoReturn

import pytest
from support.machine import seconds
from support.store_ranks import FULL, Ranks, Storage, assert_no_key_is_left, ballots
from torch.distributed import HashStore, PrefixStore

from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import RankError, StorageError
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


# ---- One process --------------------------------------------------------------------------------


@pytest.fixture
def local() -> Exchange:
    return Exchange(60)


def test_alone_the_commit_gets_the_very_payload_and_its_result_comes_back(local: Exchange) -> None:
    ballot = Ballot(local, local.deadline)
    payload, result = object(), object()
    ballot.vote(payload)
    ballot.check()
    got = ballot.settle(lambda payloads: (payloads, result), lambda: False)
    assert got is not None
    assert got[0][0] is payload and got[1] is result
    assert local.phase == "committing"
    assert ballot.cancel() is False


@pytest.mark.parametrize("where", ["write", "commit"])
def test_alone_an_error_is_raised_as_it_is(local: Exchange, where: str, storage: Storage) -> None:
    error = KeyError("x")
    ballot = Ballot(local, local.deadline)

    def commit(_: list[Any]) -> None:
        raise error

    if where == "write":
        ballot.fail(error, "writing")
        with pytest.raises(KeyError):
            ballot.check()
    else:
        ballot.vote(1)
    with pytest.raises(KeyError) as caught:
        ballot.settle(storage.commit if where == "write" else commit, storage.was_committed)
    assert caught.value is error
    assert storage.committed == []


def test_alone_a_cancelled_save_is_not_committed(local: Exchange, storage: Storage) -> None:
    ballot = Ballot(local, local.deadline)
    ballot.vote(1)
    assert ballot.cancel() is True
    with pytest.raises(RankError, match="cancelled by rank 0") as caught:
        ballot.settle(storage.commit, storage.was_committed)
    assert type(caught.value.__cause__) is CancelledError
    assert storage.committed == []


def test_alone_a_cancel_during_the_commit_comes_too_late(local: Exchange, storage: Storage) -> None:
    ballot = Ballot(local, local.deadline)
    ballot.vote(1)

    def commit(payloads: list[Any]) -> str:
        assert ballot.cancel() is False
        return storage.commit(payloads)

    assert ballot.settle(commit, storage.was_committed) == "result"
    assert storage.committed == [[1]]


# ---- Several ranks ------------------------------------------------------------------------------


def test_all_votes_reach_the_commit_and_its_result_reaches_all(
    ranks: Ranks, storage: Storage
) -> None:
    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        ballot.vote([exchange.rank])
        ballot.check()
        return ballot.settle(storage.commit, storage.was_committed)

    for _ in range(3):
        storage.committed.clear()
        assert ballots(ranks, body) == ["result"] * 4
        assert storage.committed == [[[0], [1], [2], [3]]]
    assert_no_key_is_left(ranks)


@pytest.mark.parametrize("failing", [0, 2])
def test_rank_that_fails_to_write_ends_the_save_on_all_while_others_still_write(
    ranks: Ranks, storage: Storage, failing: int
) -> None:
    has_failed = threading.Event()

    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        exchange.note_phase("writing")
        if exchange.rank == failing:
            ballot.fail(FULL)
            has_failed.set()
        elif exchange.rank == 3:  # writes for ever, and looks now and then
            assert has_failed.wait(seconds(60))
            with pytest.raises(StorageError):
                ballot.check()
        else:
            ballot.vote(1)
        return ballot.settle(storage.commit, storage.was_committed)

    got = ballots(ranks, body)
    assert [type(e) for e in got] == [StorageError] * 4
    assert {(e.errno, e.path) for e in got} == {(errno.ENOSPC, "c")}
    assert all(str(e).startswith(f"rank {failing} (") for e in got)
    assert all("), writing: pwrite 8 B of 'c/__2_0.distcp'" in str(e) for e in got)
    assert got[failing].__cause__ is FULL
    assert storage.committed == []
    assert_no_key_is_left(ranks)


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("found", [True, False, FULL], ids=repr)
def test_files_stay_unless_the_coordinator_says_that_its_failed_commit_is_not_there(
    ranks: Ranks, error: BaseException, found: Any
) -> None:
    def commit(_: list[Any]) -> None:
        raise error

    def was_committed() -> bool:
        if found is FULL:
            raise FULL
        return bool(found)

    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        ballot.vote(exchange.rank)
        with pytest.raises((StorageError, RankError, KeyboardInterrupt)) as caught:
            ballot.settle(commit, was_committed)
        if error is FULL:  # on all ranks
            assert type(caught.value) is StorageError and str(caught.value).startswith("rank 0")
            assert "), committing: pwrite" in str(caught.value)
        ballot.fail(ZeroDivisionError())  # as whoever ends the save does
        return ballot.may_be_committed

    stays = found is not False
    got = ballots(ranks, body)
    assert got[1:] == [stays] * 3
    assert got[0] is stays or isinstance(error, KeyboardInterrupt)
    assert_no_key_is_left(ranks)


def test_coordinator_that_is_interrupted_as_it_looks_leaves_the_files_and_nobody_waiting(
    ranks: Ranks,
) -> None:
    def commit(_: list[Any]) -> None:
        raise FULL

    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        ballot.vote(exchange.rank)
        with pytest.raises(KeyboardInterrupt if exchange.is_coordinator else StorageError):
            ballot.settle(commit, raise_interrupt)
        return ballot.may_be_committed

    assert ballots(ranks, body) == [True] * 4


def test_coordinator_that_is_interrupted_as_it_tells_of_its_commit_has_told_it(
    ranks: Ranks, storage: Storage
) -> None:
    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        ballot.vote(exchange.rank)
        if not exchange.is_coordinator:
            return ballot.settle(storage.commit, storage.was_committed)
        ballot._publish = lambda _: raise_interrupt()  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            ballot.settle(storage.commit, storage.was_committed)
        return ballot.may_be_committed

    assert ballots(ranks, body) == [True, "result", "result", "result"]


def test_commit_that_worked_is_no_failure_where_its_result_cannot_be_sent(ranks: Ranks) -> None:
    lock = threading.Lock()

    def body(ballot: Ballot, _: StoreExchange) -> Any:
        ballot.vote(1)
        return ballot.settle(lambda _: lock, lambda: False)

    assert ballots(ranks, body) == [lock, None, None, None]


@pytest.mark.parametrize("canceller", [0, 1])
def test_cancelled_save_is_an_error_on_all(ranks: Ranks, storage: Storage, canceller: int) -> None:
    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        if exchange.rank == canceller:
            assert ballot.cancel() is True
        ballot.vote(1)
        return ballot.settle(storage.commit, storage.was_committed)

    got = ballots(ranks, body)
    assert [type(e) for e in got] == [RankError] * 4
    assert {type(e.__cause__) for e in got} == {CancelledError}
    assert all(f"cancelled by rank {canceller}" in str(e) for e in got)
    assert storage.committed == []
    assert_no_key_is_left(ranks)


def test_cancel_in_the_moment_before_the_decision_wins(ranks: Ranks, storage: Storage) -> None:
    all_ballots = {}

    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        all_ballots[exchange.rank] = ballot
        claim = exchange.propose

        def propose(*args: Any) -> str:
            assert all_ballots[1].cancel() is True
            return claim(*args)

        if exchange.rank == 0:
            exchange.propose = propose  # type: ignore[method-assign]
        ballot.vote(1)
        return ballot.settle(storage.commit, storage.was_committed)

    assert [type(e) for e in ballots(ranks, body)] == [RankError] * 4
    assert storage.committed == []
    assert_no_key_is_left(ranks)


def test_cancel_while_the_coordinator_commits_comes_too_late(
    ranks: Ranks, storage: Storage
) -> None:
    is_committing, is_cancelled = threading.Event(), threading.Event()

    def commit(payloads: list[Any]) -> str:
        is_committing.set()
        assert is_cancelled.wait(seconds(60))
        return storage.commit(payloads)

    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        ballot.vote(1)
        if exchange.rank == 1:
            assert is_committing.wait(seconds(60))
            assert ballot.cancel() is False
            is_cancelled.set()
        return ballot.settle(commit, storage.was_committed)

    assert ballots(ranks, body) == ["result"] * 4
    assert_no_key_is_left(ranks)


def test_interrupted_rank_raises_it_and_the_others_an_error(
    ranks: Ranks, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_interrupted = threading.Event()

    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        if exchange.rank == 2:
            monkeypatch.setattr(exchange.keys, "wait_for", lambda *_: raise_interrupt())
        if exchange.rank == 3:
            assert is_interrupted.wait(seconds(60))
        ballot.vote(1)
        try:
            return ballot.settle(storage.commit, storage.was_committed)
        except KeyboardInterrupt:
            exchange.close()
            is_interrupted.set()
            raise

    got = ballots(ranks, body)
    assert type(got.pop(2)) is KeyboardInterrupt
    assert {(type(e), e.rank, e.original) for e in got} == {
        (RankError, 2, "builtins.KeyboardInterrupt")
    }
    assert storage.committed == []
    assert_no_key_is_left(ranks)


# ---- Interrupts ---------------------------------------------------------------------------------


def test_rank_that_is_interrupted_while_the_coordinator_commits_may_be_published(
    ranks: Ranks, storage: Storage
) -> None:
    interrupted = threading.Event()

    def commit(payloads: list[Any]) -> str:
        assert interrupted.wait(seconds(60))
        return storage.commit(payloads)

    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        ballot.vote(exchange.rank)
        if exchange.rank != 2:
            return ballot.settle(commit, storage.was_committed)
        assert exchange.keys.wait_for("ballot/a", Deadline(seconds(60)))
        ballot._outcome = raise_interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            ballot.settle(commit, storage.was_committed)
        interrupted.set()
        return ballot.may_be_committed

    assert ballots(ranks, body) == ["result", "result", True, "result"]


def raise_interrupt() -> NoReturn:
    raise KeyboardInterrupt


def test_coordinator_interrupted_as_it_decides_leaves_nobody_waiting(
    ranks: Ranks, storage: Storage
) -> None:
    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        ballot.vote(exchange.rank)
        if exchange.rank == 0:
            claim = exchange.propose

            def propose(*args: Any) -> str:
                exchange.propose = claim  # type: ignore[method-assign]
                claim(*args)
                raise KeyboardInterrupt

            exchange.propose = propose  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                ballot.settle(storage.commit, storage.was_committed)
            return None
        with pytest.raises(RankError, match="KeyboardInterrupt"):
            ballot.settle(storage.commit, storage.was_committed)
        return None

    assert ballots(ranks, body) == [None] * 4
    assert storage.committed == []


def test_settled_ballot_holds_no_error_and_tells_none_again(ranks: Ranks, storage: Storage) -> None:
    def body(ballot: Ballot, exchange: StoreExchange) -> Any:
        ballot.fail(FULL)
        with pytest.raises(StorageError) as caught:
            ballot.settle(storage.commit, storage.was_committed)
        ballot.fail(caught.value)
        return ballot._own_error

    assert ballots(ranks, body) == [None] * 4
