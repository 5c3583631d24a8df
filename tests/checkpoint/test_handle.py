"""SaveHandle: one type for every save, and a save's end as futures and asyncio tell it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import RunPython
from support.async_saves import assert_saved, failing_options, gated, no_save_is_left, state_of
from support.machine import seconds

from torch_dcpx import (
    OptionError,
    SaveHandle,
    StorageError,
    WriteOptions,
    async_save,
    save,
)
from torch_dcpx import wait as wait_for_all
from torch_dcpx.checkpoint.handle import WatchedFuture

__all__ = ["no_save_is_left"]
pytestmark = pytest.mark.usefixtures("no_save_is_left")


# ---- add_done_callback ---------------------------------------------------------------------------


def test_callbacks_come_once_in_order_behind_the_end(tmp_path: Path) -> None:
    gate, options = gated()
    handle = async_save(state_of(1), tmp_path, options=options)
    calls: list[Any] = []
    called = threading.Event()
    handle.add_done_callback(lambda ended: calls.append((ended, ended.done())))
    handle.add_done_callback(lambda _: calls.append(threading.current_thread().name))
    handle.add_done_callback(lambda _: called.set())
    assert calls == []
    gate.open()
    assert called.wait(seconds(60))
    assert calls == [(handle, True), "dcpx-save"]
    handle.add_done_callback(lambda _: calls.append(threading.current_thread()))
    assert calls[2:] == [threading.current_thread()]


def test_callback_that_is_no_function_is_refused(tmp_path: Path) -> None:
    handle = save(state_of(1), tmp_path)
    for value in (None, "print", 3):
        with pytest.raises(OptionError, match=r"^fn must be a function, got "):
            handle.add_done_callback(value)  # type: ignore[arg-type]


def test_errors_of_callbacks_are_logged_and_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate, options = gated()
    handle = async_save(state_of(1), tmp_path, options=options)
    errors = [ValueError("my own"), SystemExit()]
    called = [threading.Event(), threading.Event()]

    def failing(error: BaseException) -> Callable[[Any], None]:
        def fail(_ended: Any) -> None:
            raise error

        return fail

    futures: list[Any] = [handle, handle.durable]
    for future, event in zip(futures, called, strict=True):
        for error in errors:
            future.add_done_callback(failing(error))
        future.add_done_callback(lambda _, event=event: event.set())
    gate.open()
    assert all(event.wait(seconds(60)) for event in called)
    assert handle.exception() is None
    records = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert len(records) == 4
    for record in records:
        assert record.name == "torch_dcpx" and str(tmp_path) in record.getMessage()
        assert record.exc_info is not None and record.exc_info[1] in errors


def test_exit_in_a_callback_of_the_staged_copies_keeps_no_other_from_its_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They end on the save's thread, which would not save."""
    handle = SaveHandle("a path", lambda: False, lambda _: None)
    calls: list[Any] = []

    def leave(_ended: Any) -> None:
        raise SystemExit

    handle.staged.add_done_callback(leave)
    handle.staged.add_done_callback(calls.append)
    thread = threading.Thread(target=lambda: calls.append(handle.staged.set_result(None)))
    thread.start()
    thread.join(seconds(60))
    assert calls == [handle.staged, None]
    assert "a done callback of the save to 'a path' failed" in caplog.text


def test_error_of_a_callback_of_an_ended_save_is_logged_and_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handle = save(state_of(1), tmp_path)

    def fail(_ended: SaveHandle) -> None:
        raise ValueError("my own")

    handle.add_done_callback(fail)
    assert ["my own" in (each.exc_text or "") for each in caplog.records].count(True) == 1

    def stop(_ended: SaveHandle) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # on the main thread it is the user's
        handle.add_done_callback(stop)


EXIT = """
import threading, torch, torch_dcpx
from concurrent.futures import wait
reached = threading.Event()
join = threading.Thread.join
def joined(self, timeout=None):
    if self.name == "dcpx-save":
        reached.set()
    join(self, timeout)
threading.Thread.join = joined
def callback(handle):
    assert reached.wait(600)
    print("called", handle.result().ranks)
handle = torch_dcpx.async_save({"w": torch.zeros(3)}, "ckpt", no_dist=True)
handle.add_done_callback(callback)
wait([handle.durable])
"""


