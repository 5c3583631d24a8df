"""One step in a process of its own: its time, and the memory that it takes beside its input."""

from __future__ import annotations

import gc
import math
import os
import pickle
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from meters import resident_bytes

MIB = 1 << 20


class Timing(NamedTuple):
    """Of one step. Bytes are those of resident memory; seconds those of one core, for planning is
    one thread: beside other work on the machine they say more than the clock.
    """

    seconds: float
    more_bytes: int  # at its peak, beside what was there before the step
    peak_bytes: int  # of the whole process, its input included


def timed(step: Callable[[], Any]) -> tuple[Timing, Any]:
    """Runs a step with the peak of this process reset before it. Returns its result as well."""
    gc.collect()  # makes the input old: what made it is no part of the step
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident size
    before = resident_bytes("VmRSS")
    began = time.process_time()
    result = step()
    seconds = time.process_time() - began
    peak = resident_bytes("VmHWM")
    return Timing(seconds, peak - before, peak), result


def in_child(measure: Callable[[], Any]) -> Any:
    """Returns what `measure` does, run in a fork: what it allocates is no other's peak.

    Raises:
        RuntimeError: it failed; what it raised went to stderr.
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # Other threads of this process (a test's timer) hold nothing that the child needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            with os.fdopen(write_end, "wb") as pipe:
                pipe.write(pickle.dumps(measure()))
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise RuntimeError(f"a step ended with status {os.waitstatus_to_exitcode(status)}")
    return pickle.loads(answer)


class Side:
    """One planner, and how its time has grown so far."""

    def __init__(self, name: str, limit_s: float) -> None:
        self.name = name
        self.limit_s = limit_s
        self.points: list[tuple[int, Timing]] = []  # items, what they took

    def exponent(self, field: str = "seconds") -> float:
        """Returns the slope of a figure over the items, both in logarithms; over the last half of
        the points, where what is the same for all sizes counts least.
        """
        if len(self.points) < 2:
            return math.nan
        (a, first), (b, last) = self.points[len(self.points) // 2 - 1], self.points[-1]
        s, t = getattr(first, field), getattr(last, field)
        return math.log(t / s) / math.log(b / a) if a != b and s > 0 and t > 0 else math.nan

    def may_run(self, items: int) -> bool:
        """Returns whether `items` are likely to be done in time."""
        if not self.points:
            return True
        last, timing = self.points[-1]
        growth = self.exponent()
        power = growth if growth > 0 else 2
        return timing.seconds * (items / last) ** power <= self.limit_s

    def run(self, items: int, measure: Callable[[], tuple[Timing, Any]]) -> Any:
        """Returns (timing, what else was found), or (None, None) where it would take too long."""
        if not self.may_run(items):
            return None, None
        timing, found = in_child(measure)
        self.points.append((items, timing))
        return timing, found
