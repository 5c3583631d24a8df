"""What a killed save or removal leaves: it goes under its own name, and a user's name keeps it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from root_jobs import die_in_delete, die_in_own_save, die_in_save, started
from support.machine import seconds
from trainings import manager_of, on_disk, save_steps

from torch_dcpx.storage.save_lock import boot_id


def killed(function: Callable[..., None], root: Path, tag: str) -> None:
    assert started(function, root, tag).wait(seconds(120)) == -signal.SIGKILL


def goes_on(root: Path, step: int, keep_last: int | None = None) -> set[str]:
    """Saves as the next job does. Returns what is left."""
    with manager_of(root, keep_last=keep_last) as manager:
        save_steps(manager, step)
    return on_disk(root)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def one_and_two(root: Path, tag: str) -> None:
    with manager_of(root) as manager:
        manager.save(tag, step=1, user_content=0)
        save_steps(manager, 2)


@pytest.mark.parametrize("tag", ["step-2", "a best%one"])
def test_unfinished_save_goes_under_its_own_name_alone(tmp_path: Path, tag: str) -> None:
    goes_on(tmp_path, 1)
    killed(die_in_save, tmp_path, tag)
    for name in ("copy", "step-7", "rescue"):
        shutil.copytree(tmp_path / tag, tmp_path / name)
    before = contents(tmp_path / "rescue")
    assert goes_on(tmp_path, 3, 3) == {"step-1", "step-3", "step-7", "copy", "rescue"}
    assert contents(tmp_path / "rescue") == before
    (tmp_path / "rescue").rename(tmp_path / tag)
    assert tag not in goes_on(tmp_path, 4, 3)


def test_unfinished_save_of_no_manager_stays(tmp_path: Path) -> None:
    goes_on(tmp_path, 1)
    killed(die_in_own_save, tmp_path, "mine")
    before = contents(tmp_path / "mine")
    assert goes_on(tmp_path, 3, 1) == {"step-3", "mine"}
    assert contents(tmp_path / "mine") == before


@pytest.mark.parametrize("tag", ["step-1", "best"])
def test_unfinished_removal_goes_on_under_its_own_name_alone(tmp_path: Path, tag: str) -> None:
    one_and_two(tmp_path, tag)
    killed(die_in_delete, tmp_path, tag)
    (tmp_path / tag).rename(tmp_path / "kept")
    before = contents(tmp_path / "kept")
    goes_on(tmp_path, 3)
    assert contents(tmp_path / "kept") == before
    (tmp_path / "kept").rename(tmp_path / tag)
    assert goes_on(tmp_path, 4) == {"step-2", "step-3", "step-4"}


@pytest.mark.parametrize("tag", ["step-1", "best"])
def test_note_of_a_removal_goes_behind_a_later_save(tmp_path: Path, tag: str) -> None:
    one_and_two(tmp_path, tag)
    killed(die_in_delete, tmp_path, tag)
    note = tmp_path / tag / ".dcpx.deleted"
    note.rename(tmp_path / "note")
    with manager_of(tmp_path) as manager:
        manager.save(tag, step=3, user_content=0)
    shutil.copy(tmp_path / "note", note)
    shutil.copytree(tmp_path / tag, tmp_path / "step-9")
    goes_on(tmp_path, 4)
    assert not note.exists()
    assert (tmp_path / "step-9" / ".dcpx.deleted").exists()


@pytest.mark.parametrize(("tag", "goes"), [("step-2", True), ("step-02", False), ("best", False)])
def test_what_an_earlier_version_left_goes_where_its_name_is_a_steps(
    tmp_path: Path, tag: str, goes: bool
) -> None:
    goes_on(tmp_path, 1)
    killed(die_in_save, tmp_path, tag)
    (tmp_path / tag / ".dcpx.lock").write_text(f"host=me pid={os.getpid()} boot={boot_id()}\n")
    assert (tag not in goes_on(tmp_path, 3, 3)) is goes
