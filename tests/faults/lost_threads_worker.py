"""An exception ends the thread of an `async_save` at any of our lines: the driver of
test_lost_threads.py.

python lost_threads_worker.py DIRECTORY SEED POINTS    (of each exception; 0: every line)
"""

from __future__ import annotations

import gc
import random
import shutil
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from forks import Table, alone, in_child
from signals_worker import NEW, NEXT, OLD, OPTIONS, ROOTS, Lines, is_locked, saved_next
from support.machine import seconds
from ways import which

import torch_dcpx
from torch_dcpx.checkpoint import pending as pending_saves

WAIT_S = seconds(60)
DEADLINE_S = seconds(150)  # of a case
THREAD = "dcpx-save"
EDGE_LINES = 30
KINDS = (MemoryError, SystemExit)


class LinesOfThread(Lines):
    """Counts our lines on one thread, by the beginning of its name."""

    def __init__(self, thread: str, at: int, kind: type[BaseException]) -> None:
        def fail() -> None:
            raise kind("as it was to")

        super().__init__(at, fail)
        self._thread = thread

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        is_ours = frame.f_code.co_filename.startswith(ROOTS[0])
        if not is_ours or not threading.current_thread().name.startswith(self._thread):
            return None
        return super()._call(frame, event, arg)


def begun(path: Path) -> Any:
    """Returns a save that has begun, and is told from its thread."""
    return torch_dcpx.async_save(NEW, path, no_dist=True, options=OPTIONS)


def lines_of(path: Path) -> int:
    def body() -> int:
        with LinesOfThread(THREAD, -1, MemoryError) as lines:
            begun(path).result(WAIT_S)
        return lines.seen

    return int(in_child(body).said["value"])


def try_line(table: Table, path: Path, kind: type[BaseException], at: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    torch_dcpx.save(OLD, path, no_dist=True, options=OPTIONS)

    def body() -> str:
        error: BaseException | None = None
        with LinesOfThread(THREAD, at, kind):
            future = begun(path)
            try:
                future.result(WAIT_S)
            except BaseException as caught:  # noqa: BLE001 - looked at
                error = caught
        if isinstance(error, TimeoutError):
            return "nobody is told"
        there = which(path, OLD, NEW)
        if there not in ("old", "new") or (error is None and there != "new"):
            return f"{there} is there, raised: {error!r}"
        error = None
        del future
        gc.collect()
        if pending_saves.count():
            return "it is still under way"
        if is_locked(path):
            return "the lock is left"
        saved_next(path)
        return "" if which(path, OLD, NEXT) == "new" else "the next save is not whole"

    ended = in_child(body, DEADLINE_S)
    is_well = ended.said.get("value") == ""
    table.add(f"{kind.__name__} in async_save", f"line {at}", None if is_well else str(ended))


def lines_to_try(count: int, points: int, chosen: random.Random) -> list[int]:
    """Returns numbers of lines from the second on: the first is the `try` that guards the others.

    A sample is for one half of the ends, where what tells the caller is set up or done.
    """
    if not points:
        return list(range(2, count + 1))
    ends = [*range(2, 12), *range(count - EDGE_LINES, count + 1)]
    middle = range(12, count - EDGE_LINES)
    half = min(points // 2, len(middle))
    return sorted(
        [*chosen.sample(ends, min(points - half, len(ends))), *chosen.sample(middle, half)]
    )


def main() -> None:
    root, seed, points = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    table, chosen, path = Table(), random.Random(seed), root / "checkpoint"
    torch_dcpx.save(OLD, path, no_dist=True, options=OPTIONS)  # imports what is imported late
    count = lines_of(path)
    for kind in KINDS:
        for at in lines_to_try(count, points, chosen):
            try_line(table, path, kind, at)
    table.print()


if __name__ == "__main__":
    alone()
    main()
