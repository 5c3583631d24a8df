"""A signal's handler that calls a manager, at any line of that manager's own work: nothing waits
for itself, and what each call has returned for is whole."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from root_jobs import alarm
from support.machine import EVERY_POINT, seconds
from trainings import Log, manager_of

from torch_dcpx import CheckpointManager, ConcurrentSaveError, DcpxError
from torch_dcpx._waiting import Guard
from torch_dcpx.storage import save_lock

_MANAGERS = ("root", "retention", "save", "removal", "directory_root")
WATCHED = (
    *(f"manager/{name}.py" for name in _MANAGERS),
    *("storage/root_lock.py", "storage/root_record.py", "storage/save_lock.py"),
)


def save(manager: CheckpointManager, tag: int | str, value: float) -> None:
    manager.save(tag, step=int(value), state={"x": torch.full((8,), value)})


def run_with_calls(work: Callable[[], None], at: int, call: Callable[[], None]) -> bool:
    """Runs work with one call at its line number `at`, as a handler comes; False: it has fewer."""
    left = at

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(WATCHED):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                call()
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return left <= 0


CALLS: dict[str, Callable[[CheckpointManager], object]] = {
    "another tag": lambda manager: save(manager, "last", 8.0),
    "a tag on its way out": lambda manager: save(manager, "step-1", 1.0),
    "wait": lambda manager: (save(manager, "last", 8.0), manager.wait()),
    "others": lambda manager: (manager.latest(), manager.tags(), manager.pin(3), manager.unpin(3)),
    "resume": lambda manager: manager.resume(state={"x": torch.zeros(8)}),
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.timeout(3000)
def test_call_within_a_save_ends(tmp_path: Path, what: str, seed: int) -> None:
    """The first save of a job that removes what another one has left, interrupted line by line."""
    step = 1 if EVERY_POINT else 401
    with manager_of(tmp_path / "before") as manager:
        for number in (1, 2, 3):
            save(manager, number, float(number))
    for at in range(1 + seed % step, 100_000, step):
        root = tmp_path / str(at)
        shutil.copytree(tmp_path / "before", root)
        manager = manager_of(root, keep_last=1)
        told: list[str] = []

        def call(manager: CheckpointManager = manager, told: list[str] = told) -> None:
            try:
                CALLS[what](manager)
                told.append("done")
            except DcpxError as error:
                told.append(f"{type(error).__name__}: {error}")

        with alarm():
            is_in = run_with_calls(lambda m=manager: save(m, 9, 9.0), at, call)  # type: ignore[misc]
            manager.wait()
            manager.close()
        if not is_in:
            assert not told
            break
        (answer,) = told
        texts = ("done", "signal's handler", "another save", "there is no checkpoint")
        assert any(text in answer for text in texts), answer  # the last: step-3 has gone
        after = manager_of(root)
        state = {"x": torch.zeros(8)}
        found = after.resume(state=state)
        assert state["x"].tolist() == [float(found.step or 0)] * 8
        saved = {"last", "step-1"} if what.startswith(("another", "a tag", "wait")) else set()
        assert found.tag == "step-9" or (answer == "done" and found.tag in saved), (at, found, told)
    else:
        raise AssertionError("the save has no end")


@pytest.fixture
def three(tmp_path: Path) -> CheckpointManager:
    """A manager that removes all but the last, where another job has left three."""
    with manager_of(tmp_path) as manager:
        for number in (1, 2, 3):
            save(manager, number, float(number))
    return manager_of(tmp_path, keep_last=1)


def test_save_within_a_removal_that_has_chosen_its_tag_stays(three: CheckpointManager) -> None:
    forget, told = three._root.forget, list[str]()

    def forgets(tag: str) -> None:
        if not told and sys._getframe(1).f_code.co_name == "_remove_condemned":
            told.append("in")
            save(three, "step-1", 5.0)  # as a signal's handler at this line
        forget(tag)

    three._root.forget = forgets  # type: ignore[method-assign]
    save(three, 9, 9.0)
    three.close()
    state = {"x": torch.zeros(8)}
    assert manager_of(Path(three._root.path)).resume(state=state).tag == "step-1"
    assert told and state["x"].tolist() == [5.0] * 8


def test_save_to_what_the_interrupted_call_removes_is_refused(three: CheckpointManager) -> None:
    """Else the removal would take the new checkpoint for the old one."""
    remove, told = three._root.remove, list[str]()

    def interrupted(tag: str) -> None:
        if not told:
            with pytest.raises(ConcurrentSaveError, match="signal's handler has inter") as caught:
                save(three, "step-2", 2.0)
            told.append(str(caught.value))
        remove(tag)

    three._root.remove = interrupted  # type: ignore[method-assign]
    with alarm():
        save(three, 4, 4.0)
        three.wait()
    assert len(told) == 1
    assert three.tags() == ["step-4"]


def test_wait_for_another_thread_has_a_deadline(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    save(manager, 1, 1.0)
    manager.wait()
    root = manager._root
    root.patience_s = 0.05
    entered, ended = threading.Event(), threading.Event()

    def hold(block: Any) -> None:
        with block:
            entered.set()
            ended.wait(seconds(60))

    for block, what in (
        (root.one_commit("x"), "a commit beneath"),
        (manager._retention._one_run("x"), "a removal of old checkpoints"),
        (root._own(), "a note of the newest one"),
    ):
        entered.clear()
        ended.clear()
        thread = threading.Thread(target=hold, args=(block,))
        thread.start()
        assert entered.wait(seconds(60))
        with alarm(), pytest.raises(ConcurrentSaveError, match=f"{what}.*has not ended within"):
            save(manager, "step-1", 1.0)
        ended.set()
        thread.join()
    save(manager, 2, 2.0)


def test_wait_of_a_manager_ends_where_a_removal_hangs(tmp_path: Path, caplog: Log) -> None:
    manager = manager_of(tmp_path, keep_last=1)
    hangs, ended = threading.Event(), threading.Event()
    save(manager, 1, 1.0)
    manager.wait()

    def tidy(*_: Any, **__: Any) -> None:
        hangs.set()
        ended.wait(seconds(120))

    manager._root.files.tidy = tidy  # type: ignore[method-assign]
    save(manager, 2, 2.0)
    assert hangs.wait(seconds(60))
    with alarm(), pytest.raises(TimeoutError, match="are still being removed"):
        manager.wait(0.05)
    manager._root.patience_s = 0.05
    with alarm(), pytest.raises(ConcurrentSaveError, match="are still being removed"):
        save(manager, 3, 3.0)
    with alarm():
        manager.wait()  # all is committed: this is only logged
    assert "are still being removed: the next commit goes on with it" in caplog.text
    manager._root.patience_s = seconds(60)
    ended.set()
    manager.wait()
    save(manager, 3, 3.0)


def test_save_goes_through_where_a_removal_waits_for_its_thread(tmp_path: Path) -> None:
    """A signal's handler that has interrupted the taking of a save's lock."""
    manager = manager_of(tmp_path, keep_last=1)
    retention = manager._retention
    start = retention.start
    save(manager, 1, 1.0)
    manager.wait()
    retention.start = lambda: None  # type: ignore[method-assign]
    save(manager, 2, 2.0)
    with alarm(), save_lock._guard.held():
        start()
        while not retention._going:
            time.sleep(0.01)
        with pytest.raises(ConcurrentSaveError, match="signal's handler has interrupted"):
            save(manager, 1, 1.0)
        save(manager, 9, 9.0)
        save(manager, 9, 9.0)
        manager.wait()
        assert manager.latest() == "step-9"
        assert retention._going
    manager.wait()
    assert manager.tags() == ["step-2", "step-9"]


class _InterruptedHandler(logging.Handler):
    """Calls a function within its lock, at the first line of the main thread."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._calls = [call]
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() is threading.main_thread() and self._calls:
            self._calls.pop()()
        self.told.append(record.getMessage())


