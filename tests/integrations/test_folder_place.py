"""Where an adapter's next folder is made: leftovers of killed saves, and other jobs."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import RunPython
from support.folders import RECORD, save_folder, value_in

from torch_dcpx import ConcurrentSaveError, StorageError, UnsupportedError
from torch_dcpx.integrations._dcp_calls import noted
from torch_dcpx.integrations._folder_contents import Replacement
from torch_dcpx.integrations._folders import FolderSaves
from torch_dcpx.storage.save_lock import SaveLock


def test_leftovers_that_are_not_ours_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outer = tmp_path / ".dcpx.saving.a"
    (outer / "a").mkdir(parents=True)
    (outer / "a" / "mine").touch()
    (outer / "notes").touch()
    save_folder(tmp_path / "a", 1)
    assert {path.name for path in outer.iterdir()} >= {"a", "notes"}
    # Of an earlier version's, some may be of the folder before.
    assert (outer / ".dcpx.lock").exists()
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        save_folder(tmp_path / "a", 2)
    assert "left by a killed save of an earlier version" in caplog.text
    assert (outer / "a" / "mine").exists()


@pytest.mark.parametrize("has_record", [True, False])
def test_folder_before_that_a_killed_save_has_left_gives_back_what_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_record: bool
) -> None:
    folder = tmp_path / "a"
    save_folder(folder, 1)
    if not has_record:  # of an earlier version
        (folder / RECORD).unlink()
    with monkeypatch.context() as patch:  # killed behind the exchange
        patch.setattr(Replacement, "settle", lambda _: None)
        save_folder(folder, 2)
    (left,) = (tmp_path / ".dcpx.saving.a").glob("*/a")
    (left / "late").write_text("mine")
    save_folder(folder, 3)
    assert (folder / "late").read_text() == "mine"
    assert value_in(folder / "model") == 3
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_place_of_the_next_folder_that_is_none_is_refused(tmp_path: Path, kind: str) -> None:
    outer = tmp_path / ".dcpx.saving.a"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        outer.symlink_to(tmp_path / "elsewhere")
    else:
        outer.touch()
    with pytest.raises((UnsupportedError, StorageError)):
        save_folder(tmp_path / "a", 1)
    assert kind == "file" or not os.listdir(tmp_path / "elsewhere")


def test_lock_that_was_removed_before_it_was_taken_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(SaveLock, "is_there", lambda _: next(answers))
    save_folder(tmp_path / "a", 1)
    assert value_in(tmp_path / "a" / "model") == 1
    assert not list(answers)


def test_two_jobs_without_locks_leave_one_whole_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("torch_dcpx.storage.flock.fcntl.flock", refuse)
    other = FolderSaves("save", None)
    target = other.begin(lambda: tmp_path / "a")
    save_folder(tmp_path / "a", 1, parts=("model", "optimizer"))
    with noted(target) as parts:
        for part in ("model", "optimizer"):
            dcp.save({part: torch.full((8,), 2.0)}, checkpoint_id=target / part)
    other.commit(parts, list)
    other.wait()
    assert [value_in(tmp_path / "a" / part) for part in ("model", "optimizer")] == [2, 2]


def test_job_in_another_process_is_refused(tmp_path: Path, run_warm: RunPython) -> None:
    saves = FolderSaves("save", None)
    saves.begin(lambda: tmp_path / "a")
    code = """
import sys
from pathlib import Path
from torch_dcpx import ConcurrentSaveError
from torch_dcpx.integrations._folders import FolderSaves
try:
    FolderSaves("save", None).begin(lambda: Path(sys.argv[1]))
except ConcurrentSaveError as error:
    print(error)
"""
    text = run_warm(code, str(tmp_path / "a")).stdout
    assert "another job saves there" in text and f"pid={os.getpid()}" in text
    with pytest.raises(ConcurrentSaveError):
        save_folder(tmp_path / "a", 1)


def test_kill_before_any_step_leaves_the_one_folder_or_the_other(
    tmp_path: Path, run_warm: RunPython
) -> None:
    worker = Path(__file__).with_name("folder_kill_worker.py")
    tests = {"PYTHONPATH": str(worker.parents[1])}
    found = json.loads(
        run_warm(worker.read_text(), str(tmp_path), env=tests).stdout.split("\n")[-2]
    )
    assert found["wrong"] == {}
    assert found["ended"] == 0
    assert found["steps"] > 40
