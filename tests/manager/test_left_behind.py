"""What a killed save or removal leaves: it goes under its own name, and a user's name keeps it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.machine import seconds
from trainings import manager_of, on_disk, save_steps

from torch_dcpx.storage.save_lock import boot_id

# Each ends in the middle of what it does.
SAVE = """
import torch_dcpx.writer.commit as module
module.publish = lambda *_, **__: os.kill(os.getpid(), 9)
manager.save(sys.argv[2], step=2, state=state)
"""
OWN_SAVE = SAVE.replace("manager.save(sys.argv[2], step=2, state=state)", "") + (
    "dcpx.save(state, f'{sys.argv[1]}/{sys.argv[2]}', no_dist=True)"
)
DELETE = """
import torch_dcpx.manager.removal as module
module._empty = lambda *_, **__: os.kill(os.getpid(), 9)
manager.delete(sys.argv[2])
"""
BEGIN = """
import os, sys, torch, torch_dcpx as dcpx
manager, state = dcpx.CheckpointManager(sys.argv[1], no_dist=True), {"x": torch.ones(3)}
"""


def killed(code: str, root: Path, tag: str) -> None:
    command = [sys.executable, "-c", f"{BEGIN}{code}", str(root), tag]
    assert subprocess.run(command, timeout=seconds(120)).returncode == -9


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("tag", ["step-2", "a best%one"])
def test_unfinished_save_goes_under_its_own_name_alone(tmp_path: Path, tag: str) -> None:
    save_steps(manager_of(tmp_path), 1)
    killed(SAVE, tmp_path, tag)
    shutil.copytree(tmp_path / tag, tmp_path / "copy")
    shutil.copytree(tmp_path / tag, tmp_path / "step-7")
    shutil.copytree(tmp_path / tag, tmp_path / "rescue")
    before = contents(tmp_path / "rescue")
    with manager_of(tmp_path, keep_last=3) as manager:
        save_steps(manager, 3)
    assert on_disk(tmp_path) == {"step-1", "step-3", "step-7", "copy", "rescue"}
    assert contents(tmp_path / "rescue") == before
    (tmp_path / "rescue").rename(tmp_path / tag)
    with manager_of(tmp_path, keep_last=3) as manager:
        save_steps(manager, 4)
    assert tag not in on_disk(tmp_path)


def test_unfinished_save_of_no_manager_stays(tmp_path: Path) -> None:
    save_steps(manager_of(tmp_path), 1)
    killed(OWN_SAVE, tmp_path, "mine")
    before = contents(tmp_path / "mine")
    with manager_of(tmp_path, keep_last=1) as manager:
        save_steps(manager, 3)
    assert on_disk(tmp_path) == {"step-3", "mine"}
    assert contents(tmp_path / "mine") == before


@pytest.mark.parametrize("tag", ["step-1", "best"])
def test_unfinished_removal_goes_on_under_its_own_name_alone(tmp_path: Path, tag: str) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(tag, step=1, user_content=0)
        save_steps(manager, 2)
    killed(DELETE, tmp_path, tag)
    (tmp_path / tag).rename(tmp_path / "kept")
    before = contents(tmp_path / "kept")
    with manager_of(tmp_path) as manager:
        save_steps(manager, 3)
    assert contents(tmp_path / "kept") == before
    (tmp_path / "kept").rename(tmp_path / tag)
    with manager_of(tmp_path) as manager:
        save_steps(manager, 4)
    assert on_disk(tmp_path) == {"step-2", "step-3", "step-4"}


@pytest.mark.parametrize("tag", ["step-1", "best"])
def test_note_of_a_removal_goes_behind_a_later_save(tmp_path: Path, tag: str) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(tag, step=1, user_content=0)
        save_steps(manager, 2)
    killed(DELETE, tmp_path, tag)
    (tmp_path / tag / ".dcpx.deleted").rename(tmp_path / "note")
    with manager_of(tmp_path) as manager:
        manager.save(tag, step=3, user_content=0)
    shutil.copy(tmp_path / "note", tmp_path / tag / ".dcpx.deleted")
    shutil.copytree(tmp_path / tag, tmp_path / "step-9")
    with manager_of(tmp_path) as manager:
        save_steps(manager, 4)
    assert not (tmp_path / tag / ".dcpx.deleted").exists()
    assert (tmp_path / "step-9" / ".dcpx.deleted").exists()


@pytest.mark.parametrize(("tag", "goes"), [("step-2", True), ("step-02", False), ("best", False)])
def test_what_an_earlier_version_left_goes_where_its_name_is_a_steps(
    tmp_path: Path, tag: str, goes: bool
) -> None:
    save_steps(manager_of(tmp_path), 1)
    killed(SAVE, tmp_path, tag)
    (tmp_path / tag / ".dcpx.lock").write_text(f"host=me pid={os.getpid()} boot={boot_id()}\n")
    with manager_of(tmp_path, keep_last=3) as manager:
        save_steps(manager, 3)
    assert (tag not in on_disk(tmp_path)) is goes
