"""Sides timed one after the other in shuffled rounds, as many as the time allows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fake_cuda.driver_calls import CudaError

Side = Callable[[], float]

#: What a side of others may raise without ending the comparison: its row then says so.
SIDE_ERRORS = (
    *(RuntimeError, TypeError, ValueError, OSError, AttributeError, ImportError),
    *(LookupError, AssertionError, ArithmeticError, MemoryError, CudaError),
)


class LeftOutError(Exception):
    """A side cannot run here, our own neither."""


class Found(NamedTuple):
    """Seconds of each side by round, and why a side has none or fewer."""

    times: dict[str, list[float]]
    notes: dict[str, str]


def timed(run: Callable[[], object], settle: Callable[[], None]) -> float:
    """Returns the seconds until `run` has returned and `settle` finds the device at rest."""
    began = time.perf_counter()
    kept = run()
    settle()
    seconds = time.perf_counter() - began
    del kept
    return seconds


def interleave(
    sides: Mapping[str, Side],
    rounds: int,
    give_up_at: float,
    ours: str = "ours",
    tell: Callable[[Found], None] = lambda _: None,
) -> Found:
    """Returns the sides' seconds in `rounds` counted rounds, after one that warms up.

    No round begins that would not end before `give_up_at` (time.monotonic) by the last one's time.
    A side that alone would take a third of what is left is not run again: its first run is its
    figure. What our own side raises is raised, but `LeftOutError`; another side's row says what it
    raised.

    Args:
        tell: told what there is after the warm-up and after each round.
    """
    found = Found({}, {})

    def once(name: str) -> float | None:
        """Returns a side's seconds; None, and a note, where somebody else's cannot run."""
        try:
            return sides[name]()
        except (*SIDE_ERRORS, LeftOutError) as error:
            if name.startswith(ours) and not isinstance(error, LeftOutError):
                raise
            what = "left out" if isinstance(error, LeftOutError) else type(error).__name__
            found.notes[name] = " ".join(f"{what}: {error}".split())[:160]
            return None

    for name in sides:  # in the order given: the most telling ones first
        if time.monotonic() > give_up_at:
            found.notes[name] = "no time left"
        elif (seconds := once(name)) is not None:
            found.times[name], found.notes[name] = [seconds], "its first run"
    tell(found)
    left = give_up_at - time.monotonic()
    again = [name for name, (seconds,) in found.times.items() if seconds * 3 < left]
    order, cost = random.Random(0), sum(found.times[name][0] for name in again)
    for number in range(rounds):
        if not again or time.monotonic() + cost > give_up_at:
            break
        began = time.monotonic()
        for name in order.sample(again, len(again)):
            seconds = once(name)
            if seconds is None:
                again.remove(name)
                continue
            if number == 0:
                found.times[name].clear()
                del found.notes[name]
            found.times[name].append(seconds)
        cost = time.monotonic() - began
        tell(found)
    return found
