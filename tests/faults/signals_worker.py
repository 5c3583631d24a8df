"""SIGINT, SIGTERM and `os._exit` at any line of a save or load: the driver of test_signals.py.

python signals_worker.py DIRECTORY GROUP SEED POINTS    (of each way and each ending; 0: see there)

GROUP "lines": of our modules and DCP's. "locks": SIGINT at the lines that take and give back the
save lock, which are few among those; the lock is free afterwards, also for another process.
"""

from __future__ import annotations

import fcntl
import gc
import os
import random
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from forks import Ended, Table, alone, in_child
from support.machine import seconds
from ways import LOADS, SAVES, is_same, loaded, which

import torch_dcpx
from torch_dcpx import DcpxError, WriteOptions
from torch_dcpx.storage import save_lock as lock
from torch_dcpx.writer import locks as save_locks

ROOTS = (str(Path(torch_dcpx.__file__).parent), f"{os.sep}distributed{os.sep}checkpoint{os.sep}")
LOCKS = (lock.__file__, save_locks.__file__, weakref.__file__)  # a lock ends by weakref.finalize
OPTIONS = WriteOptions(workers=2, slot_bytes=256 << 10)
OLD, NEW, NEXT = ({"w": torch.full((100_000,), float(n)), "step": n} for n in range(3))


class Lines:
    """Counts the lines of our modules and of DCP's on all threads, and acts at one of them."""

    def __init__(self, at: int, act: Callable[[], object], files: tuple[str, ...] = ()) -> None:
        """With `files` only lines of those count."""
        self.seen = 0
        self._at, self._act, self._files = at, act, files

    def __enter__(self) -> Lines:
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if self._files:
            return self._line if name in self._files else None
        return self._line if name.startswith(ROOTS[0]) or ROOTS[1] in name else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.seen += 1
            if self.seen == self._at:
                self._act()
        return self._line


def kill(number: int) -> Callable[[], object]:
    return lambda: os.kill(os.getpid(), number)


ENDINGS: dict[str, tuple[Callable[[], object], tuple[int, ...]]] = {
    "SIGINT": (kill(signal.SIGINT), (0,)),
    "SIGTERM": (kill(signal.SIGTERM), (-signal.SIGTERM, 0)),
    "os._exit": (lambda: os._exit(7), (7, 0)),
}


def lines_of(act: Callable[[], object], files: tuple[str, ...] = ()) -> int:
    def body() -> int:
        with Lines(0, lambda: None, files) as lines:
            act()
        return lines.seen

    ended = in_child(body)
    assert "value" in ended.said, ended
    return int(ended.said["value"])


