"""Whose a checkpoint is: what a user has copied, renamed or brought beneath a root stays."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.saves import save
from trainings import damage, large, manager_of, on_disk, save_steps

from torch_dcpx import CorruptionError, UnsupportedError, export
from torch_dcpx.manager.stored import Record


def copy(root: Path, tag: str, name: str) -> None:
    shutil.copytree(root / tag, root / name)


def link_files(root: Path, tag: str, name: str) -> None:
    shutil.copytree(root / tag, root / name, copy_function=os.link)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def of_earlier_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves as a version that notes no run."""
    encoded = Record.encoded
    monkeypatch.setattr(
        Record, "encoded", lambda self: encoded(self).replace(f',"run":"{self.run}"', "")
    )
    monkeypatch.setattr("torch_dcpx.manager.root.new_run", lambda _: "")


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
    tmp_path: Path,
    make: Callable[[Path, str, str], None],
    tag: str,
    name: str,
    has_run: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_run:
        of_earlier_versions(monkeypatch)
    save_steps(manager_of(tmp_path), 1, 2, 3)
    make(tmp_path, tag, name)
    before = contents(tmp_path / name)
    for step in (4, 5, 6):
        with manager_of(tmp_path, keep_last=2, keep_every=9) as manager:
            target = {"x": torch.zeros(3)}
            info = manager.resume(state=target)
            assert (info.step, info.skipped) == (step - 1, ())
            assert target["x"][0] == step - 1
            save_steps(manager, step)
    assert on_disk(tmp_path) == {name, "step-5", "step-6"}
    assert {
        key: value for key, value in contents(tmp_path / name).items() if key in before
    } == before
    again = manager_of(tmp_path)
    assert again.tags() == [name, "step-5", "step-6"]
    info = again.resume(state=target, tag=name)  # by name it is like any other
    assert (info.tag, info.step, info.skipped) == (name, int(tag[-1]), ())
    assert target["x"].tolist() == [float(tag[-1])] * 3


