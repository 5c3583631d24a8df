"""Whoever reads a manager's checkpoint keeps it from retention, and leaves nothing in others."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from trainings import Log, Patch, manager_of, on_disk, save_steps, warnings_of

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager, ConcurrentSaveError, DcpxReader
from torch_dcpx.storage.names import READERS_NAME
from torch_dcpx.storage.reader_lock import ReadersHold, being_deleted, being_read
from torch_dcpx.views import inspect as views_inspect


class Planner(dcpx.DcpxLoadPlanner):
    """Calls something while the load plans."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def create_local_plan(self) -> Any:
        self.meanwhile()
        return super().create_local_plan()


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    manager = manager_of(tmp_path, keep_last=1)
    save_steps(manager, 1)
    return manager


def goes_on(manager: CheckpointManager) -> list[str]:
    """Saves the next step. Returns what is left."""
    save_steps(manager, 1 + max(int(tag.removeprefix("step-")) for tag in manager.tags()))
    return manager.tags()


@pytest.mark.parametrize("is_given_planner", [False, True])
def test_dcp_load_keeps_what_it_reads_from_deletion(
    tmp_path: Path, manager: CheckpointManager, is_given_planner: bool
) -> None:
    seen: list[list[str]] = []
    reader = DcpxReader(tmp_path / "step-1")
    if is_given_planner:
        planner: Any = Planner(lambda: seen.append(goes_on(manager)))
    else:
        real = reader.prepare_global_plan
        planner = None
        reader.prepare_global_plan = lambda plans: seen.append(goes_on(manager)) or real(plans)  # type: ignore[method-assign, func-returns-value]
    state = {"state": {"x": torch.zeros(3)}}
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    assert seen == [["step-1", "step-2"]]
    assert state["state"]["x"].tolist() == [1.0] * 3
    assert goes_on(manager) == ["step-3"]  # though the reader is still there
    reader = DcpxReader(tmp_path / "step-3")  # metadata read outside of a load hold nothing
    assert "state.x" in reader.read_metadata().state_dict_metadata
    assert goes_on(manager) == ["step-4"]


def test_reader_that_does_not_end_is_named_at_each_third_deferral(
    tmp_path: Path, manager: CheckpointManager, caplog: Log
) -> None:
    reader = f"host={socket.gethostname()} pid={os.getpid()}"
    counts: list[int] = []
    save_steps(manager_of(tmp_path), 2)
    with being_read(tmp_path / "step-1"):
        with pytest.raises(ConcurrentSaveError, match=re.escape(reader)) as caught:
            manager.delete(1)
        assert caught.value.owner == reader
        for _ in range(6):
            goes_on(manager)
            warned = warnings_of(caplog)
            counts.append(len(warned))
    assert counts == [0, 0, 1, 1, 1, 2]
    assert all("step-1" in text and reader in text for text in warned)
    assert "3 times in a row" in warned[0] and "6 times in a row" in warned[1]
    assert len(goes_on(manager)) == 1
    assert manager._retention._deferrals == {}


def test_failed_load_lets_go_with_its_reader(tmp_path: Path, manager: CheckpointManager) -> None:
    def fails() -> None:
        raise KeyError("planner")

    reader = DcpxReader(tmp_path / "step-1")
    save_steps(manager_of(tmp_path), 2)
    for _ in range(2):
        with pytest.raises(CheckpointException, match="planner"):
            dcp.load({}, storage_reader=reader, planner=Planner(fails), no_dist=True)
        with pytest.raises(ConcurrentSaveError, match="reads"):
            manager.delete(1)
        reader.reset()
        with being_deleted(tmp_path / "step-1"):
            pass
    with pytest.raises(CheckpointException, match="planner"):
        dcp.load({}, storage_reader=reader, planner=Planner(fails), no_dist=True)
    for copied in (pickle.loads(pickle.dumps(reader)), copy.deepcopy(reader)):
        copied.reset()
    with pytest.raises(ConcurrentSaveError, match="reads"):
        manager.delete(1)
    del reader, copied
    gc.collect()
    manager.delete(1)


def test_forked_child_leaves_the_lock_to_its_parent(
    tmp_path: Path, manager: CheckpointManager
) -> None:
    hold = ReadersHold()
    hold.take(tmp_path / "step-1")
    pid = os.fork()
    if pid == 0:
        hold.release()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    with pytest.raises(ConcurrentSaveError), being_deleted(tmp_path / "step-1"):
        pass
    hold.release()
    with being_deleted(tmp_path / "step-1"):
        pass


def test_verify_and_inspect_keep_what_they_read_from_deletion(
    tmp_path: Path, manager: CheckpointManager, monkeypatch: Patch
) -> None:
    seen: list[list[str]] = []
    report = dcpx.verify(tmp_path / "step-1", progress=lambda *_: seen.append(goes_on(manager)))
    assert report.ok and seen[0] == ["step-1", "step-2"]
    last = manager.tags()[-1]
    real = views_inspect._described

    def meanwhile(*args: Any) -> Any:
        seen.append(goes_on(manager))
        return real(*args)

    monkeypatch.setattr(views_inspect, "_described", meanwhile)
    assert views_inspect.described(tmp_path / last)[0].faults == []
    assert seen[-1][0] == last and len(seen[-1]) == 2
    assert len(goes_on(manager)) == 1 == len(on_disk(tmp_path))


def test_readers_make_no_lock_in_directories_of_others(tmp_path: Path) -> None:
    state = {"x": torch.arange(3.0)}
    dcp.save(dict(state), checkpoint_id=tmp_path / "stock", no_dist=True)
    dcpx.save(state, tmp_path / "ours")
    for path in (tmp_path / "stock", tmp_path / "ours"):
        names = sorted(os.listdir(path))
        target = {"x": torch.zeros(3)}
        dcp.load(target, storage_reader=DcpxReader(path), no_dist=True)
        dcpx.load(target, path)
        assert dcpx.verify(path).ok
        views_inspect.described(path)
        dcpx.export(path, tmp_path / "out", overwrite=True)
        assert sorted(os.listdir(path)) == names
        assert READERS_NAME not in names
