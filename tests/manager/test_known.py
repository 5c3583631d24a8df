"""A resume goes not behind a known commit, and begins anew only where no save has made anything."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from support.async_saves import gated
from support.machine import seconds
from trainings import Log, Patch, manager_of, save_steps, warnings_of

import torch_dcpx as dcpx
from torch_dcpx.manager import state as manager_state
from torch_dcpx.manager.content import encode_content
from torch_dcpx.manager.stored import Record


@pytest.mark.parametrize("evidence", ["newest", "step-3/.dcpx.readers", "step-3/.metadata"])
def test_nothing_begins_anew_where_a_commit_left_a_trace(
    tmp_path: Path, evidence: str, caplog: Log
) -> None:
    save_steps(manager_of(tmp_path), 3)
    for trace in (
        "newest",
        *(f"step-3/{x}" for x in (".dcpx.readers", ".metadata", "__0_0.distcp")),
    ):
        if trace != evidence:
            (tmp_path / trace).unlink()
    with pytest.raises(dcpx.StorageError, match=r"'step-3'.*is not found whole.*allow_older"):
        manager_of(tmp_path, allow_fresh=True).resume()
    assert manager_of(tmp_path, allow_fresh=True, allow_older=True).resume().is_fresh
    assert "allow_older=True: a fresh start" in caplog.text


def test_nothing_begins_anew_where_a_pointer_cannot_be_read(tmp_path: Path, caplog: Log) -> None:
    save_steps(manager_of(tmp_path), 3)
    shutil.rmtree(tmp_path / "step-3")
    (tmp_path / "newest").write_bytes(b"<html>sign in</html>")
    for more in ({}, {"allow_fresh": True}, {"allow_older": True}):
        with pytest.raises(dcpx.StorageError, match=r"'newest' is there .*allow_older") as e:
            manager_of(tmp_path, **more).resume()
        assert e.value.errno == errno.EIO and e.value.path == str(tmp_path / "newest")
    assert manager_of(tmp_path, allow_fresh=True, allow_older=True).resume().is_fresh
    assert "allow_older=True: a fresh start" in caplog.text
    save_steps(manager_of(tmp_path), 4)
    assert manager_of(tmp_path).resume().tag == "step-4"


def test_newest_that_has_only_its_lock_file_left_is_not_passed_over(tmp_path: Path) -> None:
    save_steps(manager_of(tmp_path), 2, 3)
    (tmp_path / "newest").unlink()
    (tmp_path / "step-3" / ".metadata").unlink()
    with pytest.raises(dcpx.StorageError, match="'step-3' holds files of a commit"):
        manager_of(tmp_path).resume()
    assert manager_of(tmp_path, allow_older=True).resume().tag == "step-2"


def test_what_was_renamed_or_removed_by_a_manager_is_not_missing(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    save_steps(manager, 1, 2, 3)
    (tmp_path / "step-3" / "notes.txt").write_text("mine")  # so that the directory stays
    manager.delete(3)
    with pytest.raises(dcpx.DcpxError, match="step-3"):
        manager.delete(3)
    assert (tmp_path / "step-3").is_dir()
    assert manager_of(tmp_path).resume().tag == "step-2"
    (tmp_path / "step-2").rename(tmp_path / "best")
    assert manager_of(tmp_path).resume().tag == "step-1"


def test_save_to_what_lies_beneath_a_mount_that_is_gone_is_refused(tmp_path: Path) -> None:
    root, theirs, beneath = tmp_path / "root", Path(mkdtemp(dir="/dev/shm")), tmp_path / "beneath"
    beneath.mkdir()
    try:
        root.symlink_to(theirs)
        with manager_of(root) as manager:
            save_steps(manager, 1, 2)
            root.unlink()
            root.symlink_to(beneath)
            for _ in range(2):
                with pytest.raises(
                    dcpx.StorageError, match=r"on another file system.*mount theirs"
                ):
                    save_steps(manager, 3)
            assert list(beneath.iterdir()) == []
            root.unlink()
            root.symlink_to(theirs)
            save_steps(manager, 3)
            assert manager.tags() == ["step-1", "step-2", "step-3"]
    finally:
        shutil.rmtree(theirs)


@pytest.mark.parametrize(
    "lie",
    [{"metrics": {"loss": 10**400}}, {"ranks": 10**18}, {"ranks": -1}, {"metrics": [1]},
     {"per_rank": [1]}, {"step": "1"}],
    ids="".join,
)  # fmt: skip
def test_record_that_lies_is_skipped(
    tmp_path: Path, lie: dict[str, Any], monkeypatch: Patch
) -> None:
    save_steps(manager_of(tmp_path), 1)
    with monkeypatch.context() as patch:
        patch.setattr(
            Record, "encoded", lambda self: json.dumps({"format": 1, **self._asdict(), **lie})
        )
        save_steps(manager_of(tmp_path), 2)
    info = manager_of(tmp_path).resume()
    assert info.tag == "step-1"
    assert [tag for tag, _ in info.skipped] == ["step-2"]
    with pytest.raises(dcpx.CorruptionError, match="no record"):
        manager_of(tmp_path).resume(tag=2)


def cyclic() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    "stored",
    [cyclic(), {"__dcpx_per_rank__": "elsewhere"}, {"__dcpx_per_rank__": []}, {}],
    ids=["cycle", "unknown", "unhashable", "nothing"],
)
def test_content_that_no_manager_saves_is_corrupt(
    tmp_path: Path, stored: Any, monkeypatch: Patch
) -> None:
    def lying(value: Any) -> bytes:
        is_own = "user_content.a" in value
        return encode_content(stored if is_own == (stored == {}) else value)

    with monkeypatch.context() as patch:
        patch.setattr(manager_state, "encode_content", lying)
        content = {"a": dcpx.PerRank(1)}
        manager_of(tmp_path).save(1, state={"x": torch.zeros(1)}, user_content=content)
    with pytest.raises(dcpx.CorruptionError, match="not what a manager saves") as info:
        manager_of(tmp_path).resume()
    assert info.value.fqn in ("dcpx.user_content", "dcpx.rank.0")


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
    with pytest.raises(dcpx.NotCommittedError, match="checkpoint itself") as told:
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
    dcpx.save({"x": torch.zeros(3)}, tmp_path / "elsewhere", no_dist=True)
    fill_with_foreign(root)
    STOPS[what](root)
    with pytest.raises(dcpx.NotCommittedError, match="allow_fresh=True") as info:
        manager_of(root).resume(state={"x": torch.zeros(3)})
    assert "notes.txt" not in str(info.value) and "of 1 entry" in str(info.value)
    assert manager_of(root, allow_fresh=True).resume(state={"x": torch.zeros(3)}).is_fresh


def test_save_under_way_is_no_broken_checkpoint(tmp_path: Path, caplog: Log) -> None:
    gate, options = gated(max_in_flight=2)
    with dcpx.CheckpointManager(tmp_path, options=options) as manager:
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