@pytest.mark.parametrize("has_pointer", [True, False])
def test_renamed_newest_is_the_users(
    tmp_path: Path, has_pointer: bool, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(manager_of(tmp_path), 1, 2, 3, 4)
    (tmp_path / "step-4").rename(tmp_path / "step-4.bad")
    if not has_pointer:
        (tmp_path / "newest").unlink()
    info = manager_of(tmp_path).resume(state={"x": torch.zeros(3)})
    ((tag, reason),) = info.skipped
    assert (info.tag, tag) == ("step-3", "step-4.bad")
    assert "its record names 'step-4'" in reason and "tag='step-4.bad' takes" in reason
    assert reason in caplog.text
    with manager_of(tmp_path, keep_last=1) as manager:
        save_steps(manager, 4, 5)
    assert on_disk(tmp_path) >= {"step-4.bad", "step-5"}
    assert manager_of(tmp_path).resume().skipped == ()  # it is older now


def test_renamed_back_it_is_the_managers_again(tmp_path: Path) -> None:
    save_steps(manager_of(tmp_path), 1, 2)
    (tmp_path / "step-2").rename(tmp_path / "aside")
    assert manager_of(tmp_path).latest() == "step-1"
    (tmp_path / "aside").rename(tmp_path / "step-2")
    assert manager_of(tmp_path).latest() == "step-2"
    with manager_of(tmp_path, keep_last=1) as manager:
        save_steps(manager, 3)
    assert on_disk(tmp_path) == {"step-3"}


@pytest.mark.parametrize("name", ["step-8000", "from-another-run"])
def test_checkpoint_of_another_run_is_the_users(tmp_path: Path, name: str) -> None:
    root, other = tmp_path / "run", tmp_path / "other"
    save_steps(manager_of(other), *range(7993, 8001))
    save_steps(manager_of(root), 1, 2, 3)
    shutil.copytree(other / "step-8000", root / name)
    with manager_of(root, keep_last=2) as manager:
        info = manager.resume(state={"x": torch.zeros(3)})
        assert (info.step, [tag for tag, _ in info.skipped]) == (3, [name])
        save_steps(manager, *range(4, 14))  # its order passes that of the other
    assert manager_of(root).tags() == [name, "step-12", "step-13"]
    assert manager_of(root).resume(tag=name).step == 8000
    (root / "step-13" / ".metadata").unlink()
    assert manager_of(root).latest() == "step-12"


def test_copied_root_is_a_root_of_its_own(tmp_path: Path) -> None:
    save_steps(manager_of(tmp_path / "a"), 1, 2, 3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with manager_of(tmp_path / "b", keep_last=1) as manager:
        assert manager.resume().step == 3
        save_steps(manager, 4)
    assert (on_disk(tmp_path / "a"), on_disk(tmp_path / "b")) == (
        {"step-1", "step-2", "step-3"},
        {"step-4"},
    )


def test_checkpoints_without_a_pointer_are_resumed_and_stay(tmp_path: Path) -> None:
    """As after `cp -r other/step-* here`: nobody knows for whom."""
    other, root = tmp_path / "other", tmp_path / "run"
    save_steps(manager_of(other), 1, 2, 3)
    for tag, name in (("step-1", "step-1"), ("step-2", "step-2"), ("step-3", "mine")):
        shutil.copytree(other / tag, root / name)
    save({"x": torch.zeros(3)}, root / "step-0", "stock")
    with manager_of(root, keep_last=1) as manager:
        info = manager.resume(state={"x": torch.zeros(3)})
        assert (info.tag, [tag for tag, _ in info.skipped]) == ("step-2", ["mine"])
        save_steps(manager, 3, 4)
    assert on_disk(root) == {"mine", "step-0", "step-1", "step-2", "step-4"}
    assert manager_of(root).tags() == ["mine", "step-0", "step-1", "step-2", "step-4"]


def test_copies_alone_are_resumed_by_order_and_stay(tmp_path: Path) -> None:
    save_steps(manager_of(tmp_path / "a"), 10, 9)
    for tag, name in (("step-10", "start"), ("step-9", "again")):
        shutil.copytree(tmp_path / "a" / tag, tmp_path / "b" / name)
    with manager_of(tmp_path / "b", keep_last=1) as manager:
        info = manager.resume(state={"x": torch.zeros(3)})
        assert (info.tag, info.step, info.skipped) == ("again", 9, ())
        save_steps(manager, 10, 11)
    assert on_disk(tmp_path / "b") == {"start", "again", "step-11"}


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


def test_pointer_of_earlier_versions_is_read_and_gets_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        of_earlier_versions(patch)
        save_steps(manager_of(tmp_path), 1, 2, 3)
    assert "run" not in json.loads((tmp_path / "newest").read_bytes())
    with manager_of(tmp_path, keep_last=2) as manager:
        assert manager.resume().step == 3
        save_steps(manager, 4)
    assert json.loads((tmp_path / "newest").read_bytes())["run"]
    assert on_disk(tmp_path) == {"step-3", "step-4"}


@pytest.mark.parametrize("run", [1, None, ["a"]])
def test_run_that_is_no_text_is_no_pointer(
    tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(manager_of(tmp_path), 1)
    fields = json.loads((tmp_path / "newest").read_bytes())
    (tmp_path / "newest").write_text(json.dumps({**fields, "run": run}))
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        assert manager_of(tmp_path).latest() == "step-1"
    assert "the pointer to the newest checkpoint is of no use" in caplog.text


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


# ---- Copies of a whole root ----------------------------------------------------------------------


def pointer(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "newest").read_bytes())
    return found


def fork(root: Path) -> Path:
    """Returns a copy of a root, where the job went on, too."""
    save_steps(manager_of(root), 1, 2, 3)
    other = root.with_name("fork")
    shutil.copytree(root, other)
    with manager_of(other) as manager:
        assert manager.resume().step == 3
        save_steps(manager, 9)
    with manager_of(root, keep_last=2) as manager:
        manager.resume()
        save_steps(manager, 4, 5)
    assert (on_disk(root), on_disk(other)) == (
        {"step-4", "step-5"},
        {"step-1", "step-2", "step-3", "step-9"},
    )
    return other


def test_checkpoint_of_a_forked_root_is_the_users(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (fork(root) / "step-9").rename(root / "step-9")
    with manager_of(root, keep_last=2) as manager:
        info = manager.resume(state={"x": torch.zeros(3)})
        assert (info.step, [tag for tag, _ in info.skipped]) == (5, ["step-9"])
        save_steps(manager, 6, 7, 8, 10)
    assert on_disk(root) == {"step-8", "step-9", "step-10"}


def test_checkpoint_that_a_root_saved_after_its_fork_is_the_users_there(tmp_path: Path) -> None:
    root = tmp_path / "root"
    other = fork(root)
    with manager_of(root) as manager:
        save_steps(manager, 11)
    (root / "step-11").rename(other / "step-11")
    with manager_of(other, keep_last=1) as manager:
        info = manager.resume(state={"x": torch.zeros(3)})
        assert (info.step, [tag for tag, _ in info.skipped]) == (9, ["step-11"])
        save_steps(manager, 10, 12)  # what came with the root goes
    assert on_disk(other) == {"step-11", "step-12"}


def test_root_that_moves_keeps_its_checkpoints_and_a_short_list(tmp_path: Path) -> None:
    """As by rsync to other machines, or where each mount numbers the directory anew."""
    root = tmp_path / "0"
    runs = []
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
    with manager_of(root) as manager:
        save_steps(manager, 6)
    run = pointer(root)["run"]
    root = root.rename(tmp_path / "renamed")  # in its file system it stays what it was
    with manager_of(root, keep_last=1) as manager:
        save_steps(manager, 7)
    assert (on_disk(root), pointer(root)["run"]) == ({"step-7"}, run)


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
    with manager_of(moved, keep_last=1) as manager:
        info = manager.resume(state={"x": torch.zeros(3)})
        assert (info.step, info.skipped) == (2, ())
        save_steps(manager, 3)
    assert on_disk(moved) == {"step-3"}


@pytest.mark.parametrize("earlier", [[1], {"a": "1"}, {"a": None}, "ab", 3])
def test_earlier_runs_that_are_none_are_no_pointer(tmp_path: Path, earlier: Any) -> None:
    save_steps(manager_of(tmp_path), 1)
    (tmp_path / "newest").write_text(json.dumps({**pointer(tmp_path), "earlier": earlier}))
    with pytest.raises(CorruptionError, match="no pointer to a checkpoint"):
        manager_of(tmp_path)._root.files.read()
    assert manager_of(tmp_path).latest() == "step-1"