@pytest.mark.parametrize("keep_last", [None, 1])
def test_save_within_a_logging_handler_goes_through(tmp_path: Path, keep_last: int | None) -> None:
    """The save in the background, and removals, have lines for that handler."""
    manager = manager_of(tmp_path, async_save=True, keep_last=keep_last)
    for number in (1, 2):
        save(manager, number, float(number))
    manager.wait()

    def call() -> None:
        save(manager, 9, 9.0)
        manager.wait()

    handler = _InterruptedHandler(call)
    logger = logging.getLogger("torch_dcpx")
    level = logger.level
    logger.setLevel(logging.INFO)
    logging.getLogger().addHandler(handler)
    try:
        save(manager, 3, 3.0)
        with alarm():
            logging.getLogger("of the user").warning("a line")
        assert manager.latest() is not None
        assert (manager.tags() == ["step-9"]) == (keep_last == 1)
        until = time.monotonic() + seconds(60)
        while not any("saved step 9" in line for line in handler.told):
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        logging.getLogger().removeHandler(handler)
        logger.setLevel(level)
        manager.close()


def test_guard_is_free_behind_a_deadline_and_within_itself() -> None:
    guard = Guard()
    with guard.held(1.0), guard.held(0.0):
        assert guard.is_own
    assert not guard.is_own
    failed: list[BaseException] = []

    def take() -> None:
        try:
            with guard.held(0.0, "do it", "the other"):
                pass
        except ConcurrentSaveError as error:
            failed.append(error)

    with guard.held():
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    assert len(failed) == 1
    assert str(failed[0]).startswith("do it: the other has not ended within 0 s")
    take()
    assert len(failed) == 1
