"""What is kept and what goes: only behind a newer commit, and never what is not ours."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.machine import seconds
from support.saves import save
from trainings import Called, Patch, manager_of, on_disk, resumed, save_steps

import torch_dcpx as dcpx
from torch_dcpx._answers import BOUND
from torch_dcpx.storage.reader_lock import being_read

LOSSES = {1: 9.0, 2: 1.0, 3: 9.0, 4: 1.0, 5: 1.0, 6: float("nan")}


@pytest.mark.parametrize(
    ("rules", "steps"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 1, "keep_every": 2}, [2, 4, 6]),
        ({"keep_best": ("loss", "min", 2)}, [4, 5, 6]),
        ({"keep_best": ("loss", "max", 1)}, [3, 6]),
    ],
    ids=repr,
)
def test_rules_keep_what_they_say(tmp_path: Path, rules: Any, steps: list[int]) -> None:
    manager = manager_of(tmp_path, **rules)
    for step, loss in LOSSES.items():
        save_steps(manager, step, metrics={"loss": loss})
    assert manager.tags() == [f"step-{step}" for step in steps]
    assert on_disk(tmp_path) == set(manager.tags())
    save_steps(manager_of(tmp_path, keep_last=2), 7)  # rules hold over the jobs of a training
    assert on_disk(tmp_path) == {"step-6", "step-7"}


@pytest.mark.parametrize("rules", [{"keep_best": ("loss", "least", 1)}, {"keep_best": "loss"}])
def test_rule_that_cannot_work_is_refused(tmp_path: Path, rules: Any) -> None:
    with pytest.raises(dcpx.OptionError):
        manager_of(tmp_path, **rules)


def test_save_to_a_pinned_checkpoint_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    manager = manager_of(tmp_path, async_save=True)
    save_steps(manager, 5)
    manager.pin(5)
    manager.pin(5)  # again is fine
    before = files()
    for one in (manager, manager_of(tmp_path)):
        with pytest.raises(
            dcpx.UnsupportedError, match=r"save '.*/step-5': it is pinned; unpin it"
        ):
            one.save(5, state={"x": torch.zeros(3)})
        assert not one._retention.busy
    assert files() == before
    with manager_of(tmp_path, keep_last=1) as other:  # another job respects it
        save_steps(other, 6, 7)
    assert manager.tags() == ["step-5", "step-7"]
    manager.unpin(5)
    save_steps(manager, 5)
    assert resumed(tmp_path)[1] == 5.0


def test_checkpoint_pinned_in_a_save_to_it_keeps_its_content(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    manager = manager_of(tmp_path)
    save_steps(manager, 5)
    catch_up = manager._retention.catch_up

    def pinned_first() -> None:
        manager_of(tmp_path).pin(5)
        catch_up()

    monkeypatch.setattr(manager._retention, "catch_up", pinned_first)
    with pytest.raises(dcpx.UnsupportedError, match=r"save '.*/step-5': it is pinned"):
        manager.save(5, state={"x": torch.zeros(3)})
    assert resumed(manager)[1] == 5.0
    assert len(list((tmp_path / "step-5").glob("*.distcp"))) == 1


def test_commits_of_two_managers_have_one_order(tmp_path: Path) -> None:
    """One of them at a time: what another has committed meanwhile is older."""
    managers = [manager_of(tmp_path, keep_last=1) for _ in range(2)]
    for step in range(1, 5):
        manager = managers[step % 2]
        save_steps(manager, step)
        assert manager.tags() == [f"step-{step}"] == [manager.latest()]


def test_checkpoint_that_is_read_stays_until_it_is_not(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, keep_last=1)
    save_steps(manager, 1)
    with being_read(tmp_path / "step-1"):
        save_steps(manager, 2)
        assert manager.tags() == ["step-1", "step-2"]
        with pytest.raises(dcpx.ConcurrentSaveError, match="reads"):
            manager.delete(1)
    save_steps(manager, 3)
    assert manager.tags() == ["step-3"]


def test_load_keeps_what_it_reads_from_deletion(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, keep_last=1)
    save_steps(manager, 1)
    seen: list[list[str]] = []

    def meanwhile() -> dict[str, Any]:
        save_steps(manager, 2)
        seen.append(manager.tags())
        return {"x": torch.zeros(3)}

    reads = Called(meanwhile, lambda state: seen.append(state["x"].tolist()))
    dcpx.load({"state": reads}, tmp_path / "step-1", no_dist=True)
    assert seen == [["step-1", "step-2"], [1.0] * 3]
    assert manager_of(tmp_path).latest() == "step-2"


def test_save_under_way_keeps_its_directory(tmp_path: Path) -> None:
    """A directory without metadata, whose lock somebody holds, is no leftover."""
    manager = manager_of(tmp_path, keep_last=1)
    save_steps(manager, 1)
    waits, goes_on = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        waits.set()
        assert goes_on.wait(seconds(60))

    options = dcpx.WriteOptions(progress=progress)
    handle = dcpx.async_save({"x": torch.zeros(3)}, tmp_path / "other", options=options)
    assert waits.wait(seconds(60))
    manager._retention.run()
    assert (tmp_path / "other").exists()
    goes_on.set()
    handle.result(seconds(60))
    save_steps(manager, 2, 3)
    assert on_disk(tmp_path) == {"other", "step-3"}  # no manager has saved `other`


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    save({"x": torch.zeros(2)}, tmp_path / "step-0", "stock")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "__0_0.distcp").write_text("mine")
    (tmp_path / "empty").mkdir()
    manager = manager_of(tmp_path, keep_last=1)
    save_steps(manager, 1)
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    save_steps(manager, 2, 3)
    assert on_disk(tmp_path) == {"step-0", "logs", "empty", "step-1", "step-3"}
    left = {path.name for path in (tmp_path / "step-1").iterdir()}
    assert left == {"notes.txt", ".dcpx.lock"}
    assert manager.tags() == ["step-0", "step-3"]


def test_checkpoint_that_lost_its_data_takes_no_good_ones_place(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, keep_last=2)
    save_steps(manager, 1, 2)
    next((tmp_path / "step-2").glob("__*.distcp")).unlink()
    save_steps(manager, 3)
    assert on_disk(tmp_path) == {"step-1", "step-2", "step-3"}
    assert manager.tags() == ["step-1", "step-3"]
    save_steps(manager, 4)
    assert on_disk(tmp_path) == {"step-3", "step-4"}


def test_nothing_goes_while_the_newest_is_not_whole(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    manager = manager_of(tmp_path, keep_last=1)
    manager.tags()
    os.truncate(next((tmp_path / "step-3").glob("__*.distcp")), 10)
    manager._retention.run()
    assert on_disk(tmp_path) == {"step-1", "step-2", "step-3"}
    save_steps(manager, 4)
    assert manager.tags() == ["step-4"]


@pytest.mark.slow
def test_retention_leaves_no_threads_or_files_open(tmp_path: Path, no_leaks: None) -> None:
    with manager_of(tmp_path, keep_last=1, async_save=True) as manager:
        save_steps(manager, 1, 2, 3)
    assert on_disk(tmp_path) == {"step-3"}


def test_tag_is_kept_from_removal_in_a_save_to_it(tmp_path: Path, monkeypatch: Patch) -> None:
    manager = manager_of(tmp_path)
    seen: list[frozenset[str]] = []

    def look() -> dict[str, Any]:
        seen.append(manager._retention.busy)
        return {"x": 1}

    manager.save(1, state={"looks": Called(look)})
    assert set(seen) == {frozenset({"step-1"})}
    assert not manager._retention.busy

    def fail() -> int:
        raise dcpx.StorageError("read the pointer")

    monkeypatch.setattr(manager._root, "take_order", fail)
    with pytest.raises(dcpx.StorageError):
        manager.save(1, user_content=1)
    assert not manager._retention.busy


def test_removals_before_a_commit_share_its_bound(tmp_path: Path, monkeypatch: Patch) -> None:
    bounds: dict[str, Any] = {}
    with manager_of(tmp_path, keep_last=1) as manager:
        files = manager._root.files
        for name in ("tidy", "write"):
            real = getattr(files, name)

            def noted(*args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
                bounds.setdefault(_name, BOUND.get())
                return _real(*args, **kwargs)

            monkeypatch.setattr(files, name, noted)
        save_steps(manager, 1)
    assert bounds["tidy"] is not None
    assert bounds["tidy"] is bounds["write"]
