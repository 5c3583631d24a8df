"""Events: each save and load ends with one, whatever way it went."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.async_saves import failing_options, gated, no_save_is_left
from support.event_calls import STATE, async_save, heard, target
from support.machine import seconds
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx.checkpoint.background import BackgroundSave

__all__ = ["heard", "no_save_is_left"]
pytestmark = pytest.mark.usefixtures("no_save_is_left")


# ---- One event for each operation ---------------------------------------------------------------


def test_save_and_load_end_with_their_reports(tmp_path: Path, heard: list[Any]) -> None:
    report = dcpx.save(STATE, tmp_path).result()
    staged = async_save(tmp_path).result()
    loaded = dcpx.load(target(), tmp_path)
    event, of_async, of_load = heard
    assert (type(event), event.call, event.path) == (dcpx.SaveEnded, "dcpx.save", str(tmp_path))
    assert event.report is report and event.write is report.write
    assert event.seconds == report.total_s == report.blocked_s
    assert event.ended_ns == event.began_ns + round(report.total_s * 1e9)
    assert (event.staged_bytes, of_async.staged_bytes) == (0, 4000)
    assert (type(of_async), of_async.call) == (dcpx.SaveEnded, "dcpx.async_save")
    assert of_async.report is staged and of_async.write is staged.write
    assert (type(of_load), of_load.call) == (dcpx.LoadEnded, "dcpx.load")
    assert of_load.path == str(tmp_path) and of_load.seconds == loaded.total_s
    assert of_load.report is loaded and of_load.read is loaded.read


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


class Unreadable:
    """Raises where a path is read from it: as an argument, and of a plug-in."""

    def __fspath__(self) -> str:
        raise ValueError("no path")

    @property
    def path(self) -> str:
        raise ValueError("no path")


def test_argument_without_a_readable_path_fails_as_without_listeners(heard: list[Any]) -> None:
    # The call raises behind the exchange, where the other ranks learn of it.
    wrong: Any = Unreadable()
    for call in (dcpx.save, dcpx.async_save, dcpx.load):
        with pytest.raises(ValueError, match="no path"):
            call(target(), wrong, no_dist=True)
    with pytest.raises(dcpx.OptionError, match="storage_writer"):
        dcpx.save(STATE, storage_writer=wrong, no_dist=True)
    calls = ["dcpx.save", "dcpx.async_save", "dcpx.load", "dcpx.save"]
    assert [(event.call, event.path) for event in heard] == [(call, "") for call in calls]


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
    assert gate.reached.wait(seconds(60))
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
            assert gate.reached.wait(seconds(60))
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
