"""When a save is due, alike on every rank: by a signal on one, by steps, by a rank's clock."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.machine import seconds
from support.store_ranks import Ranks, assert_no_key_is_left
from trainings import manager_of, save_steps

from torch_dcpx import OptionError, PlanError, Preemption, RankLostError
from torch_dcpx._waiting import Deadline
from torch_dcpx.checkpoint.same_call import check_same_call
from torch_dcpx.manager.cadence import Cadence, Pace
from torch_dcpx.options import WriteOptions
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


class HandClock:
    """A clock that a test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds


def due_steps(manager: Any, steps: Any, *, saves: bool = True) -> list[int]:
    """Asks at each of these steps, and saves where the answer is yes."""
    found = []
    for step in steps:
        if manager.should_save(step):
            found.append(int(step))
            if saves:
                save_steps(manager, step)
    return found


def test_multiples_are_due_and_the_count_goes_on_after_a_resume(tmp_path: Path) -> None:
    with manager_of(tmp_path, save_every=4) as manager:
        manager.resume(state={"x": torch.zeros(3)})
        assert due_steps(manager, range(11)) == [4, 8]
        save_steps(manager, 10)
    with manager_of(tmp_path, save_every=4) as again:
        assert again.resume(state={"x": torch.zeros(3)}).step == 10
        assert due_steps(again, range(11, 18)) == [12, 16]


def test_step_that_passes_a_multiple_is_due_until_a_save(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, save_every=np.int64(10))
    assert due_steps(manager, np.arange(3, 40, 3), saves=False) == [*range(12, 40, 3)]
    save_steps(manager, 39)
    assert not manager.should_save(39) and manager.should_save(torch.tensor(40))


def test_first_step_of_a_job_that_resumed_elsewhere_is_not_due(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, save_every=100)
    assert due_steps(manager, range(501, 700)) == [600]


