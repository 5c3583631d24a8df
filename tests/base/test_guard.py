"""A guard is given back whatever line an exception comes at."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.machine import seconds

import torch_dcpx
from torch_dcpx import _gc
from torch_dcpx._waiting import Guard
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.running_save import RunningSave
from torch_dcpx.storage.save_lock import SaveLock

FILES = (str(Path(torch_dcpx.__file__).parent), __file__)


class HitError(Exception):
    """Raised at a line."""


def is_hit(work: Callable[[], None], at: int) -> bool:
    """Runs `work` on a thread of its own, and raises in it at its `at`-th line, if it has one."""
    found: list[bool] = []

    def run() -> None:
        seen = 0

        def line(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal seen
            if not frame.f_code.co_filename.startswith(FILES):
                return None
            seen += event == "line"
            if event == "line" and seen == at:
                raise HitError
            return line

        sys.settrace(line)
        try:
            work()
        except HitError:
            pass
        finally:
            sys.settrace(None)
        found.append(seen >= at)

    ended_by_its_deadline(run)
    return found == [True]


def ended_by_its_deadline(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds(60))
    assert not thread.is_alive(), "it waits for a guard that nobody gives back"


def assert_free_after_each_line(work: Callable[[], None], at_least: int) -> None:
    """After an exception at any line of `work` on one thread, another one can do it."""
    at = 1
    while is_hit(work, at):
        ended_by_its_deadline(work)
        at += 1
    assert at > at_least


def test_guard_is_free_after_an_exception_at_any_line() -> None:
    guard = Guard()

    def work() -> None:
        with guard.held():
            with guard.held():
                len("inner")
            len("outer")
        len("after")

    assert_free_after_each_line(work, 10)


def test_inner_block_leaves_the_guard_to_the_outer_one() -> None:
    guard, has_it = Guard(), threading.Event()

    def take() -> None:
        with guard.held():
            has_it.set()

    with guard.held():
        with guard.held():
            pass
        threading.Thread(target=take, daemon=True).start()
        assert not has_it.wait(0.05)
    assert has_it.wait(seconds(60))


def test_save_lock_can_be_had_after_an_exception_at_any_line(tmp_path: Path) -> None:
    with Directory(tmp_path) as directory:

        def work() -> None:
            SaveLock(directory, ".dcpx.lock", RunningSave(work)).release(has_ended_well=True)

        assert_free_after_each_line(work, 50)


@pytest.mark.usefixtures("_collector_as_it_was")
def test_pause_of_the_collector_can_be_had_after_an_exception_at_any_line() -> None:
    def work() -> None:
        with _gc.paused_gc():
            len("inner")

    assert_free_after_each_line(work, 10)


@pytest.fixture
def _collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pause that is hit as it begins goes on."""
    monkeypatch.setattr(_gc, "_depth", _gc._depth)
    monkeypatch.setattr(_gc, "_before", _gc._before)
    thresholds = _gc.gc.get_threshold()
    yield
    _gc.gc.set_threshold(*thresholds)
