"""SIGINT, SIGTERM and `os._exit` at any line of a save or load, by every entry point: the old or
the new checkpoint, no hang, the exit code that Python gives, and the next save works."""

from __future__ import annotations

import gc
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import Rows, assert_none_bad, in_child, run_alone, unwrapped
from lines import ENDINGS, LOCKS, NEW, NEXT, OLD, OPTIONS, Lines, is_locked, lines_of, saved_next
from support.machine import EVERY_POINT, points, seconds
from ways import LOADS, SAVES, is_same, loaded, which

from torch_dcpx import DcpxError


def interrupted(
    at: int, ending: str, act: Callable[[], object], files: tuple[str, ...] = ()
) -> bool:
    """Whether `act` was interrupted; and it is, by nothing else than the signal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Lines(at, ENDINGS[ending][0], files):
            act()
    except BaseException as error:
        seen = unwrapped(error)
        text = f"{seen!r} {seen.__cause__!r} {seen.__context__!r}"
        if not isinstance(seen, KeyboardInterrupt | DcpxError) and "KeyboardInterrupt" not in text:
            raise
        return True
    return False


def next_save(path: Path) -> str:
    saved_next(path)
    return "next" if which(path, OLD, NEXT) == "new" else "the next save is not whole"


def bad_save(path: Path, way: str, ending: str, at: int) -> str:
    shutil.rmtree(path, ignore_errors=True)
    SAVES["dcp.save"](OLD, path, OPTIONS)

    def body() -> str:
        was_interrupted = interrupted(at, ending, lambda: SAVES[way](NEW, path, OPTIONS))
        if ending != "SIGINT":
            return "ended"
        if not was_interrupted and which(path, OLD, NEW) != "new":
            return "returned, and is not there"
        # DCP's thread, and ours, go on when who waits for them is interrupted: until then the lock
        # is rightly theirs. DCP's ends with its executor, which the error's frames hold when the
        # interrupt came before DCP asked for its shutdown.
        gc.collect()
        for thread in set(threading.enumerate()) - {threading.current_thread()}:
            if not thread.daemon or thread.name == "dcpx-save":
                thread.join(seconds(60))
        return next_save(path)

    ended = in_child(body)
    if ended.is_hung or ended.code not in ENDINGS[ending][1]:
        return str(ended)
    if ending == "SIGINT":
        return ended.unless(ended.said.get("value") == "next")
    there = which(path, OLD, NEW)
    if there not in ("old", "new"):
        return there
    return next_save(path).removeprefix("next")


def bad_lock(path: Path, way: str, at: int) -> str:
    shutil.rmtree(path, ignore_errors=True)
    SAVES["dcp.save"](OLD, path, OPTIONS)

    def body() -> str:
        if not interrupted(at, "SIGINT", lambda: SAVES[way](NEW, path, OPTIONS), LOCKS):
            return "not interrupted"
        gc.collect()  # what the error's frames held
        return "the lock is left" if is_locked(path) else next_save(path)

    ended = in_child(body)
    return ended.unless(ended.said.get("value") == "next")


def bad_load(path: Path, way: str, ending: str, at: int) -> str:
    def body() -> bool:
        interrupted(at, ending, lambda: loaded(way, OLD, path))
        return is_same(OLD, loaded(way, OLD, path))

    ended = in_child(body)
    is_well = ended.code in ENDINGS[ending][1] and not ended.is_hung
    if ending == "SIGINT":
        is_well &= ended.said.get("value") is True
    return ended.unless(is_well)


def chosen_of(count: int, chosen: random.Random, idle: int) -> list[int]:
    """Returns the lines to try: a sample, or each seventh."""
    if EVERY_POINT:
        return list(range(chosen.randrange(1, 8), count + 1, 7))
    return sorted(chosen.sample(range(1, count + 1), min(points(idle), count)))


def warmed(path: Path) -> None:
    """Imports what is imported late, before anything is counted."""
    for way in ("save", "dcp.save"):
        SAVES[way](OLD, path, OPTIONS)
    for way in LOADS:
        loaded(way, OLD, path)


def signals(path: Path, seed: int) -> Rows:
    warmed(path)
    chosen, rows = random.Random(seed), Rows()
    for way in SAVES:
        count = lines_of(lambda way=way: SAVES[way](OLD, path, OPTIONS))
        for ending in ENDINGS:
            for at in chosen_of(count, chosen, 2):
                rows.append((f"{ending} in {way}, line {at}", bad_save(path, way, ending, at)))
    shutil.rmtree(path)
    SAVES["dcp.save"](OLD, path, OPTIONS)
    for way in LOADS:
        count = lines_of(lambda way=way: loaded(way, OLD, path))
        for ending in ENDINGS:
            for at in chosen_of(count, chosen, 2):
                rows.append((f"{ending} in {way}, line {at}", bad_load(path, way, ending, at)))
    return rows


def signals_in_locks(path: Path, seed: int) -> Rows:
    """SIGINT where the lock is taken and given back, on the main thread: handlers run there."""
    warmed(path)
    chosen, rows = random.Random(seed), Rows()
    for way in ("save", "dcp.save"):
        count = lines_of(lambda way=way: SAVES[way](OLD, path, OPTIONS), LOCKS)
        tried = range(1, count + 1) if EVERY_POINT else chosen_of(count, chosen, 6)
        rows += [(f"{way}, line {at}", bad_lock(path, way, at)) for at in tried]
    return rows


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_signal_at_any_line_leaves_old_or_new_and_no_lock(tmp_path: Path, seed: int) -> None:
    assert_none_bad(run_alone(signals, tmp_path / "ckpt", seed, deadline_s=35000))


@pytest.mark.slow
def test_signal_at_any_line_of_the_lock_leaves_it_free(tmp_path: Path, seed: int) -> None:
    assert_none_bad(run_alone(signals_in_locks, tmp_path / "ckpt", seed))
