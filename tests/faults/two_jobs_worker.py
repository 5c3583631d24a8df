"""One rank of one of two jobs that save to one directory at the same time: the worker of
test_two_jobs.py.

python two_jobs_worker.py DIRECTORY JOB RANK PAIRS FREE

Job "a" stops in each phase of its save until job "b" has tried to save there; FREE rounds of each
pair of ways have no order. PAIRS: "same", both jobs save the same way, or "all".
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from call_sweep import of_all, of_rank, state_there
from forks import Table, alone
from support.machine import seconds
from support.saves import assert_whole
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

import torch_dcpx
from torch_dcpx import ConcurrentSaveError, DcpxWriter, WriteOptions

RANKS = 2
GIVE_UP_S = seconds(120)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + GIVE_UP_S
    while not is_so():
        assert time.monotonic() < give_up_at, f"{what} did not come"
        time.sleep(0.001)


def wait_for(path: Path) -> None:
    wait_until(path.exists, path.name)


def _async_save(state: dict[str, Any], **kwargs: Any) -> None:
    torch_dcpx.async_save(state, **kwargs).result(GIVE_UP_S)


def _dcp_async_save(state: dict[str, Any], **kwargs: Any) -> None:
    future: Any = dcp.async_save(state, **kwargs)
    future.result(GIVE_UP_S)


WAYS: dict[str, Callable[..., Any]] = {
    "save": torch_dcpx.save,
    "async_save": _async_save,
    "dcp.save": dcp.save,
    "dcp.async_save": _dcp_async_save,
}

# phase, and the rank of job "a" that stops in it -> what is there in the end, whether "b" returns
PHASES = {
    ("planning", 0): ("a", True),  # no lock yet: "b" comes first
    ("planning", 1): ("a", False),
    ("writing", 0): ("a", False),
    ("writing", 1): ("a", False),
    ("failing", 1): ("old", False),
    ("before the commit", 0): ("a", False),
    ("after the commit", 0): ("b", True),  # no lock any more: "b" comes second
}


class Round(NamedTuple):
    """One save of each job."""

    number: int
    ways: dict[str, str]  # by job
    phase: tuple[str, int] | None  # None: whoever comes first

    def flag(self, directory: Path, name: str) -> Path:
        return directory / "flags" / f"{self.number}.{name}"

    @property
    def seeds(self) -> dict[str, int]:
        return {name: 3 * self.number + at for at, name in enumerate(("old", "a", "b"))}


def rounds_of(pairs: str, free: int, most: int, seed: int) -> list[Round]:
    """Returns the rounds, or `most` of them: the same ones in each process."""
    both = list(itertools.product(WAYS, WAYS)) if pairs == "all" else [(w, w) for w in WAYS]
    cases = [(pair, phase) for pair in both for phase in [*PHASES, *[None] * free]]
    chosen = random.Random(seed).sample(cases, min(most, len(cases)))
    return [
        Round(number, {"a": pair[0], "b": pair[1]}, phase)
        for number, (pair, phase) in enumerate(chosen)
    ]


class Stop:
    """Where a rank of job "a" waits until job "b" has tried."""

    def __init__(self, directory: Path, current: Round, rank: int) -> None:
        self._directory, self._round, self._rank = directory, current, rank
        self._is_passed = False

    def at(self, phase: str) -> None:
        if self._is_passed or (phase, self._rank) != self._round.phase:
            return
        self._is_passed = True
        if phase == "planning" and self._rank != 0:  # beside rank 0, which is to have the lock
            lock = self._directory / "checkpoint" / ".dcpx.lock"
            wait_until(lambda: lock.stat().st_size > 0, "the lock")
        self._round.flag(self._directory, "stopped").touch()
        for rank in range(RANKS):
            wait_for(self._round.flag(self._directory, f"b-tried-{rank}"))
        if phase == "failing":
            raise ValueError("failing as it was to")

    def progress(self, _done: int, _total: int) -> None:
        self.at("writing")
        self.at("failing")


class StoppingPlanner(dcp.DefaultSavePlanner):
    def __init__(self, stop: Stop) -> None:
        super().__init__()
        self._stop = stop

    def create_local_plan(self) -> SavePlan:
        self._stop.at("planning")
        return super().create_local_plan()


class StoppingWriter(DcpxWriter):
    def __init__(self, path: Path, stop: Stop) -> None:
        super().__init__(path, options=WriteOptions(progress=stop.progress))
        self._stop = stop

    def finish(self, *args: Any, **kwargs: Any) -> None:
        self._stop.at("before the commit")
        super().finish(*args, **kwargs)
        self._stop.at("after the commit")


class Job:
    """This rank of its job."""

    def __init__(self, directory: Path, job: str, rank: int) -> None:
        self._directory, self._job, self._rank = directory, job, rank
        self._path = directory / "checkpoint"
        self._pids: list[int] = []  # of the other job's ranks

    def meet_the_other(self) -> None:
        def pid_file(job: str, rank: int) -> Path:
            return self._directory / f"pid-{job}-{rank}"

        own = pid_file(self._job, self._rank)
        own.with_suffix(".part").write_text(str(os.getpid()))
        own.with_suffix(".part").rename(own)
        other = "b" if self._job == "a" else "a"
        for rank in range(RANKS):
            wait_for(pid_file(other, rank))
            self._pids.append(int(pid_file(other, rank).read_text()))

    def run(self, current: Round, chosen: random.Random) -> str | None:
        """Makes one round; returns what is bad, on rank 0 of job "a"."""
        seeds = current.seeds
        if self._job == "a":
            dcp.save(of_rank(seeds["old"], self._rank), storage_writer=DcpxWriter(self._path))
            dist.barrier()
            current.flag(self._directory, "ready").touch()
        pause_s = chosen.random() * 0.02
        error = self._tried(current, seeds[self._job], pause_s)
        bad = self._wrong(current, error)
        ends: list[Any] = [None] * RANKS
        dist.all_gather_object(ends, (error is not None, bad))
        end = self._directory / "flags" / f"{current.number}.end-{self._job}"
        if self._rank == 0:
            texts = [text for _, text in ends if text]
            if len({has_raised for has_raised, _ in ends}) != 1:
                texts.append(f"raised by rank: {ends}")
            part = end.with_name(f"{end.name}.part")
            part.write_text("\n".join([str(int(ends[0][0])), *texts]))
            part.rename(end)
        if self._job == "a" and self._rank == 0:
            bad = self._judged(current)
        dist.barrier()
        return bad

    def _tried(self, current: Round, seed: int, pause_s: float) -> BaseException | None:
        """Makes this job's save; returns what it raised."""
        wait_for(current.flag(self._directory, "ready"))
        kwargs: dict[str, Any]
        if self._job == "a":
            stop = Stop(self._directory, current, self._rank)
            kwargs = {
                "storage_writer": StoppingWriter(self._path, stop),
                "planner": StoppingPlanner(stop),
            }
        else:
            kwargs = {"storage_writer": DcpxWriter(self._path)}
            if current.phase is not None:
                wait_for(current.flag(self._directory, "stopped"))
        if current.phase is None:
            time.sleep(pause_s)
        error: BaseException | None = None
        try:
            WAYS[current.ways[self._job]](of_rank(seed, self._rank), **kwargs)
        except (Exception, CheckpointException) as caught:  # noqa: BLE001 - looked at
            error = caught
        current.flag(self._directory, f"{self._job}-tried-{self._rank}").touch()
        if isinstance(error, CheckpointException):
            error = next(iter(error.failures.values()))[0]
        return error and error.with_traceback(None)

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
        if f"pid={self._pids[0]} " not in f"{error.owner} ":
            return f"job {self._job}: owner {error.owner}, and it is of {self._pids}"
        return ""

    def _judged(self, current: Round) -> str | None:
        has_raised = {}
        for job in ("a", "b"):
            end = self._directory / "flags" / f"{current.number}.end-{job}"
            wait_for(end)
            raised, *texts = end.read_text().split("\n")
            if texts:
                return "\n".join(texts)
            has_raised[job] = raised == "1"
        there = state_there(self._path, {name: of_all(s) for name, s in current.seeds.items()})
        try:
            assert_whole(of_all(current.seeds[there]), self._path)
        except AssertionError as error:
            if there != "old":  # the one that failed leaves files, and the next save removes them
                return f"{there}: {error!r}"
        if current.phase is None:
            returned = [job for job in ("a", "b") if not has_raised[job]]
            return None if there in returned else f"{there} is there; raised: {has_raised}"
        expected, b_returns = PHASES[current.phase]
        if there != expected or has_raised["b"] is b_returns:
            return f"{there} is there, not {expected}; raised: {has_raised}"
        return None


def main() -> None:
    root, job, rank, pairs, free, most, seed = sys.argv[1:]
    directory = Path(root)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store-{job}", rank=int(rank), world_size=RANKS,
        timeout=timedelta(seconds=GIVE_UP_S),
    )  # fmt: skip
    one = Job(directory, job, int(rank))
    one.meet_the_other()
    table = Table()
    chosen = random.Random(f"{job}{rank}")
    for current in rounds_of(pairs, int(free), int(most), int(seed)):
        bad = one.run(current, chosen)
        phase = " on rank ".join(map(str, current.phase)) if current.phase else "free"
        table.add(" over ".join(current.ways.values()), f"{phase} ({current.number})", bad)
    table.print()
    os._exit(0)  # a thread of gloo may still hold a collective's tensors


if __name__ == "__main__":
    alone()
    main()
