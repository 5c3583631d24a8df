"""A second save begins while a first one plans, writes, commits, or is about to fail: the driver
of test_overlapping_saves.py, on one rank or on each of two.

python overlaps_worker.py DIRECTORY RANK RANKS MOST SEED    (MOST 0: every case)
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
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
from torch_dcpx.checkpoint import pending as pending_saves

GIVE_UP_S = seconds(60)
FIRSTS = ("async_save", "dcp.async_save")
PHASES = ("planning", "writing", "committing", "failing")
# what is called while the first save is under way, and its on_busy
SECONDS = (
    ("async_save", "wait"),
    ("async_save", "skip"),
    ("async_save", "error"),
    ("save", "wait"),
    ("dcp.save", "wait"),
    ("dcp.async_save", "wait"),
)


class Case(NamedTuple):
    first: str
    phase: str
    second: str
    on_busy: str
    is_same_id: bool
    max_in_flight: int

    @property
    def is_waited_for(self) -> bool:
        """Whether the second call comes back only when the first save has ended."""
        is_own = self.first == "async_save" and self.second in ("async_save", "save")
        has_begun = self.phase != "planning"  # a planner's hook does not wait for its own save
        is_full = self.second == "save" or self.max_in_flight == 1
        return is_own and has_begun and is_full and self.on_busy == "wait"

    @property
    def is_busy(self) -> bool:
        """Whether the second call is to be skipped or refused."""
        counts = self.first == self.second == "async_save" and self.phase != "planning"
        return counts and self.max_in_flight == 1 and self.on_busy != "wait"


def cases() -> Iterator[Case]:
    for first, phase, (second, on_busy), is_same in itertools.product(
        FIRSTS, PHASES, SECONDS, (True, False)
    ):
        for limit in (1, 2) if first == second == "async_save" else (1,):
            yield Case(first, phase, second, on_busy, is_same, limit)


class Gate:
    """Where the first save waits in its phase."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self.reached, self.opened = threading.Event(), threading.Event()

    def at(self, phase: str) -> None:
        if phase != self._phase:
            return
        self.reached.set()
        assert self.opened.wait(GIVE_UP_S), "the gate was not opened"
        if phase == "failing":
            raise ValueError("failing as it was to")

    def progress(self, _done: int, _total: int) -> None:
        self.at("writing")
        self.at("failing")


class GatedWriter(DcpxWriter):
    def __init__(self, path: Path, gate: Gate, limit: int) -> None:
        super().__init__(path, options=WriteOptions(progress=gate.progress, max_in_flight=limit))
        self._gate = gate

    def finish(self, *args: Any, **kwargs: Any) -> None:
        self._gate.at("committing")
        super().finish(*args, **kwargs)


