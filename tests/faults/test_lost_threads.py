"""An exception ends the thread of an `async_save` at any of our lines: who waits is told, the
old or the new checkpoint is there, and the next save works."""

from __future__ import annotations

import gc
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from forks import Rows, assert_none_bad, in_child, run_alone
from lines import NEW, NEXT, OLD, OPTIONS, Lines, is_locked, lines_of, saved_next
from support.machine import EVERY_POINT, points, seconds
from ways import which

import torch_dcpx
from torch_dcpx.checkpoint import pending as pending_saves

WAIT_S = seconds(60)
THREAD = "dcpx-save"
EDGE_LINES = 30


def begun(path: Path) -> Any:
    """Returns a save that has begun, and is told from its thread."""
    return torch_dcpx.async_save(NEW, path, no_dist=True, options=OPTIONS)


def bad_line(path: Path, kind: type[BaseException], at: int) -> str:
    shutil.rmtree(path, ignore_errors=True)
    torch_dcpx.save(OLD, path, no_dist=True, options=OPTIONS)

    def fail() -> None:
        raise kind("as it was to")

    def body() -> str:
        error: BaseException | None = None
        with Lines(at, fail, thread=THREAD):
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

    ended = in_child(body, seconds(150))
    return ended.unless(ended.said.get("value") == "")


def lines_to_try(count: int, chosen: random.Random) -> list[int]:
    """Returns numbers of lines from the second on: the first is the `try` that guards the others.

    A sample has the second, and is for one half of the ends, where what tells the caller is set up
    or done.
    """
    if EVERY_POINT:
        return list(range(2, count + 1))
    ends = [*range(3, 12), *range(count - EDGE_LINES, count + 1)]
    middle = range(12, count - EDGE_LINES)
    tried = points(5)
    half = min(tried // 2, len(middle))
    return [2, *sorted([*chosen.sample(ends, tried - half - 1), *chosen.sample(middle, half)])]


def exceptions(path: Path, seed: int) -> Rows:
    chosen = random.Random(seed)
    torch_dcpx.save(OLD, path, no_dist=True, options=OPTIONS)  # imports what is imported late
    count = lines_of(lambda: begun(path).result(WAIT_S), thread=THREAD)
    return [
        (f"{kind.__name__} at line {at}", bad_line(path, kind, at))
        for kind in (MemoryError, SystemExit)
        for at in lines_to_try(count, chosen)
    ]


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_exception_at_any_line_of_a_saves_thread_is_told(tmp_path: Path, seed: int) -> None:
    assert_none_bad(run_alone(exceptions, tmp_path / "checkpoint", seed, deadline_s=35000))
