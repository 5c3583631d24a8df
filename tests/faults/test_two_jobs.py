"""Two jobs of two ranks each save to one directory at the same time: the old checkpoint or one of
the new ones, whole; a job that is refused is told on every rank who has the lock."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from call_sweep import PhasedPlanner, PhasedWriter, of_all, of_rank, state_there
from forks import Rows, assert_none_bad, unwrapped
from support.machine import EVERY_POINT, points, seconds
from support.rank_fixture import StartRanks
from support.saves import assert_whole
from torch.distributed.checkpoint.api import CheckpointException

import torch_dcpx
from torch_dcpx import ConcurrentSaveError, DcpxWriter

RANKS = 2
GIVE_UP_S = seconds(120)
WAYS = ("save", "async_save", "dcp.save", "dcp.async_save")
# phase, and the rank of job "a" that stops in it -> what is there in the end, whether "b" returns
PHASES = {
    ("planning", 0): ("a", True),  # no lock yet: "b" comes first
    ("planning", 1): ("a", False),
    ("writing", 0): ("a", False),
    ("writing", 1): ("a", False),
    ("failing", 1): ("old", False),
    ("committing", 0): ("a", False),
    ("after the commit", 0): ("b", True),  # no lock any more: "b" comes second
}


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + GIVE_UP_S
    while not is_so():
        assert time.monotonic() < give_up_at, f"{what} did not come"
        time.sleep(0.001)


def tell(path: Path, said: Any = None) -> None:
    path.with_suffix(".part").write_text(json.dumps(said))
    path.with_suffix(".part").rename(path)


def told(path: Path) -> Any:
    wait_until(path.exists, path.name)
    return json.loads(path.read_text())


class Round(NamedTuple):
    """One save of each job."""

    number: int
    ways: dict[str, str]  # by job
    phase: tuple[str, int] | None  # None: whoever comes first

    @property
    def seeds(self) -> dict[str, int]:
        return {name: 3 * self.number + at for at, name in enumerate(("old", "a", "b"))}


def rounds_of(seed: int) -> list[Round]:
    """Returns all rounds, or some of pairs that save alike: the same ones in each process."""
    pairs = list(itertools.product(WAYS, WAYS)) if EVERY_POINT else [(way, way) for way in WAYS]
    free = 5 if EVERY_POINT else 2  # rounds without an order
    cases = [(pair, phase) for pair in pairs for phase in [*PHASES, *[None] * free]]
    chosen = random.Random(seed).sample(cases, len(cases) if EVERY_POINT else points(24))
    return [Round(n, {"a": a, "b": b}, phase) for n, ((a, b), phase) in enumerate(chosen)]


class Stop:
    """Where a rank of job "a" waits until job "b" has tried."""

    def __init__(self, flags: Path, current: Round, rank: int) -> None:
        self._flags, self._round, self._rank = flags, current, rank
        self._is_passed = False

    def at(self, phase: str) -> None:
        if self._is_passed or (phase, self._rank) != self._round.phase:
            return
        self._is_passed = True
        if phase == "planning" and self._rank != 0:  # beside rank 0, which is to have the lock
            lock = self._flags.parent / "checkpoint" / ".dcpx.lock"
            wait_until(lambda: lock.stat().st_size > 0, "the lock")
        tell(self._flags / "stopped")
        for rank in range(RANKS):
            told(self._flags / f"b-tried-{rank}")
        if phase == "failing":
            raise ValueError("failing as it was to")


class Job:
    """This rank of its job."""

    def __init__(self, root: Path, job: str) -> None:
        self._root, self._job, self._rank = root, job, dist.get_rank()
        self._path = root / "checkpoint"
        tell(root / f"pid-{job}-{self._rank}", os.getpid())
        self._other = told(root / f"pid-{'b' if job == 'a' else 'a'}-0")

    def bad(self, current: Round, pause_s: float) -> str:
        """Makes one round; returns what is bad, on rank 0 of job "a"."""
        flags = self._root / str(current.number)
        flags.mkdir(exist_ok=True)
        if self._job == "a":
            old = of_rank(current.seeds["old"], self._rank)
            dcp.save(old, storage_writer=DcpxWriter(self._path))
            dist.barrier()
            tell(flags / f"ready-{self._rank}")
        told(flags / f"ready-{self._rank}")
        error = self._tried(flags, current, pause_s)
        ends: list[Any] = [None] * RANKS
        dist.all_gather_object(ends, (error is not None, self._wrong(current, error)))
        if self._rank == 0:
            tell(flags / f"end-{self._job}", ends)
        bad = self._judged(flags, current) if (self._job, self._rank) == ("a", 0) else ""
        dist.barrier()
        return bad

    def _tried(self, flags: Path, current: Round, pause_s: float) -> BaseException | None:
        """Makes this job's save; returns what it raised."""
        kwargs: dict[str, Any] = {"storage_writer": DcpxWriter(self._path)}
        if self._job == "a":
            at = Stop(flags, current, self._rank).at
            kwargs = {"storage_writer": PhasedWriter(self._path, at), "planner": PhasedPlanner(at)}
        elif current.phase is not None:
            told(flags / "stopped")
        if current.phase is None:
            time.sleep(pause_s)
        way = current.ways[self._job]
        call: Any = getattr(dcp if "dcp." in way else torch_dcpx, way.removeprefix("dcp."))
        error: BaseException | None = None
        try:
            ended = call(of_rank(current.seeds[self._job], self._rank), **kwargs)
            if "async" in way:
                ended.result(GIVE_UP_S)
        except (Exception, CheckpointException) as caught:  # noqa: BLE001 - looked at
            error = unwrapped(caught).with_traceback(None)
        tell(flags / f"{self._job}-tried-{self._rank}")
        return error

    def _wrong(self, current: Round, error: BaseException | None) -> str:
        """Returns what is wrong with an error of this rank, or ""."""
        if error is None:
            return ""
        if self._job == "a" and current.phase == ("failing", 1):
            return "" if "failing as it was to" in str(error) else repr(error)
        if not isinstance(error, ConcurrentSaveError):
            return f"job {self._job}, rank {self._rank}: {error!r}"
        if current.phase is None and error.owner == "unknown":
            return ""  # the other one has just taken the lock, or has just ended
        is_named = f"pid={self._other} " in f"{error.owner} "
        return "" if is_named else f"job {self._job}: owner {error.owner}, not {self._other}"

    def _judged(self, flags: Path, current: Round) -> str:
        ends = {job: told(flags / f"end-{job}") for job in ("a", "b")}
        has_raised = {job: end[0][0] for job, end in ends.items()}
        if any(wrong for end in ends.values() for _, wrong in end):
            return str(ends)
        if any(len({raised for raised, _ in end}) != 1 for end in ends.values()):
            return f"raised by rank: {ends}"
        there = state_there(self._path, {name: of_all(s) for name, s in current.seeds.items()})
        try:
            assert_whole(of_all(current.seeds[there]), self._path)
        except AssertionError as error:
            if there != "old":  # the one that failed leaves files, and the next save removes them
                return f"{there}: {error!r}"
        if current.phase is None:
            is_well = there in [job for job in ("a", "b") if not has_raised[job]]
        else:
            expected, b_returns = PHASES[current.phase]
            is_well = there == expected and has_raised["b"] is not b_returns
        return "" if is_well else f"{there} is there; raised: {has_raised}"


def rounds(root: Path, name: str, seed: int) -> Rows:
    job, chosen = Job(root, name), random.Random(f"{name}{dist.get_rank()}")
    return [(str(one), job.bad(one, chosen.random() * 0.02)) for one in rounds_of(seed)]


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(3000)
def test_two_jobs_on_one_directory_leave_one_whole_checkpoint(
    tmp_path: Path, seed: int, ranks: StartRanks
) -> None:
    limit_s = seconds(2900 if EVERY_POINT else 1150)
    jobs = [ranks(RANKS, anew=True).start(rounds, tmp_path, job, seed) for job in "ab"]
    rows, _ = (job.wait(limit_s) for job in jobs)
    assert_none_bad(rows[0])