class CallingPlanner(dcp.DefaultSavePlanner):
    """Calls `work` once it is asked for a plan, on each rank."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work

    def create_local_plan(self) -> SavePlan:
        self._work()
        return super().create_local_plan()


def unwrapped(error: BaseException) -> BaseException:
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


class Overlap:
    """One case, on this rank."""

    def __init__(self, directory: Path, rank: int, ranks: int, groups: list[Any]) -> None:
        self._paths = directory / "a", directory / "b"
        self._rank, self._ranks, self._groups = rank, ranks, groups
        self._seed = 0
        for path in self._paths:
            self._save_old(path)

    def _save_old(self, path: Path) -> None:
        dcp.save(of_rank(self._seed, self._rank), storage_writer=DcpxWriter(path))

    def run(self, case: Case) -> str | None:
        """Returns what is bad."""
        old, new, other = self._seed, self._seed + 1, self._seed + 2
        self._target = self._paths[0] if case.is_same_id else self._paths[1]
        self._second: list[Any] = []  # what the second call returned or raised
        gate = Gate(case.phase)
        state = of_rank(new, self._rank)
        future = self._first(case, gate, state, other)
        if case.phase != "planning":
            if self._rank == 0 or case.phase != "committing":
                assert gate.reached.wait(GIVE_UP_S)
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(7)  # what is saved was copied
            self._second_call(case, gate, other)
        gate.opened.set()
        first = self._end_of(future)
        second = self._second_end()
        self._barrier()
        bad = self._judged(case, first, second, (old, new, other))
        self._seed += 3
        return self._next() or bad

    def _first(self, case: Case, gate: Gate, state: dict[str, Any], other: int) -> Any:
        def in_the_plan() -> None:
            self._second_call(case, gate, other)
            self._second[0] = self._second_end()  # nobody has the directory yet

        planner = CallingPlanner(in_the_plan) if case.phase == "planning" else None
        writer = GatedWriter(self._paths[0], gate, case.max_in_flight)
        save: Any = torch_dcpx.async_save if case.first == "async_save" else dcp.async_save
        group = self._groups[0]
        return save(state, storage_writer=writer, planner=planner, process_group=group)

    def _second_call(self, case: Case, gate: Gate, seed: int) -> None:
        state = of_rank(seed, self._rank)
        group = self._groups[1]
        on_busy: Any = case.on_busy
        options = WriteOptions(max_in_flight=case.max_in_flight, on_busy=on_busy)
        if case.is_waited_for:
            threading.Timer(0.02, gate.opened.set).start()
        try:
            if case.second in ("async_save", "save"):
                call: Any = getattr(torch_dcpx, case.second)
                ended = call(state, self._target, options=options, process_group=group)
            else:
                call = dcp.save if case.second == "dcp.save" else dcp.async_save
                ended = call(state, storage_writer=DcpxWriter(self._target), process_group=group)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - looked at
            self._second.append(unwrapped(error))
            return
        if case.second == "dcp.async_save":
            ended = self._end_of(ended)  # which nothing that the first one holds delays
        if case.is_waited_for and not gate.opened.is_set():
            ended = AssertionError("it did not wait for the first one")
        self._second.append(ended)

    def _second_end(self) -> Any:
        ended = self._second[0]
        return self._end_of(ended) if hasattr(ended, "done") else ended

    def _end_of(self, future: Any) -> Any:
        """Returns what a save came to, or its error."""
        try:
            return future.result(GIVE_UP_S)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - looked at
            return unwrapped(error)

    def _barrier(self) -> None:
        if self._ranks > 1:
            dist.barrier()

    def _judged(
        self, case: Case, first: Any, second: Any, seeds: tuple[int, int, int]
    ) -> str | None:
        expected_first, expected_second = expected(case)
        found = kind_of(first), kind_of(second)
        if found != (expected_first, expected_second):
            wanted = expected_first, expected_second
            return f"{found} instead of {wanted}: {first!r}, {second!r}"
        names = ("old", "new", "other")
        states = {n: of_all(s, self._ranks) for n, s in zip(names, seeds, strict=True)}
        there = tuple(state_there(path, states) for path in self._paths)
        is_first_there, is_second_there = expected_first == "saved", expected_second == "saved"
        last = "other" if case.phase != "planning" else "new"  # of two to one directory
        if case.is_same_id:
            want = "old"
            if is_first_there and is_second_there:
                want = last
            elif is_first_there or is_second_there:
                want = "new" if is_first_there else "other"
            wanted_there = want, "old"
        else:
            wanted_there = (
                "new" if is_first_there else "old", "other" if is_second_there else "old"
            )  # fmt: skip
        return None if there == wanted_there else f"{there} is there, not {wanted_there}"

    def _next(self) -> str | None:
        """The next saves work and clean up; an error that nobody asked for comes first."""
        try:
            pending_saves.wait(GIVE_UP_S)
        except Exception as error:  # noqa: BLE001 - looked at
            if "failing as it was to" not in str(error):
                return f"nobody asked for {error!r}"
        self._barrier()
        for path in self._paths:
            self._save_old(path)
            self._barrier()
            if self._rank == 0:
                assert_whole(of_all(self._seed, self._ranks), path)
        return None


def expected(case: Case) -> tuple[str, str]:
    """Returns what the first save and the second come to."""
    first = "failed" if case.phase == "failing" else "saved"
    if case.is_busy:
        return first, "skipped" if case.on_busy == "skip" else "refused"
    if case.is_waited_for:  # and told of what has failed meanwhile
        return first, "saved" if first == "saved" else "failed"
    if case.phase == "planning":  # nobody has the directory yet: one after the other
        return "saved", "saved"
    return first, "refused" if case.is_same_id else "saved"


def kind_of(ended: Any) -> str:
    if ended is None:
        return "skipped"
    if isinstance(ended, ConcurrentSaveError):
        return "refused"
    if isinstance(ended, BaseException):
        return "failed" if "failing as it was to" in str(ended) else repr(ended)
    return "saved"


def main() -> None:
    root, (rank, ranks, most, seed) = Path(sys.argv[1]), map(int, sys.argv[2:])
    groups: list[Any] = [None, None]
    if ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", init_method=f"file://{root}/store", rank=rank, world_size=ranks,
            timeout=timedelta(seconds=seconds(120)),
        )  # fmt: skip
        groups = [dist.new_group() for _ in range(2)]  # DCP's saves at once need a group each
    overlap, table = Overlap(root, rank, ranks, groups), Table()
    tried = list(cases())
    if most:  # the same ones on each rank
        tried = random.Random(seed).sample(tried, min(most, len(tried)))
    for case in tried:
        try:
            bad = overlap.run(case)
        except AssertionError as error:
            bad = f"{error!r}"
        table.add(f"{ranks} ranks, {case.first} {case.phase}", tuple(case), bad)
    table.print()
    os._exit(0)  # a thread of gloo may still hold a collective's tensors


if __name__ == "__main__":
    alone()
    main()
