"""Files in a root that no save has made: they neither stop a fresh start nor are warned of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.async_saves import gated
from support.machine import seconds
from trainings import Log, manager_of, save_steps, warnings_of

from torch_dcpx import CheckpointManager, NotCommittedError
from torch_dcpx import save as save_alone


def fill_with_foreign(root: Path) -> None:
    """Makes what users and file systems leave beside checkpoints."""
    (root / "logs" / "step-3").mkdir(parents=True)
    (root / "logs" / "events.out").write_text("x")
    (root / "lost+found").mkdir()
    (root / "empty").mkdir()
    (root / ".git").mkdir()
    (root / "step-3.png").write_text("x")
    (root / "notes.txt").write_text("mine")
    (root / "config.yaml").write_text("lr: 0.1")
    (root / "tensorboard").symlink_to("logs")


def test_foreign_files_stop_no_fresh_start_and_no_warning_comes(
    tmp_path: Path, caplog: Log
) -> None:
    fill_with_foreign(tmp_path)
    (tmp_path / "lost+found").chmod(0)
    before = sorted(tmp_path.rglob("*.*"))
    with manager_of(tmp_path) as manager:
        info = manager.resume(state={"x": torch.zeros(3)})
        assert info.is_fresh and info.skipped == ()
        assert manager.tags() == [] and manager.latest() is None
        assert sorted(tmp_path.rglob("*.*")) == before
        save_steps(manager, 1, 2)
    again = manager_of(tmp_path).resume(state={"x": torch.zeros(3)})
    assert (again.step, again.skipped) == (2, ())
    assert warnings_of(caplog) == []
    with pytest.raises(NotCommittedError, match="checkpoint itself") as told:
        manager_of(tmp_path / "step-1").resume(state={"x": torch.zeros(3)})
    assert repr(str(tmp_path)) in str(told.value)


STOPS: dict[str, Callable[[Path], Any]] = {
    **{
        name: lambda root, name=name: (root / "any" / name).touch()
        for name in (
            "__0_0.distcp",
            "mine_0_0.distcp",
            "__3.metadata",
            ".dcpx.deleted",
            ".dcpx.lock",
        )
    },
    "a first save that began": lambda root: (root / "step-100").mkdir(),
    "a link to nothing": lambda root: (root / "latest").symlink_to("/none/of/this/is/mounted"),
    "a link to a checkpoint": lambda root: (root / "latest").symlink_to(root.parent / "elsewhere"),
}


@pytest.mark.parametrize("what", STOPS)
def test_what_may_be_of_a_checkpoint_stops_a_fresh_start(tmp_path: Path, what: str) -> None:
    root = tmp_path / "run"
    (root / "any").mkdir(parents=True)
    save_alone({"x": torch.zeros(3)}, tmp_path / "elsewhere", no_dist=True)
    fill_with_foreign(root)
    STOPS[what](root)
    with pytest.raises(NotCommittedError, match="allow_fresh=True") as info:
        manager_of(root).resume(state={"x": torch.zeros(3)})
    assert "notes.txt" not in str(info.value) and "of 1 entry" in str(info.value)
    assert manager_of(root, allow_fresh=True).resume(state={"x": torch.zeros(3)}).is_fresh


def test_save_under_way_is_no_broken_checkpoint(tmp_path: Path, caplog: Log) -> None:
    gate, options = gated(max_in_flight=2)
    with CheckpointManager(tmp_path, options=options) as manager:
        first = manager.save(1, state={"x": torch.zeros(3)})
        assert gate.reached.wait(seconds(60))  # its directory is there, its metadata is not
        assert manager.tags() == [] and manager.latest() is None
        manager.save(2, state={"x": torch.zeros(3)})
        assert not first.done()
        gate.open()
    assert caplog.records == []


def test_delete_is_not_warned_of_whatever_else_lies_there(tmp_path: Path, caplog: Log) -> None:
    with manager_of(tmp_path) as manager:
        save_steps(manager, 1, 2, 3)
        (tmp_path / "step-2" / "notes.txt").write_text("mine")
        manager.delete(2)
        manager.delete(3)
        assert manager.tags() == ["step-1"]
        save_steps(manager, 4)
    assert manager_of(tmp_path).resume(state={"x": torch.zeros(3)}).skipped == ()
    assert (tmp_path / "step-2" / "notes.txt").read_text() == "mine"
    assert warnings_of(caplog) == []
