"""Callbacks of events: when, where and how often they are called, and what they may do."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import os
import signal
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.async_saves import failing_options, gated, no_save_is_left
from support.event_calls import STATE, async_save, listen, target
from support.machine import seconds

import torch_dcpx as dcpx
from torch_dcpx import events

__all__ = ["listen", "no_save_is_left"]
pytestmark = pytest.mark.usefixtures("no_save_is_left")


# ---- Where and when callbacks are called --------------------------------------------------------


def test_thread_is_the_one_where_the_operation_ends(tmp_path: Path, listen: Any) -> None:
    threads: list[str] = []
    listen(lambda _: threads.append(threading.current_thread().name))
    dcpx.save(STATE, tmp_path)
    async_save(tmp_path)
    dcpx.load(target(), tmp_path)
    own = threading.current_thread().name
    assert threads == [own, "dcpx-save", own]


def test_handle_is_done_before_the_callback_and_wait_returns_after_it(
    tmp_path: Path, listen: Any
) -> None:
    handles: list[dcpx.SaveHandle] = []
    is_called, may_go_on = threading.Event(), threading.Event()
    done: list[bool] = []

    def slow(_event: Any) -> None:
        is_called.set()
        assert may_go_on.wait(seconds(60))
        done.append(handles[0].done())

    listen(slow)
    handles.append(dcpx.async_save(STATE, tmp_path))
    assert (
        handles[0].result(seconds(60)) is not None
    )  # a slow callback keeps nobody from the result
    assert is_called.wait(seconds(60))
    with pytest.raises(TimeoutError, match="a callback of the save to"):
        dcpx.wait(0)
    may_go_on.set()
    dcpx.wait()
    assert done == [True]


def test_managers_wait_returns_after_the_callbacks_of_its_saves(
    tmp_path: Path, listen: Any
) -> None:
    may_go_on = threading.Event()
    listen(lambda _: may_go_on.wait(seconds(60)))
    with dcpx.CheckpointManager(tmp_path) as manager:
        manager.save(1, state={"w": torch.ones(2)}).result()
        with pytest.raises(TimeoutError, match="a callback of the save to"):
            manager.wait(0)
        may_go_on.set()


def test_operation_ends_once(listen: Any) -> None:
    found: list[Any] = []
    listen(found.append)
    operation = events.begun("dcpx.save", "a")
    operation.failed(KeyError("first"))
    operation.failed(ValueError("again"))
    assert [type(event.error) for event in found] == [KeyError]


@pytest.mark.parametrize("save", [dcpx.save, lambda *a, **k: async_save(a[1], **k)])
def test_callback_can_save_to_and_load_from_the_same_place(
    tmp_path: Path, listen: Any, save: Any
) -> None:
    """So the save is durable, and its locks are free."""
    calls: list[str] = []

    def again(event: Any) -> None:
        calls.append(event.call)
        if len(calls) == 1:
            loaded = target()
            dcpx.load(loaded, tmp_path)
            assert torch.equal(loaded["w"], STATE["w"])  # type: ignore[arg-type]
            dcpx.save({"w": torch.ones(5)}, tmp_path)
            dcpx.wait()  # in a callback: not for this one
            calls.append("waited")

    listen(again)
    save(STATE, tmp_path)
    assert calls[1:] == ["dcpx.load", "dcpx.save", "waited"]
    assert dcpx.load_tensors(tmp_path)["w"].shape == (5,)


def test_callback_of_a_stock_save_can_use_its_writer(tmp_path: Path, listen: Any) -> None:
    writer, calls = dcpx.DcpxWriter(tmp_path), []

    def again(event: Any) -> None:
        calls.append(event.call)
        if len(calls) == 1:
            dcpx.save({"w": torch.ones(5)}, storage_writer=writer)

    listen(again)
    dcp.save(STATE, storage_writer=writer)
    assert calls == ["dcp.save", "dcpx.save"]
    assert dcpx.load_tensors(tmp_path)["w"].shape == (5,)


def test_callback_runs_in_a_copy_of_the_callers_context(tmp_path: Path, listen: Any) -> None:
    run: contextvars.ContextVar[str] = contextvars.ContextVar("run", default="none")
    seen: list[str] = []

    def note(_event: Any) -> None:
        seen.append(run.get())
        run.set("changed by a callback")

    listen(note)
    gate, options = gated()
    run.set("first")
    handle = dcpx.async_save(STATE, tmp_path, options=options)
    run.set("second")
    gate.open()
    handle.result()
    dcpx.wait()
    dcpx.load(target(), tmp_path)
    assert seen == ["first", "second"]
    assert run.get() == "second"


# ---- Who listens --------------------------------------------------------------------------------


def test_operation_that_began_before_is_not_heard(tmp_path: Path, listen: Any) -> None:
    listen(lambda _: None)
    gate, options = gated()
    handle = dcpx.async_save(STATE, tmp_path, options=options)
    found: list[Any] = []
    listen(found.append)
    gate.open()
    handle.result()
    dcpx.wait()
    assert found == []


def test_callback_is_called_once_for_each_time_it_was_added(tmp_path: Path) -> None:
    found: list[Any] = []
    first, second = dcpx.on_event(found.append), dcpx.on_event(found.append)
    dcpx.save(STATE, tmp_path)
    assert len(found) == 2 and found[0] is found[1]
    first()
    first()
    dcpx.save(STATE, tmp_path)
    assert len(found) == 3
    second()
    dcpx.save(STATE, tmp_path)
    assert len(found) == 3


def test_callback_that_is_removed_meanwhile_is_not_called_and_one_added_waits(
    tmp_path: Path, listen: Any
) -> None:
    calls: list[str] = []

    def first(_event: Any) -> None:
        calls.append("first")
        remove_second()
        listen(lambda _: calls.append("added"))

    listen(first)
    remove_second = listen(lambda _: calls.append("second"))
    dcpx.save(STATE, tmp_path)
    assert calls == ["first"]
    dcpx.save(STATE, tmp_path)
    assert calls == ["first", "first", "added"]


def test_nobody_who_listens_costs_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation is made, no context copied, no staged byte counted."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("nobody listens")

    monkeypatch.setattr(events, "Operation", refuse)
    monkeypatch.setattr("torch_dcpx.checkpoint.background.planned_bytes", refuse)
    monkeypatch.setattr("torch_dcpx.reader.reader.is_in_stock_load", refuse)
    dcpx.save(STATE, tmp_path)
    async_save(tmp_path).result()
    dcp.save(STATE, storage_writer=dcpx.DcpxWriter(tmp_path))
    dcpx.load(target(), tmp_path)
    dcp.load(target(), storage_reader=dcpx.DcpxReader(tmp_path))


def test_forked_child_keeps_the_callbacks_for_its_own_operations(
    tmp_path: Path, listen: Any
) -> None:
    calls: list[str] = []
    listen(lambda event: calls.append(event.path))
    gate, options = gated()
    handle = dcpx.async_save(STATE, tmp_path / "parent", options=options)
    assert gate.reached.wait(seconds(60))
    held, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with events._guard.held():
            held.set()
            assert may_go_on.wait(seconds(60))

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(seconds(60))
    with events.begun("dcpx.load", tmp_path / "parent") as parents:
        child = os.fork()
        if child == 0:
            code = 1
            signal.alarm(math.ceil(seconds(60)))  # a lock that nobody gives back
            try:
                parents.failed(ValueError())  # as the child unwinds the parent's stack
                dcpx.save({"w": torch.ones(3)}, tmp_path / "child")
                dcpx.on_event(print)()  # the lock that the parent holds is another one
                code = 0 if calls == [str(tmp_path / "child")] else 2
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            os._exit(code)
    may_go_on.set()
    holder.join()
    gate.open()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    handle.result()
    dcpx.wait()
    assert calls == [str(tmp_path / "parent")]


# ---- Callbacks that fail ------------------------------------------------------------------------


def test_error_of_a_callback_is_logged_once_a_type_and_changes_nothing(
    tmp_path: Path, listen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    raised = iter([ValueError("one"), ValueError("two"), KeyError("three"), ValueError("four")])
    found: list[Any] = []

    def fail(_event: Any) -> None:
        raise next(raised)

    listen(fail)
    listen(found.append)
    with caplog.at_level(logging.ERROR, "torch_dcpx"):
        dcpx.save(STATE, tmp_path)
        async_save(tmp_path).result()
        dcpx.load(target(), tmp_path)
        with pytest.raises(dcpx.OptionError):
            dcpx.save(STATE)
    assert len(found) == 4  # the other callback is called
    records = [record for record in caplog.records if record.name == "torch_dcpx"]
    assert [record.exc_info[0] for record in records if record.exc_info] == [ValueError, KeyError]
    assert f"a callback of on_event failed behind dcpx.save of '{tmp_path}'" in records[0].message


def test_cancelled_task_in_a_callback_changes_nothing(
    tmp_path: Path, listen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[Any] = []

    def cancelled(_event: Any) -> None:
        raise asyncio.CancelledError  # no Exception, and no interrupt

    listen(cancelled)
    listen(found.append)
    dcpx.save(STATE, tmp_path)
    async_save(tmp_path)
    assert [type(event) for event in found] == [dcpx.SaveEnded] * 2
    assert "a callback of on_event failed behind dcpx.save" in caplog.text


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupt_in_a_callback_passes_behind_the_commit_and_the_others(
    tmp_path: Path, listen: Any, kind: type[BaseException]
) -> None:
    found: list[Any] = []

    def interrupt(event: Any) -> None:
        found.append(event)
        raise kind("first" if len(found) == 1 else "later")

    for callback in (interrupt, found.append, interrupt, found.append):
        listen(callback)
    with pytest.raises(kind, match="first"):
        dcpx.save(STATE, tmp_path)
    assert [type(event) for event in found] == [dcpx.SaveEnded] * 4
    assert dcpx.load_tensors(tmp_path).keys() == {"w"}
    with pytest.raises(kind):
        dcpx.load(target(), tmp_path / "missing")
    assert [type(event) for event in found[4:]] == [dcpx.LoadFailed] * 4


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("has_failed", [False, True])
def test_interrupt_behind_a_background_save_is_logged_and_keeps_no_other_callback(
    tmp_path: Path,
    listen: Any,
    caplog: pytest.LogCaptureFixture,
    kind: type[BaseException],
    has_failed: bool,
) -> None:
    found: list[Any] = []

    def interrupt(_event: Any) -> None:
        raise kind

    listen(interrupt)
    listen(found.append)
    handle = dcpx.async_save(STATE, tmp_path, options=failing_options() if has_failed else None)
    assert (handle.exception() is not None) == has_failed
    dcpx.wait()
    assert [type(event) for event in found] == [dcpx.SaveFailed if has_failed else dcpx.SaveEnded]
    records = [each for each in caplog.records if "a callback of on_event" in each.message]
    assert [each.exc_info[0] for each in records if each.exc_info] == [kind]
