"""Sides of a comparison, timed in shuffled rounds of one run.

Absolute figures drift by a third within minutes, so sides are compared within a round: each round
runs every side once, in an order of its own, and what is reported is the median of the rounds'
ratios. The first round warms up and checks every side bit for bit; it is not counted.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

Times = dict[str, list[float]]  # side -> seconds, one a counted round


class Side(NamedTuple):
    """One way to do the work.

    Attributes:
        run: does it in a directory that does not exist yet. Returns seconds by name: of parts, to
            be listed as sides of their own, or under its own name where its own clock is better.
        check: raises unless what `run` left there is right.
        rounds: counted rounds, where fewer than the others'. None: all.
        before: what `run` must find done; outside of the clock.
    """

    name: str
    run: Callable[[Path], Mapping[str, float]]
    check: Callable[[Path], None]
    rounds: int | None = None
    before: Callable[[], None] | None = None


def barrier() -> None:
    """Waits for all ranks; nothing without a process group."""
    if dist.is_initialized():
        dist.barrier()


def slowest(parts: Mapping[str, float]) -> dict[str, float]:
    """Returns each time of the rank that took longest."""
    if not dist.is_initialized():
        return dict(parts)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(parts))
    return {name: max(times[name] for times in everyone if name in times) for name in everyone[0]}


def time_side(side: Side, path: Path) -> dict[str, float]:
    """Returns the seconds of one run of the side, and of its parts, by name."""
    if side.before is not None:
        side.before()
    gc.collect()
    barrier()
    began = time.perf_counter()
    parts = side.run(path)
    barrier()
    seconds = time.perf_counter() - began
    return {side.name: seconds, **slowest(parts)}


def run_rounds(
    sides: Sequence[Side],
    rounds: int,
    folder: Path,
    log: Callable[[str], None] = lambda _: None,
    *,
    quiet_s: float = 0.05,
) -> Times:
    """Times all sides in `rounds` counted rounds, after one that warms up and checks.

    Args:
        folder: a directory to work in, the same on all ranks, which all take the same order.
        log: told of each round.
        quiet_s: how long the disk must be at rest before a side's turn.
    """
    order = random.Random(0)
    times: Times = {}
    is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
    settle(quiet_s=quiet_s)
    for number in range(rounds + 1):
        for side in order.sample(list(sides), len(sides)):
            if number > (rounds if side.rounds is None else side.rounds):
                continue
            path = folder / f"{side.name}-{number}"
            found = time_side(side, path)
            if number == 0:
                side.check(path)
            barrier()
            if is_first_rank:
                remove_and_settle(path, quiet_s=quiet_s)
            barrier()
            for name, seconds in found.items():
                times.setdefault(name, [])
                if number > 0:
                    times[name].append(seconds)
        log(f"round {number} of {rounds}" + " (warm-up, checked)" * (number == 0))
    return times


def run_case(label: str, sides: Sequence[Side], rounds: int, size: str, folder: Path) -> Times:
    """Times all sides of a case; rank 0 says what is done, and small sizes wait less."""

    def log(line: str) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{label}: {line}", file=sys.stderr, flush=True)

    return run_rounds(sides, rounds, folder, log, quiet_s=0.05 if size == "full" else 0.01)


# ---- Between two measurements -------------------------------------------------------------------


DISKSTATS = Path("/proc/diskstats")


def remove_and_settle(path: Path, *, quiet_s: float = 0.05, limit_s: float = 5.0) -> None:
    """Removes a tree, if there is one, and waits until its removal has reached the disk.

    Freed blocks may be discarded long after the unlink, and would fall into the next side's time.

    Args:
        quiet_s: the disk is at rest when its counters have stood still for so long.
        limit_s: the wait ends here even if somebody else keeps the disk busy.
    """
    if path.exists():  # loads leave none
        shutil.rmtree(path)
    settle(quiet_s=quiet_s, limit_s=limit_s)


def settle(*, quiet_s: float = 0.05, limit_s: float = 5.0) -> None:
    """Writes back what is dirty and waits until no request ends any more."""
    os.sync()
    began = quiet_since = time.monotonic()
    last = _counters()
    while time.monotonic() - began < limit_s:
        time.sleep(quiet_s / 5)
        current = _counters()
        if current != last:
            last, quiet_since = current, time.monotonic()
        elif time.monotonic() - quiet_since >= quiet_s:
            return


def _counters() -> str:
    try:
        return DISKSTATS.read_text()
    except OSError:
        return ""  # not shown in some containers: the sync alone must do
