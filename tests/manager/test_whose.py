"""Whose a checkpoint is: what a user has copied, renamed or brought beneath a root stays."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.saves import save
from trainings import (
    Log,
    Patch,
    contents,
    damage,
    large,
    manager_of,
    on_disk,
    pointer,
    resumed,
    save_steps,
    warnings_of,
)

from torch_dcpx import CorruptionError, UnsupportedError, export
from torch_dcpx.manager.stored import Record


def copy(root: Path, tag: str, name: str) -> None:
    shutil.copytree(root / tag, root / name)


def link_files(root: Path, tag: str, name: str) -> None:
    shutil.copytree(root / tag, root / name, copy_function=os.link)


def of_earlier_versions(monkeypatch: Patch) -> None:
    """Saves as a version that notes no run."""
    encoded = Record.encoded
    monkeypatch.setattr(
        Record, "encoded", lambda self: encoded(self).replace(f',"run":"{self.run}"', "")
    )
    monkeypatch.setattr("torch_dcpx.manager.root.new_run", lambda _: "")


def goes_on(root: Path, *steps: int, **rules: Any) -> set[str]:
    """Saves as the next job does. Returns what is left."""
    with manager_of(root, **rules) as manager:
        save_steps(manager, *steps)
    return on_disk(root)


@pytest.mark.parametrize(
    ("make", "tag", "name", "has_run"),
    [
        (copy, "step-3", "mine", True),
        (copy, "step-1", "step-3.backup", True),
        (copy, "step-1", "step-9", True),  # as if it were another step's
        (copy, "step-3", "step-03", False),
        (link_files, "step-3", "best", True),
        (link_files, "step-1", "step-9", False),
    ],
)
def test_copy_outlives_retention_and_takes_no_slot(
    tmp_path: Path, make: Any, tag: str, name: str, has_run: bool, monkeypatch: Patch
) -> None:
    if not has_run:
        of_earlier_versions(monkeypatch)
    save_steps(tmp_path, 1, 2, 3)
    make(tmp_path, tag, name)
    before = contents(tmp_path / name)
    for step in (4, 5, 6):
        with manager_of(tmp_path, keep_last=2, keep_every=9) as manager:
            info, value = resumed(manager)
            assert (info.step, info.skipped, value) == (step - 1, (), step - 1)
            save_steps(manager, step)
    assert on_disk(tmp_path) == {name, "step-5", "step-6"}
    assert before.items() <= contents(tmp_path / name).items()
    assert manager_of(tmp_path).tags() == [name, "step-5", "step-6"]
    info, value = resumed(tmp_path, tag=name)  # by name it is like any other
    assert (info.tag, info.step, info.skipped) == (name, int(tag[-1]), ())
    assert value == float(tag[-1])


@pytest.mark.parametrize("has_pointer", [True, False])
def test_renamed_newest_is_the_users(tmp_path: Path, has_pointer: bool, caplog: Log) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step-4").rename(tmp_path / "step-4.bad")
    if not has_pointer:
        (tmp_path / "newest").unlink()
    info, _ = resumed(tmp_path)
    ((tag, reason),) = info.skipped
    assert (info.tag, tag) == ("step-3", "step-4.bad")
    assert "its record names 'step-4'" in reason and "tag='step-4.bad' takes" in reason
    assert reason in caplog.text
    assert goes_on(tmp_path, 4, 5, keep_last=1) >= {"step-4.bad", "step-5"}
    assert manager_of(tmp_path).resume().skipped == ()  # it is older now


def test_renamed_back_it_is_the_managers_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "step-2").rename(tmp_path / "aside")
    assert manager_of(tmp_path).latest() == "step-1"
    (tmp_path / "aside").rename(tmp_path / "step-2")
    assert manager_of(tmp_path).latest() == "step-2"
    assert goes_on(tmp_path, 3, keep_last=1) == {"step-3"}


@pytest.mark.parametrize("name", ["step-8000", "from-another-run"])
def test_checkpoint_of_another_run_is_the_users(tmp_path: Path, name: str) -> None:
    root, other = tmp_path / "run", tmp_path / "other"
    save_steps(other, *range(7993, 8001))
    save_steps(root, 1, 2, 3)
    shutil.copytree(other / "step-8000", root / name)
    with manager_of(root, keep_last=2) as manager:
        info, _ = resumed(manager)
        assert (info.step, [tag for tag, _ in info.skipped]) == (3, [name])
        save_steps(manager, *range(4, 14))  # its order passes that of the other
    assert manager_of(root).tags() == [name, "step-12", "step-13"]
    assert manager_of(root).resume(tag=name).step == 8000
    (root / "step-13" / ".metadata").unlink()
    assert manager_of(root).latest() == "step-12"


def test_checkpoints_without_a_pointer_are_resumed_and_stay(tmp_path: Path) -> None:
    """As after `cp -r other/step-* here`: nobody knows for whom."""
    other, root = tmp_path / "other", tmp_path / "run"
    save_steps(other, 1, 2, 3)
    for tag, name in (("step-1", "step-1"), ("step-2", "step-2"), ("step-3", "mine")):
        shutil.copytree(other / tag, root / name)
    save({"x": torch.zeros(3)}, root / "step-0", "stock")
    with manager_of(root, keep_last=1) as manager:
        info, _ = resumed(manager)
        assert (info.tag, [tag for tag, _ in info.skipped]) == ("step-2", ["mine"])
        save_steps(manager, 3, 4)
    assert on_disk(root) == {"mine", "step-0", "step-1", "step-2", "step-4"}
    assert manager_of(root).tags() == ["mine", "step-0", "step-1", "step-2", "step-4"]


def test_copies_alone_are_resumed_by_order_and_stay(tmp_path: Path) -> None:
    save_steps(tmp_path / "a", 10, 9)
    for tag, name in (("step-10", "start"), ("step-9", "again")):
        shutil.copytree(tmp_path / "a" / tag, tmp_path / "b" / name)
    info, _ = resumed(tmp_path / "b")
    assert (info.tag, info.step, info.skipped) == ("again", 9, ())
    assert goes_on(tmp_path / "b", 10, 11, keep_last=1) == {"start", "again", "step-11"}


def test_copy_is_pinned_and_deleted_by_name(tmp_path: Path) -> None:
    with manager_of(tmp_path, keep_last=1) as manager:
        save_steps(manager, 1, 2)
        copy(tmp_path, "step-2", "mine")
        manager.pin("mine")
        with pytest.raises(UnsupportedError, match="pinned"):
            manager.delete("mine")
        manager.unpin("mine")
        manager.delete("mine")
    assert on_disk(tmp_path) == {"step-2"}


@pytest.mark.parametrize("loss", ["damaged", "lost"])
def test_broken_copy_says_nothing_of_the_original(tmp_path: Path, loss: str) -> None:
    manager = manager_of(tmp_path)
    for step in (1, 2):
        manager.save(step, state={"x": large(step)})
    copy(tmp_path, "step-2", "mine")
    if loss == "damaged":
        damage(tmp_path / "mine")
        with pytest.raises(Exception, match="mine"):
            manager.resume(state={"x": large(0)}, tag="mine")
    assert manager.resume(state={"x": large(0)}).step == 2
    assert manager.tags() == ["mine", "step-1", "step-2"]
    if loss == "lost":  # behind a look at it
        next((tmp_path / "mine").glob("__*.distcp")).unlink()
    assert not manager._root.damaged
    assert not manager._root.remembered()[1]
    manager._retention._rules = manager._rules._replace(last=1)
    manager._retention.run()
    assert on_disk(tmp_path) == {"mine", "step-2"}


def test_earlier_pointer_is_read_and_gets_a_run(tmp_path: Path, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        of_earlier_versions(patch)
        save_steps(tmp_path, 1, 2, 3)
    assert "run" not in pointer(tmp_path)
    assert manager_of(tmp_path).resume().step == 3
    assert goes_on(tmp_path, 4, keep_last=2) == {"step-3", "step-4"}
    assert pointer(tmp_path)["run"]


NO_POINTERS = [{"run": run} for run in (1, None, ["a"])]
NO_POINTERS += [{"earlier": earlier} for earlier in ([1], {"a": "1"}, {"a": None}, "ab", 3)]


def test_runs_that_are_none_are_no_pointer(tmp_path: Path, caplog: Log) -> None:
    save_steps(tmp_path, 1)
    for number, more in enumerate(NO_POINTERS):
        (tmp_path / "newest").write_text(json.dumps({**pointer(tmp_path), **more}))
        with pytest.raises(CorruptionError, match="no pointer to a checkpoint"):
            manager_of(tmp_path)._root.files.read()
        caplog.clear()
        assert manager_of(tmp_path).latest() == f"step-{number + 1}", more
        assert "the pointer to the newest checkpoint is of no use" in warnings_of(caplog)[0]
        save_steps(tmp_path, number + 2)


def test_directories_keep_their_modes(tmp_path: Path) -> None:
    root, out = tmp_path / "run", tmp_path / "out"
    save({"x": torch.zeros(3)}, root / "step-0", "stock")
    with manager_of(root, keep_last=1) as manager:
        save_steps(manager, 1)
        export(root / "step-0", out, keys=["x"], no_dist=True)
        for path in (root, root / "step-1", out):
            path.chmod(0o2700)
        save_steps(manager, 1)
        manager.pin(1)
        save_steps(manager, 2, 3)
        export(root / "step-0", out, keys=["x"], no_dist=True, overwrite=True)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (root, root / "step-1", out)}
    assert modes == dict.fromkeys(("run", "step-1", "out"), 0o2700)


def fork(root: Path) -> Path:
    """Returns a copy of a root, where the job went on, too."""
    save_steps(root, 1, 2, 3)
    other = root.with_name("fork")
    shutil.copytree(root, other)
    assert manager_of(other).resume().step == 3
    assert goes_on(other, 9) == {"step-1", "step-2", "step-3", "step-9"}
    manager_of(root).resume()
    assert goes_on(root, 4, 5, keep_last=2) == {"step-4", "step-5"}
    return other


def test_checkpoint_of_a_forked_root_is_the_users(tmp_path: Path) -> None:
    root = tmp_path / "root"
    other = fork(root)
    shutil.copytree(other / "step-9", root / "step-9")
    info, _ = resumed(root)
    assert (info.step, [tag for tag, _ in info.skipped]) == (5, ["step-9"])
    save_steps(root, 11)
    shutil.copytree(root / "step-11", other / "step-11")  # saved after the fork
    info, _ = resumed(other)
    assert (info.step, [tag for tag, _ in info.skipped]) == (9, ["step-11"])
    assert goes_on(other, 10, 12, keep_last=1) == {"step-11", "step-12"}
    kept = goes_on(root, 6, 7, 8, 10, keep_last=2)
    assert kept == {"step-8", "step-9", "step-10"}


def test_root_that_moves_keeps_its_checkpoints_and_a_short_list(tmp_path: Path) -> None:
    """As by rsync to other machines, or where each mount numbers the directory anew."""
    root, runs = tmp_path / "0", []
    for move in range(5):
        with manager_of(root, keep_last=2) as manager:
            assert manager.resume().step == (move or None)
            save_steps(manager, move + 1)
        runs.append(pointer(root)["run"])
        assert pointer(root).get("earlier", {}) == {
            run: order for order, run in enumerate(runs[:-1], 1) if order > move - 2
        }
        moved = tmp_path / str(move + 1)
        shutil.copytree(root, moved)
        shutil.rmtree(root)
        root = moved
    assert len(set(runs)) == 5
    assert on_disk(root) == {"step-4", "step-5"}
    assert manager_of(root).resume().step == 5
    save_steps(root, 6)
    run = pointer(root)["run"]
    root = root.rename(tmp_path / "renamed")  # in its file system it stays what it was
    assert (goes_on(root, 7, keep_last=1), pointer(root)["run"]) == ({"step-7"}, run)


def test_commit_that_was_cut_short_comes_with_the_moved_root(tmp_path: Path) -> None:
    """Killed between the commit and its pointer."""
    root, moved = tmp_path / "root", tmp_path / "moved"
    manager = manager_of(root)
    save_steps(manager, 1)
    with manager._root.committing("step-2"):
        before = (root / "newest").read_bytes()
    save_steps(manager, 2)
    (root / "newest").write_bytes(before)
    root.rename(tmp_path / "killed")
    shutil.copytree(tmp_path / "killed", moved)
    info, _ = resumed(moved)
    assert (info.step, info.skipped) == (2, ())
    assert goes_on(moved, 3, keep_last=1) == {"step-3"}
