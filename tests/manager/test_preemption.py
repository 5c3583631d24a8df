"""A signal on one rank: all ranks save at the same step, whoever is ahead."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from support.machine import seconds
from support.store_ranks import Ranks
from trainings import manager_of, save_steps

from torch_dcpx import OptionError, Preemption, RankLostError
from torch_dcpx._waiting import Deadline
from torch_dcpx.ranks.store_keys import StoreKeys


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(dist.HashStore(), request.param)
    yield ranks
    ranks.close()


def watches_of(
    ranks: Ranks,
    timeout_s: float | None = None,
    time_left_s: float | None = None,
    save_s: Callable[[int], float | None] = lambda _: None,
) -> list[Preemption]:
    return [
        Preemption(
            StoreKeys(ranks.clients[rank], "p/", f"rank {rank}", ranks.world_size),
            rank,
            ranks.world_size,
            timeout_s=timeout_s or seconds(60),
            time_left_s=time_left_s,
            last_save_s=lambda rank=rank: save_s(rank),  # type: ignore[misc]
        )
        for rank in range(ranks.world_size)
    ]


def test_all_ranks_answer_alike_at_the_same_step(ranks: Ranks, seed: int) -> None:
    """Ranks at most a step apart, as training's collectives keep them; several requests."""
    rng = random.Random(seed)
    watches = watches_of(ranks)
    world_size, steps = ranks.world_size, 40
    signalled = {rng.randrange(2, 15): rng.randrange(world_size), 28: rng.randrange(world_size)}
    together = threading.Barrier(world_size)

    def train(rank: int) -> list[int]:
        saved = []
        for step in range(steps):
            if signalled.get(step) == rank:
                watches[rank].signalled()
                watches[rank].signalled()
            if watches[rank].requested(step):
                saved.append(step)
            together.wait(seconds(60))  # the collectives of a step
        return saved

    saved = ranks.run(train)
    assert all(own == saved[0] for own in saved), saved
    assert len(saved[0]) == 2
    for asked, answered in zip(sorted(signalled), saved[0], strict=True):
        assert asked < answered <= asked + 2
    for client in ranks.clients:
        assert client.settle(Deadline(seconds(30)))
    assert ranks.store.num_keys() == 0


def test_signals_on_all_ranks_are_one_request(ranks: Ranks) -> None:
    watches = watches_of(ranks)

    def train(rank: int) -> list[bool]:
        watches[rank].signalled()
        return [watches[rank].requested(step) for step in range(4)]

    assert ranks.run(train) == [[False, True, False, False]] * ranks.world_size


@pytest.mark.parametrize(("longest_s", "answer"), [(99.0, True), (101.0, False)])
def test_save_that_would_not_fit_is_not_due(ranks: Ranks, longest_s: float, answer: bool) -> None:
    """The shortest time left and the longest save of any rank decide, on every rank."""
    watches = watches_of(
        ranks, time_left_s=100.5, save_s=lambda rank: longest_s if rank == 0 else 1.0
    )
    together = threading.Barrier(ranks.world_size)

    def train(rank: int) -> bool:
        if rank == 1:
            watches[rank].signalled()
        answers = []
        for step in range(4):
            answers.append(watches[rank].requested(step))
            together.wait(seconds(60))
        return any(answers)

    assert ranks.run(train) == [answer] * ranks.world_size


@pytest.mark.slow
def test_rank_that_does_not_ask_is_named(ranks: Ranks) -> None:
    watches = watches_of(ranks, timeout_s=seconds(3))

    def train(rank: int) -> None:
        if rank != 1:
            watches[rank].signalled()
            for step in range(3):
                watches[rank].requested(step)

    errors = ranks.run(train)
    for rank, error in enumerate(errors):
        if rank != 1:
            assert isinstance(error, RankLostError)
            assert error.ranks == (1,)


def test_signal_reaches_a_single_process_and_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with manager_of(tmp_path) as manager:
        watch = manager.save_on_signal([signal.SIGUSR1], time_left_s=3600)
        save_steps(manager, 1)
        assert not watch.requested(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watch.is_signalled
        assert [watch.requested(step) for step in (2, 3)] == [True, False]
        with pytest.raises(OptionError):
            watch.requested(-1)
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("first", [0, 1])
def test_two_watches_of_a_signal_close_in_any_order(tmp_path: Path, first: int) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    managers = [manager_of(tmp_path / name, no_dist=True) for name in "ab"]
    watches = [manager.save_on_signal([signal.SIGUSR1]) for manager in managers]
    os.kill(os.getpid(), signal.SIGUSR1)
    assert [watch.requested(1) for watch in watches] == [True, True]
    managers[first].close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert watches[1 - first].requested(2)
    assert not watches[first].is_signalled
    managers[1 - first].close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_handler_that_the_user_has_set_since_stays(tmp_path: Path) -> None:
    def users(*_: object) -> None: ...

    before = signal.getsignal(signal.SIGUSR1)
    try:
        with manager_of(tmp_path) as manager:
            manager.save_on_signal([signal.SIGUSR1])
            signal.signal(signal.SIGUSR1, users)
        assert signal.getsignal(signal.SIGUSR1) is users
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_forked_child_ends_by_the_signal_as_before(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        watch = manager.save_on_signal([signal.SIGTERM])
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(77)  # a loader's worker that cannot be terminated
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, status
        assert not watch.is_signalled