def test_the_end_of_the_interpreter_waits_for_callbacks(run_warm: RunPython) -> None:
    assert run_warm(EXIT).stdout == "called 1\n"


# ---- await ---------------------------------------------------------------------------------------


def test_await_returns_the_report_and_does_not_block_the_loop(tmp_path: Path) -> None:
    state, (gate, options) = state_of(1), gated()
    handle = async_save(state, tmp_path, options=options)

    async def main() -> Any:
        both = asyncio.gather(handle, handle)  # type: ignore[call-overload]
        await asyncio.sleep(0)
        assert not both.done()
        gate.open()  # by the loop itself: a blocked one would never come here
        return await both

    assert asyncio.run(main()) == [handle.result(0)] * 2
    assert_saved(tmp_path, state)

    async def again() -> Any:
        return await handle  # of a finished save

    assert asyncio.run(again()) is handle.result(0)


def test_await_in_two_loops_of_two_threads(tmp_path: Path) -> None:
    gate, options = gated()
    handle = async_save(state_of(1), tmp_path, options=options)
    waiting = threading.Barrier(3)
    found: list[Any] = []

    async def main() -> None:
        task = asyncio.ensure_future(handle)
        await asyncio.sleep(0)
        waiting.wait(seconds(60))
        found.append(await task)

    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(2)]
    for thread in threads:
        thread.start()
    waiting.wait(seconds(60))
    gate.open()
    for thread in threads:
        thread.join(seconds(60))
    assert found == [handle.result(0)] * 2


def test_await_raises_the_error_of_the_save_and_collects_it(tmp_path: Path) -> None:
    handle = async_save(state_of(1), tmp_path, options=failing_options())

    async def main() -> None:
        await handle

    with pytest.raises(StorageError):
        asyncio.run(main())
    wait_for_all(60)


def test_an_await_that_is_given_up_leaves_the_save_under_way(tmp_path: Path) -> None:
    state, (gate, options) = state_of(1), gated()
    handle = async_save(state, tmp_path, options=options)

    async def main() -> None:
        task = asyncio.ensure_future(handle)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not handle.done()
    gate.open()
    handle.result(seconds(60))
    assert_saved(tmp_path, state)


# ---- repr ----------------------------------------------------------------------------------------


def test_repr_says_how_far_the_save_is(tmp_path: Path) -> None:
    gate, options = gated(on_busy="skip")
    handle = async_save(state_of(1), tmp_path / "a", options=options)
    assert repr(handle) == f"<SaveHandle of '{tmp_path / 'a'}': writing>"
    skipped = async_save(state_of(1), tmp_path / "b", options=WriteOptions(on_busy="skip"))
    assert repr(skipped) == f"<SaveHandle of '{tmp_path / 'b'}': skipped>"
    gate.open()
    handle.result(seconds(60))
    assert repr(handle).startswith(f"<SaveHandle of '{tmp_path / 'a'}': saved, 2.")
    assert " by 1 rank in " in repr(handle)


def test_wait_that_timed_out_has_read_no_error() -> None:
    future: WatchedFuture[None] = WatchedFuture("place")
    for wait in (future.exception, future.result):
        with pytest.raises(concurrent.futures.TimeoutError):
            wait(0.001)
    future.set_exception(StorageError("no room"))
    assert future.has_uncollected_error
    assert isinstance(future.exception(0), StorageError)
    assert not future.has_uncollected_error


def test_repr_of_a_failed_save_names_the_error_and_leaves_it_uncollected(tmp_path: Path) -> None:
    handle = async_save(state_of(1), tmp_path, options=failing_options())
    called = threading.Event()
    handle.add_done_callback(lambda _: called.set())
    assert called.wait(seconds(60))
    assert repr(handle) == f"<SaveHandle of '{tmp_path}': failed, StorageError: no room>"
    with pytest.raises(StorageError, match="no room"):
        wait_for_all(60)
    wait_for_all(60)  # once
