"""A process of async_save.py: stalls and times of the sides of one case, or one side's meters."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from async_sides import NEEDS_RANKS, Memcpy, side, sides_by_name
from case_states import make_state, payload_bytes
from cases import ASYNC_CASES
from harness import run_case, settle
from meters import CountingThread, extra_peak_bytes, resident_bytes

FIRST = 2  # after this save, and after the last, the resident memory is read
MIB = 1 << 20
Make = Callable[[], dict[str, Any]]


class TinyCalls(CountingThread):
    """A thread that counts tiny torch calls: what training's own Python does."""

    def _run(self) -> None:
        one = torch.ones(4)
        while not self._is_over:
            one.add_(1)
            self._count += 1


def rate_during(kind: type[CountingThread], save: Callable[[], Any]) -> dict[str, float]:
    """Returns the thread's rate while a save goes on, of that when idle, and the save's seconds."""
    with kind() as thread:
        idle = thread.idle_rate(0.4)
        wait = save()
        before, began = thread.read(), time.perf_counter()
        wait()
        seconds = time.perf_counter() - began
        after = thread.read()
        idle = (idle + thread.idle_rate(0.4)) / 2
    return {
        "rate": (after[1] - before[1]) / (after[0] - before[0]) / idle,
        "background_s": seconds,
    }


def once(state: dict[str, Any], save: Callable[[Any], Callable[[], Any]]) -> dict[str, Any]:
    """Returns what one state's saves cost besides time."""

    def whole() -> None:
        save(state)()

    found: dict[str, Any] = {"state_mib": payload_bytes(state) / MIB}
    found["extra_peak_mib"] = extra_peak_bytes(whole) / MIB
    settle()
    found["counting"] = rate_during(CountingThread, lambda: save(state))
    settle()
    found["torch_calls"] = rate_during(TinyCalls, lambda: save(state))
    return found


def meters(name: str, make: Make, folder: Path, *, saves: int) -> dict[str, Any]:
    begin = sides_by_name()[name]
    number = 0

    def save(state: dict[str, Any]) -> Callable[[], Any]:
        nonlocal number
        number += 1
        path = folder / str(number)
        wait = begin(state, path)

        def end() -> None:
            wait()
            shutil.rmtree(path)

        return end

    found: dict[str, Any] = once(make(), save)
    rss = {}
    for later in range(1, saves + 1):
        save(make())()  # new objects each time
        if later in (FIRST, saves):
            gc.collect()
            rss[str(later)] = resident_bytes()
            threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
            found[f"threads_and_fds_{later}"] = [threads, fds]
    found["rss"] = rss
    return found


def join_group(names: Sequence[str]) -> None:
    """Makes a group of this process alone, for which stock's async_save asks."""
    if set(names) & set(NEEDS_RANKS):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def meter(*, name: str, case: str, size: str, saves: int, folder: Path) -> dict[str, Any]:
    join_group([name])
    return meters(name, lambda: make_state(ASYNC_CASES[case], size), folder, saves=saves)


def time_sides(
    *, case: str, size: str, rounds: int, names: Sequence[str], folder: Path
) -> dict[str, Any]:
    join_group(names)
    state = make_state(ASYNC_CASES[case], size)
    known = sides_by_name()
    sides = [side(name, state, known[name]) for name in names if name != "memcpy"]
    if "memcpy" in names:
        sides.append(Memcpy(state).side())
    times = run_case(case, sides, rounds, size, folder)
    return {"bytes": payload_bytes(state), "times": times}
