"""Events: each save and load ends with one, whatever way it went and whoever listens."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.async_saves import failing_options, gated, no_save_is_left
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx import events
from torch_dcpx.checkpoint.background import BackgroundSave

__all__ = ["no_save_is_left"]
pytestmark = pytest.mark.usefixtures("no_save_is_left")

STATE = {"w": torch.arange(1000.0), "step": 3}


@pytest.fixture
def heard() -> Iterator[list[Any]]:
    """Returns the list of the events from now on."""
    found: list[Any] = []
    remove = dcpx.on_event(found.append)
    yield found
    remove()


@pytest.fixture
def listen() -> Iterator[Callable[..., Callable[[], None]]]:
    """Returns `on_event`; the callbacks go with the test."""
    removes: list[Callable[[], None]] = []

    def added(callback: Any) -> Callable[[], None]:
        removes.append(dcpx.on_event(callback))
        return removes[-1]

    yield added
    for remove in removes:
        remove()


def target() -> dict[str, Any]:
    return {"w": torch.zeros(1000), "step": 0}


def async_save(path: Path, **options: Any) -> Any:
    handle = dcpx.async_save(STATE, path, **options)
    handle.exception()
    dcpx.wait()
    return handle


# ---- One event for each operation ---------------------------------------------------------------


def test_save_ends_with_its_report(tmp_path: Path, heard: list[Any]) -> None:
    report = dcpx.save(STATE, tmp_path).result()
    (event,) = heard
    assert type(event) is dcpx.SaveEnded
    assert (event.call, event.path) == ("dcpx.save", str(tmp_path))
    assert event.report is report and event.write is report.write
    assert event.seconds == report.total_s == report.blocked_s
    assert event.ended_ns == event.began_ns + round(report.total_s * 1e9)
    assert event.staged_bytes == 0


def test_async_save_ends_with_its_report_and_what_it_staged(
    tmp_path: Path, heard: list[Any]
) -> None:
    report = async_save(tmp_path).result()
    (event,) = heard
    assert (type(event), event.call) == (dcpx.SaveEnded, "dcpx.async_save")
    assert event.report is report and event.write is report.write
    assert event.staged_bytes == 4000


def test_load_ends_with_its_report(tmp_path: Path, heard: list[Any]) -> None:
    dcpx.save(STATE, tmp_path)
    report = dcpx.load(target(), tmp_path)
    event = heard[1]
    assert (type(event), event.call, event.path) == (dcpx.LoadEnded, "dcpx.load", str(tmp_path))
    assert event.report is report and event.read is report.read
    assert event.seconds == report.total_s


def test_load_pretrained_ends_with_its_report(tmp_path: Path, heard: list[Any]) -> None:
    model = nn.Linear(2, 2)
    dcpx.save(model.state_dict(), tmp_path)
    report = dcpx.load_pretrained(model, tmp_path)
    with pytest.raises(dcpx.OptionError):
        dcpx.load_pretrained(model, tmp_path, strict="yes")  # type: ignore[arg-type]
    assert [type(event) for event in heard] == [dcpx.SaveEnded, dcpx.LoadEnded, dcpx.LoadFailed]
    assert {event.call for event in heard[1:]} == {"dcpx.load_pretrained"}
    assert heard[1].report is report


def test_stock_calls_end_with_the_reports_of_writer_and_reader(
    tmp_path: Path, heard: list[Any]
) -> None:
    writer, reader = dcpx.DcpxWriter(tmp_path), dcpx.DcpxReader(tmp_path)
    dcp.save(STATE, storage_writer=writer)
    dcp.load(target(), storage_reader=reader)
    saved, loaded = heard
    assert (type(saved), saved.call, saved.path) == (dcpx.SaveEnded, "dcp.save", str(tmp_path))
    assert saved.report is None and saved.write is writer.last_report
    assert saved.seconds >= saved.write.total_s
    assert (type(loaded), loaded.call, loaded.path) == (dcpx.LoadEnded, "dcp.load", str(tmp_path))
    assert loaded.report is None and loaded.read is reader.last_report


def test_hooked_and_asynchronous_stock_calls_have_one_event(
    tmp_path: Path, heard: list[Any]
) -> None:
    with dcpx.use():
        dcp.save(STATE, checkpoint_id=tmp_path / "a")
        dcp.async_save(STATE, checkpoint_id=tmp_path / "b").result()  # type: ignore[union-attr]
        dcp.load(target(), checkpoint_id=tmp_path / "b")
    assert [event.call for event in heard] == ["dcp.save", "dcp.save", "dcp.load"]


def test_subclass_of_the_reader_and_writer_has_one_event(tmp_path: Path, heard: list[Any]) -> None:
    class Reader(dcpx.DcpxReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return super().read_metadata(*args, **kwargs)

    class Writer(dcpx.DcpxWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, results)

    for _ in range(2):  # both can be used again
        dcp.save(STATE, storage_writer=Writer(tmp_path))
        dcp.load(target(), storage_reader=Reader(tmp_path))
        dcpx.save(STATE, storage_writer=Writer(tmp_path))
        dcpx.load(target(), storage_reader=Reader(tmp_path))
    wanted = ["dcp.save", "dcp.load", "dcpx.save", "dcpx.load"]
    assert [event.call for event in heard] == 2 * wanted


def test_look_at_a_checkpoint_is_no_load(tmp_path: Path, heard: list[Any]) -> None:
    dcpx.save(STATE, tmp_path)
    dcpx.DcpxReader(tmp_path).read_metadata()
    dcpx.load_tensors(tmp_path, ["w"])
    assert dcpx.verify(tmp_path).ok
    dcpx.export(tmp_path, tmp_path / "out.pt", format="torch")  # with objects
    assert [event.call for event in heard] == ["dcpx.save"]


def test_manager_has_one_event_for_each_save_and_resume(tmp_path: Path, heard: list[Any]) -> None:
    with dcpx.CheckpointManager(tmp_path) as manager:
        manager.save(1, state={"w": torch.ones(2)}).result()
        manager.resume(state={"w": torch.zeros(2)})
        manager.save(2, state={"w": torch.ones(2)})
    # `close` returned after the callback.
    assert sorted(event.call for event in heard) == ["dcpx.async_save"] * 2 + ["dcpx.load"]
    first, second = tmp_path / "step-1", tmp_path / "step-2"
    assert [event.path for event in heard] == [str(first), str(first), str(second)]


def test_managers_calls_that_fail_before_they_save_or_load_have_failed(
    tmp_path: Path, heard: list[Any]
) -> None:
    with dcpx.CheckpointManager(tmp_path) as manager:
        with pytest.raises(dcpx.OptionError):
            manager.save(1)
        with pytest.raises(dcpx.NotCommittedError):
            manager.resume(state={"w": torch.zeros(2)}, tag=1)
    assert [type(event) for event in heard] == [dcpx.SaveFailed, dcpx.LoadFailed]
    assert {event.path for event in heard} == {str(tmp_path)}


# ---- Failures -----------------------------------------------------------------------------------


def test_failed_calls_end_with_their_error(tmp_path: Path, heard: list[Any]) -> None:
    failing = failing_options()
    with pytest.raises(dcpx.StorageError) as save_error:
        dcpx.save(STATE, tmp_path, options=failing)
    handle = async_save(tmp_path, options=failing)
    with pytest.raises(dcpx.NotCommittedError) as load_error:
        dcpx.load(target(), tmp_path)
    with pytest.raises(dcpx.OptionError) as option_error:
        dcpx.save(STATE)
    errors = [save_error.value, handle.exception(), load_error.value, option_error.value]
    assert [event.error for event in heard] == errors
    assert [type(event) for event in heard] == [
        dcpx.SaveFailed, dcpx.SaveFailed, dcpx.LoadFailed, dcpx.SaveFailed
    ]  # fmt: skip
    assert [event.path for event in heard] == 3 * [str(tmp_path)] + [""]


def test_state_that_does_not_fit_is_a_failed_load(tmp_path: Path, heard: list[Any]) -> None:
    dcpx.save(STATE, tmp_path)
    with pytest.raises(dcpx.MismatchError) as error:
        dcpx.load({"other": torch.zeros(1)}, tmp_path)
    assert (type(heard[1]), heard[1].error) == (dcpx.LoadFailed, error.value)
    assert len(heard) == 2


@pytest.mark.parametrize("point", ["metadata", "plan", "data"])
def test_failed_stock_load_ends_with_the_readers_error(
    tmp_path: Path, heard: list[Any], point: str
) -> None:
    dcpx.save(STATE, tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    if point == "metadata":
        (tmp_path / ".metadata").write_bytes(b"damaged")
    elif point == "plan":
        data.unlink()
    else:
        stored = bytearray(data.read_bytes())
        stored[stored.index(torch.arange(1000.0).numpy().tobytes()[:64]) + 8] ^= 1
        data.write_bytes(stored)
    with pytest.raises(dcp.CheckpointException) as error:  # type: ignore[attr-defined]
        dcp.load(target(), storage_reader=dcpx.DcpxReader(tmp_path))
    (failure,) = error.value.failures.values()
    assert [type(event) for event in heard] == [dcpx.SaveEnded, dcpx.LoadFailed]
    assert heard[1].error is failure[0]
    assert heard[1].call == "dcp.load"


def test_failed_stock_save_ends_with_the_writers_error(tmp_path: Path, heard: list[Any]) -> None:
    writer = dcpx.DcpxWriter(tmp_path, options=failing_options())
    with pytest.raises(dcp.CheckpointException):  # type: ignore[attr-defined]
        dcp.save(STATE, storage_writer=writer)
    (event,) = heard
    assert (type(event), event.call) == (dcpx.SaveFailed, "dcp.save")
    assert isinstance(event.error, dcpx.StorageError)


def test_cancelled_save_has_failed(tmp_path: Path, heard: list[Any]) -> None:
    gate, options = gated()
    handle = dcpx.async_save(STATE, tmp_path, options=options)
    assert gate.reached.wait(60)
    assert handle.cancel()
    gate.open()
    error = handle.exception()
    dcpx.wait()
    assert [event.error for event in heard] == [error]


@pytest.mark.parametrize("is_started", [False, True])
def test_save_that_its_caller_leaves_has_one_event(
    tmp_path: Path, heard: list[Any], monkeypatch: pytest.MonkeyPatch, is_started: bool
) -> None:
    """Ctrl-C, before and after the thread has taken the work."""
    gate, options = gated()

    def interrupted(background: BackgroundSave) -> None:
        if is_started:
            assert gate.reached.wait(60)
        raise KeyboardInterrupt

    if not is_started:
        monkeypatch.setattr(BackgroundSave, "start", interrupted)
    monkeypatch.setattr(BackgroundSave, "wait_until_staged", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dcpx.async_save(STATE, tmp_path, options=options)
    gate.open()
    with pytest.raises(dcpx.DcpxError) if is_started else contextlib.nullcontext():
        dcpx.wait()
    (event,) = heard
    assert isinstance(event.error, dcpx.DcpxError if is_started else KeyboardInterrupt)


def test_skipped_save_has_no_event_and_a_refused_one_has_failed(
    tmp_path: Path, heard: list[Any]
) -> None:
    gate, options = gated()
    handle = dcpx.async_save(STATE, tmp_path / "a", options=options)
    skip, refuse = (dcpx.WriteOptions(on_busy=how) for how in ("skip", "error"))  # type: ignore[arg-type]
    assert dcpx.async_save(STATE, tmp_path / "b", options=skip).result() is None
    with pytest.raises(dcpx.ConcurrentSaveError):
        dcpx.async_save(STATE, tmp_path / "c", options=refuse)
    gate.open()
    handle.result()
    dcpx.wait()
    assert [type(event) for event in heard] == [dcpx.SaveFailed, dcpx.SaveEnded]
    assert isinstance(heard[0].error, dcpx.ConcurrentSaveError)


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
        assert may_go_on.wait(60)
        done.append(handles[0].done())

    listen(slow)
    handles.append(dcpx.async_save(STATE, tmp_path))
    assert handles[0].result(60) is not None  # a slow callback keeps nobody from the result
    assert is_called.wait(60)
    with pytest.raises(TimeoutError, match="a callback of the save to"):
        dcpx.wait(0)
    may_go_on.set()
    dcpx.wait()
    assert done == [True]


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

    listen(again)
    save(STATE, tmp_path)
    assert calls[1:] == ["dcpx.load", "dcpx.save"]
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
    assert gate.reached.wait(60)
    with events._guard.held(), events.begun("dcpx.load", tmp_path / "parent") as parents:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                parents.failed(ValueError())  # as the child unwinds the parent's stack
                dcpx.save({"w": torch.ones(3)}, tmp_path / "child")
                dcpx.on_event(print)()  # the lock that the parent holds is another one
                code = 0 if calls == [str(tmp_path / "child")] else 2
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            os._exit(code)
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
    assert records[0].message == (
        f"a callback of on_event failed behind dcpx.save of '{tmp_path}', which is as it was "
        "without; its next errors of this type are not logged"
    )


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupt_in_a_callback_passes_behind_the_commit(
    tmp_path: Path, listen: Any, kind: type[BaseException]
) -> None:
    found: list[Any] = []

    def interrupt(event: Any) -> None:
        found.append(event)
        raise kind

    listen(interrupt)
    with pytest.raises(kind):
        dcpx.save(STATE, tmp_path)
    assert [type(event) for event in found] == [dcpx.SaveEnded]
    assert dcpx.load_tensors(tmp_path).keys() == {"w"}
