"""A second save begins while a first one of the process plans, writes, commits, or is about to
fail: it waits, is skipped, or is refused, as asked for; what each of them saves is whole."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from call_sweep import PhasedPlanner, PhasedWriter, of_all, of_rank, state_there
from forks import Rows, assert_none_bad, run_alone, unwrapped
from support.machine import EVERY_POINT, points, seconds
from support.rank_fixture import StartRanks
from support.saves import assert_whole
from torch.distributed.checkpoint.api import CheckpointException

import torch_dcpx
from torch_dcpx import ConcurrentSaveError, DcpxWriter, WriteOptions
from torch_dcpx.checkpoint import pending as pending_saves

GIVE_UP_S = seconds(60)
FIRSTS = ("async_save", "dcp.async_save")
PHASES = ("planning", "writing", "committing", "failing")
# what is called while the first save is under way, and its on_busy
SECONDS = (
    *(("async_save", on_busy) for on_busy in ("wait", "skip", "error")),
    *((way, "wait") for way in ("save", "dcp.save", "dcp.async_save")),
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

    def expected(self) -> tuple[str, str]:
        """Returns what the first save and the second come to."""
        first = "failed" if self.phase == "failing" else "saved"
        counts = self.first == self.second == "async_save" and self.phase != "planning"
        if counts and self.max_in_flight == 1 and self.on_busy != "wait":
            return first, "skipped" if self.on_busy == "skip" else "refused"
        if self.is_waited_for:  # and told of what has failed meanwhile
            return first, first
        if self.phase == "planning":  # nobody has the directory yet: one after the other
            return "saved", "saved"
        return first, "refused" if self.is_same_id else "saved"

    def there(self) -> tuple[str, str]:
        """Returns what the two directories hold then."""
        first, second = (ended == "saved" for ended in self.expected())
        if not self.is_same_id:
            return "new" if first else "old", "other" if second else "old"
        if first and second:
            return "new" if self.phase == "planning" else "other", "old"
        return "new" if first else "other" if second else "old", "old"


CASES = [
    Case(first, phase, *second, is_same, limit)
    for first, phase, second, is_same in itertools.product(FIRSTS, PHASES, SECONDS, (True, False))
    for limit in ((1, 2) if first == second[0] == "async_save" else (1,))
]


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


def end_of(future: Any) -> Any:
    """Returns what a save came to, or its error."""
    try:
        return future.result(GIVE_UP_S)
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - looked at
        return unwrapped(error)


def kind_of(ended: Any) -> str:
    if ended is None:
        return "skipped"
    if isinstance(ended, ConcurrentSaveError):
        return "refused"
    if isinstance(ended, BaseException):
        return "failed" if "failing as it was to" in str(ended) else repr(ended)
    return "saved"


class Overlap:
    """The cases on this rank."""

    def __init__(self, root: Path, rank: int, ranks: int) -> None:
        self._paths = root / "a", root / "b"
        self._rank, self._ranks, self._seed = rank, ranks, 0
        # DCP's saves at once need a group each.
        self._groups = [dist.new_group() if ranks > 1 else None for _ in range(2)]
        for path in self._paths:
            self._save_old(path)

    def _save_old(self, path: Path) -> None:
        dcp.save(of_rank(self._seed, self._rank), storage_writer=DcpxWriter(path))

    def bad(self, case: Case) -> str:
        """Returns what is bad of a case."""
        self._target = self._paths[0] if case.is_same_id else self._paths[1]
        self._second: list[Any] = []  # what the second call returned or raised
        gate, state = Gate(case.phase), of_rank(self._seed + 1, self._rank)
        future = self._first(case, gate, state)
        if case.phase != "planning":
            if self._rank == 0 or case.phase != "committing":
                assert gate.reached.wait(GIVE_UP_S)
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(7)  # what is saved was copied
            self._second_call(case, gate)
        gate.opened.set()
        ended = end_of(future), self._second_end()
        self._barrier()
        names = ("old", "new", "other")
        states = {name: of_all(self._seed + at, self._ranks) for at, name in enumerate(names)}
        found = *map(kind_of, ended), *(state_there(path, states) for path in self._paths)
        self._seed += 3
        wanted = *case.expected(), *case.there()
        return self._next() or ("" if found == wanted else f"{found}, not {wanted}: {ended}")

    def _first(self, case: Case, gate: Gate, state: dict[str, Any]) -> Any:
        def in_the_plan(_phase: str) -> None:
            self._second_call(case, gate)
            self._second[0] = self._second_end()  # nobody has the directory yet

        planner = PhasedPlanner(in_the_plan) if case.phase == "planning" else None
        writer = PhasedWriter(self._paths[0], gate.at, max_in_flight=case.max_in_flight)
        save: Any = torch_dcpx.async_save if case.first == "async_save" else dcp.async_save
        group = self._groups[0]
        return save(state, storage_writer=writer, planner=planner, process_group=group)

    def _second_call(self, case: Case, gate: Gate) -> None:
        state = of_rank(self._seed + 2, self._rank)
        group, on_busy = self._groups[1], case.on_busy
        options: Any = {"max_in_flight": case.max_in_flight, "on_busy": on_busy}
        if case.is_waited_for:
            threading.Timer(0.02, gate.opened.set).start()
        module: Any = dcp if case.second.startswith("dcp.") else torch_dcpx
        call = getattr(module, case.second.removeprefix("dcp."))
        try:
            if module is dcp:
                ended = call(state, storage_writer=DcpxWriter(self._target), process_group=group)
            else:
                options = WriteOptions(**options)
                ended = call(state, self._target, options=options, process_group=group)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - looked at
            self._second.append(unwrapped(error))
            return
        if case.second == "dcp.async_save":
            ended = end_of(ended)  # which nothing that the first one holds delays
        if case.is_waited_for and not gate.opened.is_set():
            ended = AssertionError("it did not wait for the first one")
        self._second.append(ended)

    def _second_end(self) -> Any:
        ended = self._second[0]
        return end_of(ended) if hasattr(ended, "done") else ended

    def _barrier(self) -> None:
        if self._ranks > 1:
            dist.barrier()

    def _next(self) -> str:
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
        return ""


def overlaps(root: Path, seed: int, ranks: int) -> Rows:
    overlap = Overlap(root, dist.get_rank() if ranks > 1 else 0, ranks)
    count = len(CASES) if EVERY_POINT else points(10)
    return [(str(case), overlap.bad(case)) for case in random.Random(seed).sample(CASES, count)]


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("count", [1, 2])
def test_second_save_waits_is_skipped_or_refused_and_both_are_whole(
    tmp_path: Path, seed: int, ranks: StartRanks, count: int
) -> None:
    run = ranks(2, anew=True) if count == 2 else lambda *args: [run_alone(*args)]
    for rows in run(overlaps, tmp_path, seed, count):
        assert_none_bad(rows)