def interrupted(
    at: int, ending: str, act: Callable[[], object], files: tuple[str, ...] = ()
) -> bool:
    """Whether `act` was interrupted; and it is, by nothing else than the signal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Lines(at, ENDINGS[ending][0], files):
            act()
    except BaseException as error:
        seen: BaseException | None = error
        while getattr(seen, "failures", None):
            seen = next(iter(seen.failures.values()))[0]  # type: ignore[union-attr]
        text = f"{seen!r} {seen.__cause__!r} {seen.__context__!r}"
        if not isinstance(seen, KeyboardInterrupt | DcpxError) and "KeyboardInterrupt" not in text:
            raise
        return True
    return False


def saved_next(path: Path) -> None:
    """The next save of the same process; it may first be told of what nobody asked for."""
    try:
        SAVES["save"](NEXT, path, OPTIONS)
    except DcpxError as error:
        if isinstance(error, torch_dcpx.ConcurrentSaveError):
            raise
        SAVES["save"](NEXT, path, OPTIONS)


def bad_save(ended: Ended, ending: str, path: Path, there: str) -> str | None:
    if ended.is_hung or ended.code not in ENDINGS[ending][1]:
        return str(ended)
    if ending == "SIGINT":
        return None if ended.said.get("value") == "next" else str(ended)
    if there not in ("old", "new"):
        return there
    saved_next(path)
    return None if which(path, OLD, NEXT) == "new" else "the next save is not whole"


def try_save(table: Table, path: Path, way: str, ending: str, at: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    SAVES["dcp.save"](OLD, path, OPTIONS)

    def body() -> str:
        def act() -> None:
            SAVES[way](NEW, path, OPTIONS)

        was_interrupted = interrupted(at, ending, act)
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
        saved_next(path)
        return "next" if which(path, OLD, NEXT) == "new" else "the next save is not whole"

    ended = in_child(body)
    there = which(path, OLD, NEW) if ending != "SIGINT" and not ended.is_hung else ""
    table.add(f"{ending} in {way}", f"line {at}", bad_save(ended, ending, path, there))


def is_locked(path: Path) -> bool:
    """Whether another process would find the directory's lock taken."""
    fd = os.open(path / ".dcpx.lock", os.O_RDONLY | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def try_lock(table: Table, path: Path, way: str, at: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    SAVES["dcp.save"](OLD, path, OPTIONS)

    def body() -> str:
        if not interrupted(at, "SIGINT", lambda: SAVES[way](NEW, path, OPTIONS), LOCKS):
            return "not interrupted"
        gc.collect()  # what the error's frames held
        if is_locked(path):
            return "the lock is left"
        saved_next(path)
        return "next" if which(path, OLD, NEXT) == "new" else "the next save is not whole"

    ended = in_child(body)
    is_well = ended.said.get("value") == "next"
    table.add(f"SIGINT in the lock of {way}", f"line {at}", None if is_well else str(ended))


def try_load(table: Table, path: Path, way: str, ending: str, at: int) -> None:
    def body() -> bool:
        interrupted(at, ending, lambda: loaded(way, OLD, path))
        return is_same(OLD, loaded(way, OLD, path))

    ended = in_child(body)
    is_well = ended.code in ENDINGS[ending][1] and not ended.is_hung
    if ending == "SIGINT":
        is_well &= ended.said.get("value") is True
    table.add(f"{ending} in {way}", f"line {at}", None if is_well else str(ended))


def points_of(count: int, points: int, chosen: random.Random) -> list[int]:
    if points == 0:
        return list(range(chosen.randrange(1, 8), count + 1, 7))
    return sorted(chosen.sample(range(1, count + 1), min(points, count)))


def locks(path: Path, points: int, chosen: random.Random, table: Table) -> None:
    """Saves on the main thread alone: signals' handlers run there."""
    for way in ("save", "dcp.save"):
        count = lines_of(lambda way=way: SAVES[way](OLD, path, OPTIONS), LOCKS)
        for at in points_of(count, points, chosen) if points else range(1, count + 1):
            try_lock(table, path, way, at)


def lines(path: Path, points: int, chosen: random.Random, table: Table) -> None:
    for way in SAVES:
        count = lines_of(lambda way=way: SAVES[way](OLD, path, OPTIONS))
        for ending in ENDINGS:
            for at in points_of(count, points, chosen):
                try_save(table, path, way, ending, at)
    shutil.rmtree(path)
    SAVES["dcp.save"](OLD, path, OPTIONS)
    for way in LOADS:
        count = lines_of(lambda way=way: loaded(way, OLD, path))
        for ending in ENDINGS:
            for at in points_of(count, points, chosen):
                try_load(table, path, way, ending, at)


GROUPS = {"lines": lines, "locks": locks}


def main() -> None:
    alone()
    root, group, seed, points = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    table = Table()
    path = root / "ckpt"
    for way in ("save", "dcp.save"):
        SAVES[way](OLD, path, OPTIONS)
    for way in LOADS:
        loaded(way, OLD, path)
    GROUPS[group](path, points, random.Random(seed), table)
    table.print()


if __name__ == "__main__":
    main()
