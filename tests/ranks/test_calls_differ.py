"""Ranks that make different calls, miss some, or leave: what each raises, how they meet again."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.simulated_ranks import TIMEOUT_S, Job

from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import NotCommittedError, PlanError, RankLostError
from torch_dcpx.ranks import store_keys
from torch_dcpx.ranks.ballot import Ballot
from torch_dcpx.ranks.call_id import CallId, last_component


@pytest.fixture(autouse=True)
def _few_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_keys, "_MAX_POLL_S", 1.0)


def failing(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def test_ranks_at_different_calls_all_raise_which_and_meet_in_the_next() -> None:
    job = Job(3)

    def body(rank: int) -> list[Any]:
        own = ("load", "step-3") if rank == 1 else ("save", "step-4")
        if rank == 1:
            job.clients[1].next_call()
        return [job.call(rank, *own), job.call(rank, "save", "step-5")]

    got = job.run(*(lambda rank=rank: body(rank) for rank in range(3)))  # type: ignore[misc]
    text = (
        "rank 1 is at call 2, load of 'step-3'; rank 0 is at call 1, save of 'step-4': every rank "
        "must make the same calls in the same order"
    )
    assert [(type(first), text in str(first)) for first, _ in got] == [(PlanError, True)] * 3
    assert [second for _, second in got] == [3, 3, 3]
    assert job.store.values == {}
    assert job.world.now < 1  # nobody waited for it


@pytest.mark.parametrize("odd", [0, 1])
def test_options_that_must_agree_and_differ_are_named_on_all_ranks(odd: int) -> None:
    job = Job(2)

    def body(rank: int) -> str:
        with job.exchange(rank, CallId("async_save", "a")) as exchange:
            exchange.agree_on(on_busy="skip" if rank == odd else "wait")
            exchange.note_phase("planning")
            with pytest.raises(PlanError) as caught:
                exchange.all_reduce("plan", lambda: 1, sum)
        return str(caught.value)

    got = job.run(lambda: body(0), lambda: body(1))
    assert got[0] == got[1]
    assert "async_save of 'a' with on_busy='skip'" in got[0]
    assert "async_save of 'a' with on_busy='wait'" in got[0]


def test_different_calls_are_told_though_a_third_rank_does_not_come() -> None:
    job = Job(3)
    got = job.run(lambda: job.call(0, "save", "a"), lambda: job.call(1, "load", "a"), lambda: None)
    assert [type(one) for one in got[:2]] == [PlanError] * 2
    assert job.world.now < 10 < TIMEOUT_S


def test_rank_that_missed_calls_is_not_told_their_errors_and_loses_no_save() -> None:
    job = Job(2)
    has_failed: list[int] = []

    def first() -> list[Any]:
        lost = [job.call(0, "load", "none", failing(NotCommittedError("load of 'none'")))]
        lost.append(job.call(0, "save", "step-1"))  # nobody comes
        has_failed.append(1)
        return [*lost, job.call(0, "save", "step-2")]

    def second() -> list[Any]:
        while not has_failed:
            job.world.sleep(1)
        return [job.call(1, "save", "step-2")]

    got = job.run(first, second)
    assert [type(one) for one in got[0][:2]] == [NotCommittedError, RankLostError]
    assert (got[0][2], got[1]) == (1, [1])
    assert job.store.values == {}


def test_failure_of_another_call_at_the_same_moment_is_not_ones_own() -> None:
    job = Job(2)
    both_are_in: list[int] = []

    def wait_and_fail() -> Any:
        both_are_in.append(1)
        while len(both_are_in) < 2:
            job.world.sleep(0.01)
        raise NotCommittedError("load of 'none'")

    def enter() -> int:
        both_are_in.append(1)
        return 1

    def first() -> list[Any]:
        return [job.call(0, "load", "none", wait_and_fail), job.call(0, "load", "b")]

    def second() -> list[Any]:
        return [job.call(1, "save", "a", enter), job.call(1, "load", "b")]

    got = job.run(first, second)
    assert [type(rank[0]) for rank in got] == [NotCommittedError, PlanError]
    assert "rank 0 is at load 'none' and fails there; rank 1 is at call 1, save of 'a'" in str(
        got[1][0]
    )
    assert [rank[1] for rank in got] == [1, 1]
    assert job.world.now < 10 < TIMEOUT_S


def test_local_part_is_made_once_however_often_it_is_told() -> None:
    job = Job(2)
    made: list[int] = []
    for _ in range(3):  # operations that rank 0 has left without a word
        job.clients[0].next_number()

    def local() -> int:
        made.append(1)
        return 7

    got = job.run(lambda: job.call(0, "save", "a"), lambda: job.call(1, "save", "a", local))
    assert got == [7, 7]
    assert made == [1]


@pytest.mark.parametrize("gone", [0, 1])
def test_rank_that_left_an_operation_without_a_word_is_met_in_the_next(gone: int) -> None:
    job = Job(3)
    job.clients[gone].next_number()
    got = job.run(*(lambda rank=rank: job.call(rank, "save", "a") for rank in range(3)))  # type: ignore[misc]
    assert got == [3, 3, 3]
    assert job.world.now < 10 < TIMEOUT_S


def test_rank_that_goes_on_between_steps_fails_the_others_at_once() -> None:
    job = Job(2)

    def leaver() -> Any:
        exchange = job.exchange(1, CallId("save", "a"))
        exchange.all_reduce("first", lambda: 1, sum)
        return job.call(1, "load", "b")

    def stayer() -> Any:
        with job.exchange(0, CallId("save", "a")) as exchange:
            exchange.all_reduce("first", lambda: 1, sum)
            with pytest.raises(PlanError) as caught:
                exchange.all_reduce("second", lambda: 1, sum)
        return str(caught.value), job.call(0, "load", "b")

    got = job.run(stayer, leaver)
    assert "rank 1 is at call 2, load of 'b'; rank 0 is at call 1, save of 'a'" in got[0][0]
    assert (got[0][1], got[1]) == (1, 1)
    assert job.world.now < 10 < TIMEOUT_S


def test_coordinator_that_is_done_after_all_have_given_up_raises_what_they_did() -> None:
    """Their values may be gone by then: to read them would block."""
    job = Job(3)

    def late() -> Any:
        return job.call(0, "save", "a", lambda: job.world.sleep(TIMEOUT_S + 1))

    got = job.run(late, lambda: job.call(1, "save", "a"), lambda: job.call(2, "save", "a"))
    assert [type(one) for one in got] == [RankLostError] * 3
    assert {one.ranks for one in got} == {(0,)}
    assert job.store.values == {}


def test_coordinator_that_votes_after_all_have_given_up_commits_nothing() -> None:
    job = Job(2)

    def body(rank: int) -> Any:
        exchange = job.exchange(rank, CallId("save", "a"))
        exchange.all_reduce("plan", lambda: 1, sum)
        ballot = Ballot(exchange, exchange.deadline.anew())
        if rank == 0:
            job.world.sleep(2 * TIMEOUT_S)
        ballot.vote(rank)
        try:
            with pytest.raises(RankLostError):
                ballot.settle(failing(AssertionError("committed")), lambda: False)  # type: ignore[arg-type]
        finally:
            exchange.close()

    job.run(lambda: body(0), lambda: body(1))
    assert job.store.values == {}


def test_error_that_stands_is_not_changed_by_who_proposes_again() -> None:
    """A coordinator may be interrupted behind its claim, and then tells of the interrupt."""
    job = Job(2)

    def first() -> Any:
        exchange = job.exchange(0, CallId("save", "a"))
        propose = exchange.propose

        def interrupted(*args: Any) -> str:
            propose(*args)
            exchange.propose = propose  # type: ignore[method-assign]
            raise KeyboardInterrupt

        exchange.propose = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt), exchange:
            exchange.all_reduce("plan", lambda: 1, sum)

    def second() -> Any:
        return job.call(1, "load", "b")

    got = job.run(first, second)
    assert type(got[1]) is PlanError
    assert job.store.values == {}


def test_value_of_another_operation_is_no_vote() -> None:
    job = Job(2)

    def body(rank: int) -> Any:
        exchange = job.exchange(rank, CallId("save", "a"))
        exchange.all_reduce("plan", lambda: 1, sum)
        if rank == 1:
            exchange._token = b"another!"
        ballot = Ballot(exchange, exchange.deadline.anew())
        ballot.vote(rank)
        try:
            with pytest.raises(PlanError, match="rank 1 answers for another save"):
                ballot.settle(failing(AssertionError("committed")), lambda: False)  # type: ignore[arg-type]
        finally:
            exchange.close()

    job.run(lambda: body(0), lambda: body(1))


def test_long_wait_is_told_once_a_minute_with_whom_it_is_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job(3)

    def late() -> Any:
        job.world.sleep(TIMEOUT_S - 1)
        return job.call(2, "save", "a")

    with caplog.at_level(logging.WARNING, logger="torch_dcpx"):
        got = job.run(lambda: job.call(0, "save", "a"), lambda: job.call(1, "save", "a"), late)
    assert got == [3, 3, 3]
    own = [text for text in caplog.messages if "on rank 0 " in text]
    assert len(own) == 2  # after 30 s at the earliest, and once a minute
    assert all("'plan' of the save" in text and "waits for rank 2 since" in text for text in own)
    assert any("waits for the answer of rank 0" in text for text in caplog.messages)


def test_short_wait_is_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(2)

    def late() -> Any:
        job.world.sleep(29)
        return job.call(1, "save", "a")

    assert job.run(lambda: job.call(0, "save", "a"), late) == [1, 1]
    assert caplog.messages == []


def test_round_trips_of_a_save_are_these() -> None:
    """Waiting is one, however often it looks. There were 21 a rank before calls were compared."""
    job = Job(2)
    seen: list[list[str]] = [[], []]

    def noting(rank: int) -> None:
        client = job.clients[rank]
        call, post = client.call, client.post

        def note_call(doing: str, function: Any, deadline: Deadline) -> Any:
            what = doing.split(": ", 1)[1].replace("dcpx/1/", "")
            if seen[rank][-1:] != [what]:
                seen[rank].append(what)
            return call(doing, function, deadline)

        def note_post(function: Any) -> None:
            seen[rank].append("post")
            post(function)

        client.call, client.post = note_call, note_post  # type: ignore[method-assign]

    def body(rank: int) -> None:
        noting(rank)
        with job.exchange(rank, CallId("save", "a")) as exchange:
            exchange.reduce_scatter("plan", lambda: 1, lambda values: values)
            ballot = Ballot(exchange, exchange.deadline)
            ballot.vote(1)
            ballot.settle(lambda _: 1, lambda: True)

    job.run(lambda: body(0), lambda: body(1))
    by_the_last = {"set '0/wake'", "set 'ballot/wake'", "check '1/wake'", "delete 'e'"}
    assert [[what for what in rank if what not in by_the_last] for rank in seen] == [
        ["claim 'p/0'", "count 'e'", "set '0/v/0'", "count '0/n'", "get '0/wake'", "get '0/v/1'",
         "set '0/s/1'", "claim '0/a'", "set 'ballot/v/0'", "count 'ballot/n'", "get 'ballot/wake'",
         "get 'ballot/a'", "get 'ballot/v/1'", "claim 'ballot/a'", "post", "set 'ballot/outcome'",
         "delete 'p/0'", "count 'out'"],
        ["claim 'p/1'", "count 'e'", "set '0/v/1'", "count '0/n'", "get '0/wake'", "get '0/a'",
         "post", "get '0/s/1'", "post", "set 'ballot/v/1'", "count 'ballot/n'", "get 'ballot/a'",
         "get 'ballot/outcome'", "post", "delete 'p/1'", "count 'out'"],
    ]  # fmt: skip
    assert job.store.values == {}


def test_call_is_named_by_the_last_component_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "step-3").mkdir()
    (tmp_path / "latest").symlink_to("step-3")
    (tmp_path / "circle").symlink_to("circle")
    for path in (tmp_path / "step-3", f"{tmp_path}/step-3/", bytes(tmp_path / "latest")):
        assert last_component(path) == "step-3"
    assert last_component(tmp_path / "none") == "none"
    assert last_component(tmp_path / "circle") == "circle"
    assert [last_component(path) for path in (None, 3)] == [None, None]
    assert str(CallId("save", "a")) == "save of 'a'"
    assert CallId("save", "a").digest != CallId("load", "a").digest


def test_storage_that_fails_on_one_rank_makes_no_other_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load itself says what failed there."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "is_symlink", fail)
    assert last_component(tmp_path / "step-3") == "step-3"


def test_call_without_a_target_may_be_any_of_its_name() -> None:
    """The path of a rank that errs may be none at all: the others, late, are told of it."""
    ours = CallId("save", "a b")
    assert ours.is_among([CallId("load", "a b").identity, ours.identity])
    assert ours.is_among([CallId("save").identity])
    assert CallId("save").is_among([ours.identity])
    for other in (CallId("save", "a"), CallId("load"), CallId("load", "a b")):
        assert not ours.is_among([other.identity])
    assert not ours.is_among([])