def test_rules_and_steps_that_cannot_work_are_refused(tmp_path: Path) -> None:
    wrong: dict[str, list[Any]] = {
        "save_every": [0, -1, 1.5, True, "5"],
        "save_every_s": [0, -1, True, "5", float("nan"), float("inf")],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(OptionError, match=name) as info:
                manager_of(tmp_path, **{name: value})
            assert info.value.option == name
    with pytest.raises(OptionError, match="save_every="):
        manager_of(tmp_path).should_save(1)
    manager = manager_of(tmp_path, save_every=1)
    with pytest.raises(OptionError, match="step"):
        manager.should_save(True)
    assert manager.should_save(1)
    manager.close()
    with pytest.raises(OptionError, match="this manager is closed"):
        manager.should_save(2)


def test_signal_is_due_until_a_save_and_the_watch_says_so_too(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        watch = manager.save_on_signal([signal.SIGUSR1])
        assert not manager.should_save(1) and not watch.requested(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not watch.requested(1)  # one step, one answer
        assert manager.should_save(2) and watch.requested(2) and manager.should_save(2)
        assert manager.should_save(3) and not watch.requested(3)
        save_steps(manager, 3)
        assert not manager.should_save(3) and not manager.should_save(4)


def test_seconds_of_one_process_are_counted_at_each_step(tmp_path: Path) -> None:
    manager, clock = manager_of(tmp_path, save_every_s=60), HandClock()
    manager._cadence.pace._clock = clock
    saved = []
    for step in range(1, 200):
        clock.now += 7
        if manager.should_save(step):
            saved.append(clock.now)
            save_steps(manager, 1)
    assert saved == [7 + 63 * i for i in range(1, 23)][: len(saved)] and len(saved) == 22


class Training:
    """The coordinator's steps, which it looks at as a cadence does."""

    def __init__(self, every_s: float, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = HandClock(self.rng.uniform(0, 1e6))
        self.pace = Pace(every_s, self.clock)
        self.step = self.look_at = self.looks = 0
        self.late_s: list[float] = []  # of each save
        self._due_at = every_s + self.clock.now
        self._every_s = every_s

    def train(self, steps: int, step_s: float) -> None:
        for _ in range(steps):
            self.step += 1
            if self.step >= self.look_at:
                self.looks += 1
                is_due, self.look_at = self.pace.look(self.step)
                assert self.look_at > self.step
                if is_due:
                    self.late_s.append(self.clock.now - self._due_at)
                    self._due_at = self.clock.now + self._every_s
                    self.pace.note_saved()
            self.clock.now += step_s * self.rng.uniform(0.9, 1.1)


@pytest.mark.parametrize("step_s", [0.02, 0.5, 13.0, 700.0])
def test_saves_of_a_steady_training_are_in_time_with_few_looks(step_s: float, seed: int) -> None:
    training = Training(600.0, seed)
    training.train(max(20, int(6000 / step_s)), step_s)
    assert len(training.late_s) >= 8
    assert min(training.late_s) >= 0
    assert max(training.late_s) <= 600 / 8 / 4 + 1.2 * step_s
    assert training.looks <= 20 + 16 * len(training.late_s)


def test_save_of_a_training_that_became_slower_is_late_by_eighths(seed: int) -> None:
    slower = 6
    training = Training(600.0, seed)
    training.train(6000, 0.2)
    training.late_s.clear()
    training.train(4000, slower * 0.2)
    assert max(training.late_s) <= 1.25 * slower * 600 / 8
    assert max(training.late_s[1:]) <= 600 / 8 / 4 + 1.2 * slower * 0.2


class OneRank:
    """The part of a catalog that a cadence has to do with, of one rank as a thread."""

    options = WriteOptions()
    is_closed = False

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self.exchanges = 0

    def exchange(self, _what: str, *, timeout_s: float) -> Any:
        self.exchanges += 1
        return self._ranks.exchange(self._rank, timeout_s)

    def agree(self, exchange: Any, step: str, local: Any, reduce: Any) -> Any:
        def answer(calls: Any) -> Any:
            check_same_call(calls)
            return reduce(calls, None)

        return None, exchange.all_reduce(step, lambda: local()[1], answer)


def test_ranks_whose_clocks_differ_decide_alike_with_few_exchanges(ranks: Ranks, seed: int) -> None:
    def train(rank: int) -> tuple[list[int], int]:
        rng = random.Random(seed + rank)
        catalog, clock = OneRank(ranks, rank), HandClock(rng.uniform(0, 1e6))
        cadence = Cadence(catalog, 700, 50.0)  # type: ignore[arg-type]
        cadence.pace._clock = clock  # type: ignore[union-attr]
        saved = []
        for step in range(1, 2001):
            clock.now += rng.uniform(0.05, 0.3) * (1 + rank)  # another pace on each rank
            if cadence.should_save(step, ()):
                saved.append(step)
                cadence.note_saved(step)
        return saved, catalog.exchanges

    answers = ranks.run(train)
    assert all(own == answers[0] for own in answers), answers
    saved, exchanges = answers[0]
    assert {700, 1400} <= set(saved)
    assert 2000 * 0.05 / 60 < len(saved) < 2000 * 0.3 / 40
    assert exchanges < 20 * len(saved) < 2000 / 2
    assert_no_key_is_left(ranks)


def test_steps_that_are_counted_anew_are_asked_for_at_once(ranks: Ranks) -> None:
    def train(rank: int) -> int:
        catalog = OneRank(ranks, rank)
        cadence = Cadence(catalog, None, 1e6)  # type: ignore[arg-type]
        for step in range(1, 200):
            cadence.should_save(step, ())
        before = catalog.exchanges
        cadence.should_save(1, ())
        return catalog.exchanges - before

    assert ranks.run(train) == [1] * ranks.world_size


def test_steps_alone_exchange_once(ranks: Ranks) -> None:
    def train(rank: int) -> tuple[list[int], int]:
        catalog = OneRank(ranks, rank)
        cadence = Cadence(catalog, 100, None)  # type: ignore[arg-type]
        return [step for step in range(250) if cadence.should_save(step, ())], catalog.exchanges

    assert ranks.run(train) == [([*range(100, 250)], 1)] * ranks.world_size


@pytest.mark.parametrize("differs", ["step", "save_every", "save_every_s"])
def test_rank_that_asks_otherwise_is_named_on_every_rank(ranks: Ranks, differs: str) -> None:
    def train(rank: int) -> None:
        is_odd = rank == 1
        every = 5 if is_odd and differs == "save_every" else 4
        every_s = 5.0 if is_odd and differs == "save_every_s" else 4.0
        cadence = Cadence(OneRank(ranks, rank), every, every_s)  # type: ignore[arg-type]
        cadence.should_save(7 if is_odd and differs == "step" else 6, ())

    for error in ranks.run(train):
        assert isinstance(error, PlanError)
        assert f"rank 1: {differs}=" in str(error)
