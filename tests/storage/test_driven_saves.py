"""Saves that somebody drives: they end when they are told to, whatever their threads do."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from torch_dcpx import ConcurrentSaveError, DcpxWriter, StorageError
from torch_dcpx.checkpoint.save_run import abandon_save
from torch_dcpx.metadata.file import committed_save_id
from torch_dcpx.storage.running_save import RunningSave, driven

STATE = {"w": torch.arange(100.0)}


def begin(writer: DcpxWriter) -> tuple[RunningSave, SavePlan, DefaultSavePlanner]:
    """Plans a save of STATE, as a driver does."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(STATE, is_coordinator=True)
    with driven() as begun:
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    plans = [writer.prepare_local_plan(planner.create_local_plan())]
    plans, metadata = planner.create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    begun[0].metadata = metadata  # type: ignore[attr-defined]
    return begun[0], planner.finish_plan(plans[0]), planner


def test_driven_save_goes_on_in_another_thread_and_commits_under_its_id(tmp_path: Path) -> None:
    writer = DcpxWriter(tmp_path)
    save, plan, planner = begin(writer)

    def finish() -> None:
        results = writer.write_data(plan, planner).value()
        writer.finish(save.metadata, [results])  # type: ignore[attr-defined]

    thread = threading.Thread(target=finish)
    thread.start()
    thread.join()
    assert committed_save_id(tmp_path) == save.save_id
    assert not save.is_under_way()


def test_driven_save_keeps_its_writer_and_its_directory_until_it_is_abandoned(
    tmp_path: Path,
) -> None:
    writer = DcpxWriter(tmp_path)
    save, plan, planner = begin(writer)
    writer.write_data(plan, planner)
    with pytest.raises(ConcurrentSaveError, match="writer in use"):
        writer.reset()
    with pytest.raises(ConcurrentSaveError, match="another save is writing"):
        begin(DcpxWriter(tmp_path))
    abandon_save(writer, save, removes_files=True)
    assert not save.is_under_way()
    assert not list(tmp_path.glob("*.distcp"))
    following, *_ = begin(writer)
    abandon_save(writer, save, removes_files=True)
    assert following.is_under_way()
    abandon_save(writer, following, removes_files=True)


def test_abandoned_save_that_may_yet_be_published_keeps_its_files(tmp_path: Path) -> None:
    writer = DcpxWriter(tmp_path)
    save, plan, planner = begin(writer)
    writer.write_data(plan, planner)
    abandon_save(writer, save, removes_files=False)
    assert len(list(tmp_path.glob("*.distcp"))) == 1


def test_stopped_save_fails_while_it_writes_and_leaves_nothing(tmp_path: Path) -> None:
    writer = DcpxWriter(tmp_path)
    save, plan, planner = begin(writer)
    save.stop()
    with pytest.raises(StorageError, match="cancelled"):
        writer.write_data(plan, planner)
    assert not list(tmp_path.glob("*.distcp"))
    assert not save.is_under_way()


def test_save_that_another_rank_has_ended_fails_while_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended() -> None:
        raise StorageError("rank 1 (here), writing: no room")

    monkeypatch.setattr("torch_dcpx.storage.running_save._CHECK_S", 0.0)
    writer = DcpxWriter(tmp_path)
    save, plan, planner = begin(writer)
    save.check = ended
    with pytest.raises(StorageError, match="rank 1"):
        writer.write_data(plan, planner)
    assert not list(tmp_path.glob("*.distcp"))


def test_save_outside_of_driven_ends_as_before_when_its_thread_asks(tmp_path: Path) -> None:
    writer = DcpxWriter(tmp_path)
    save, *_ = begin(writer)
    abandon_save(writer, save, removes_files=True)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    writer.reset()


def test_directory_without_a_trailer_says_no_save_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert committed_save_id(tmp_path) is None
    (tmp_path / ".metadata").write_bytes(b"\x80\x04N.")
    assert committed_save_id(tmp_path) is None
    assert not caplog.records
    writer = DcpxWriter(tmp_path / "checkpoint")
    save, plan, planner = begin(writer)
    results = writer.write_data(plan, planner).value()
    writer.finish(save.metadata, [results])  # type: ignore[attr-defined]
    path = tmp_path / "checkpoint" / ".metadata"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    assert committed_save_id(tmp_path / "checkpoint") is None
    assert "cannot be said" in caplog.text
