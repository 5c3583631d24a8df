"""A process of async_save.py: stalls and times of the sides of one case, or one side's meters."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from async_cases import ASYNC_CASES
from async_sides import NEEDS_RANKS, Memcpy, side, sides_by_name
from case_states import make_state, payload_bytes
from disk import settle
from harness import run_rounds
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, choices=ASYNC_CASES)
    parser.add_argument("--sides", nargs="+", required=True)
    parser.add_argument("--size", default="full")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--meters", action="store_true")
    parser.add_argument("--saves", type=int, default=50)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if set(args.sides) & set(NEEDS_RANKS):  # stock's async_save asks for a group
        store = dist.HashStore()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    make = lambda: make_state(ASYNC_CASES[args.case], args.size)  # noqa: E731
    if args.meters:
        found = {name: meters(name, make, args.folder, saves=args.saves) for name in args.sides}
    else:
        state = make()
        known = sides_by_name()
        sides = [side(name, state, known[name]) for name in args.sides if name != "memcpy"]
        if "memcpy" in args.sides:
            sides.append(Memcpy(state).side())

        def log(line: str) -> None:
            print(f"{args.case}: {line}", file=sys.stderr, flush=True)

        quiet_s = 0.05 if args.size == "full" else 0.01
        times = run_rounds(sides, args.rounds, args.folder, log, quiet_s=quiet_s)
        found = {"bytes": payload_bytes(state), "times": times}
    args.result.write_text(json.dumps(found))
    os._exit(0)  # stock's process mode has no end of its own


if __name__ == "__main__":
    main()
