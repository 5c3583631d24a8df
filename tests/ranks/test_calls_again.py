"""The same call again and again, after one that a rank made alone: ranks meet, nothing mixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.simulated_ranks import TIMEOUT_S, Client, Job

from torch_dcpx.errors import PlanError, RankError, RankLostError
from torch_dcpx.ranks import store_keys
from torch_dcpx.ranks.call_id import CallId

CALL = CallId("load", "a")
SAVE = CallId("save", "a", is_target_compared=False, is_write=True)


@pytest.fixture(autouse=True)
def _few_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_keys, "_MAX_POLL_S", 1.0)


def call(job: Job, rank: int, call_id: CallId, value: Any = 1) -> Any:
    try:
        with job.exchange(rank, call_id) as exchange:
            return exchange.all_reduce("plan", lambda: value, list)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error


def in_step(job: Job, alone: int, call_id: CallId, times: int) -> list[list[Any]]:
    """One rank calls alone; then all call, with a barrier, as a training step is, before each."""
    at: list[list[int]] = [[] for _ in range(times)]
    is_over: list[int] = []

    def body(rank: int) -> list[Any]:
        got = []
        if rank == alone:
            got.append(call(job, rank, call_id))
            is_over.append(1)
        while not is_over:
            job.world.sleep(1)
        for number in range(times):
            at[number].append(rank)
            while len(at[number]) < 2:
                job.world.sleep(0.1)
            got.append(call(job, rank, call_id, number))
        return got[-times:]

    got: list[list[Any]] = job.run(lambda: body(0), lambda: body(1))
    return got


@pytest.mark.parametrize("alone", [0, 1])
def test_call_that_reads_works_at_once_after_one_that_a_rank_made_alone(alone: int) -> None:
    job = Job(2)
    got = in_step(job, alone, CALL, 3)
    assert got[0] == got[1] == [[0, 0], [1, 1], [2, 2]]
    assert job.world.now < TIMEOUT_S + 20
    assert job.store.values == {}


@pytest.mark.parametrize("alone", [0, 1])
def test_save_to_one_path_is_refused_once_after_one_that_a_rank_made_alone(alone: int) -> None:
    """The rank that was waited for may be late, or a call ahead: its data be of another step."""
    job = Job(2)
    got = in_step(job, alone, SAVE, 3)
    assert [type(rank[0]) for rank in got] == [PlanError] * 2
    assert all(
        "save of 'a'" in str(rank[0]) and "a path of its own" in str(rank[0]) for rank in got
    )
    assert [rank[1:] for rank in got] == [[[1, 1], [2, 2]]] * 2
    assert job.world.now < TIMEOUT_S + 20
    assert job.store.values == {}


def test_rank_that_was_slow_in_a_call_raises_as_the_others_did() -> None:
    job = Job(2)

    def slow() -> Any:
        with pytest.raises(RankLostError) as caught, job.exchange(1, CALL) as exchange:
            exchange.all_reduce("plan", lambda: job.world.sleep(TIMEOUT_S + 1), list)
        return caught.value

    got = job.run(lambda: call(job, 0, CALL), slow)
    assert [type(one) for one in got] == [RankLostError] * 2
    assert {one.ranks for one in got} == {(1,)}


def test_group_that_is_made_anew_on_one_store_gets_no_answer_of_the_old_one() -> None:
    job = Job(2)
    job.run(lambda: None, lambda: call(job, 1, CALL))
    job.world.all_over.clear()
    job.clients = [Client(job.world, job.store) for _ in range(2)]
    got = job.run(lambda: call(job, 0, CALL, 5), lambda: call(job, 1, CALL, 5))
    assert got == [[5, 5], [5, 5]]


def test_names_that_need_not_agree_share_a_failure() -> None:
    """Ranks of directories of their own: what fails on one is told to the other at once."""
    job = Job(2)

    def failing() -> Any:
        raise ValueError("boom")

    def body(rank: int, local: Callable[[], Any]) -> Any:
        try:
            with job.exchange(
                rank, CallId("save", f"p{rank}", is_target_compared=False)
            ) as exchange:
                return exchange.all_reduce("plan", local, list)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    got = job.run(lambda: body(0, lambda: 1), lambda: body(1, failing))
    assert [(type(one), "boom" in str(one)) for one in got] == [(RankError, True)] * 2
    assert job.world.now < 10 < TIMEOUT_S
