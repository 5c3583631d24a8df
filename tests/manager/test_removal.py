"""A removal in the middle of what others do: pins, saves, loads, links; its order; its leavings."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from conftest import RunPython
from root_jobs import die_in_delete, die_in_own_save, die_in_save, started
from support.machine import seconds
from trainings import Log, Patch, contents, manager_of, on_disk, save_steps

from torch_dcpx import ConcurrentSaveError, StorageError, UnsupportedError, WriteOptions
from torch_dcpx.manager import removal
from torch_dcpx.manager.directory_root import DirectoryRoot
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.reader_lock import being_deleted, being_read
from torch_dcpx.storage.running_save import RunningSave
from torch_dcpx.storage.save_lock import SaveLock, boot_id


@pytest.fixture
def patch(monkeypatch: Patch) -> Any:
    return monkeypatch.setattr


def test_data_go_behind_their_metadata_durably(tmp_path: Path, patch: Any) -> None:
    calls: list[tuple[str, str]] = []

    def watched(name: str) -> Any:
        call = getattr(Directory, name)

        def noting(self: Directory, *args: str) -> Any:
            if self.path.name == "step-1" or self.path.name.startswith(".dcpx.trash."):
                calls.append((name, args[0] if args else ""))
            return call(self, *args)

        return noting

    manager = manager_of(tmp_path, options=WriteOptions(workers=1, slot_bytes=256 << 10))
    save_steps(manager, 1, 2)
    for name in ("rename", "unlink", "sync"):
        patch(Directory, name, watched(name))
    manager.delete(1)
    data = [call for call in calls if call[1].endswith(".distcp")]
    small = [call for call in calls if call[1].startswith(".dcpx.")]
    assert calls == [("rename", ".metadata"), ("sync", ""), *data, ("sync", ""), *small] and data
    assert on_disk(tmp_path) == {"step-2"}


def test_nothing_goes_where_the_root_keeps_the_entry(tmp_path: Path, patch: Any) -> None:
    manager = manager_of(tmp_path)
    save_steps(manager, 1, 2)
    before = {file.name for file in (tmp_path / "step-1").iterdir()}
    tmp_path.chmod(0o555)
    if os.geteuid() == 0:  # who may do all
        patch(os, "access", lambda path, *_, **__: Path(path) != tmp_path)
    with pytest.raises(StorageError, match=r"may not write to .* nothing was removed") as info:
        manager.delete(1)
    tmp_path.chmod(0o755)
    assert (info.value.errno, info.value.path) == (errno.EACCES, str(tmp_path))
    assert {file.name for file in (tmp_path / "step-1").iterdir()} == before
    assert manager.tags() == ["step-1", "step-2"]


def test_trash_goes_when_no_lock_of_it_is_open(tmp_path: Path, patch: Any) -> None:
    """NFS and FUSE rename what is open; the real thing is in `test_fuse.py`."""
    seen: list[set[str]] = []
    unlink = Directory.unlink

    def noting(self: Directory, name: str) -> None:
        if ".trash." in str(self.path):
            links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            targets = [os.readlink(link) for link in links if os.path.lexists(link)]
            seen.append({target for target in targets if "/.dcpx.trash." in target})
        unlink(self, name)

    manager = manager_of(tmp_path)
    save_steps(manager, 1, 2)
    patch(Directory, "unlink", noting)
    manager.delete(1)
    assert len(seen) == 3 and on_disk(tmp_path) == {"step-2"}
    assert all(len(targets) == 1 for targets in seen), seen  # the directory itself


def test_save_that_opened_what_goes_does_not_save_to_trash(tmp_path: Path, patch: Any) -> None:
    manager = manager_of(tmp_path)
    save_steps(manager, 1, 2)
    refused: list[ConcurrentSaveError] = []
    remove = removal._remove_trash

    def late(path: Path) -> None:
        with pytest.raises(ConcurrentSaveError, match="being deleted") as caught:
            SaveLock(opened, ".dcpx.lock", RunningSave(late))
        refused.append(caught.value)
        remove(path)

    patch(removal, "_remove_trash", late)
    with Directory(tmp_path / "step-1") as opened:
        manager.delete(1)
    (error,) = refused
    assert (error.errno, error.path) == (errno.EBUSY, str(tmp_path / "step-1"))
    assert on_disk(tmp_path) == {"step-2"}


def test_two_removals_at_once_are_one(tmp_path: Path, monkeypatch: Patch, caplog: Log) -> None:
    first, second = manager_of(tmp_path), manager_of(tmp_path)
    save_steps(first, 1, 2)
    remove, rmdir = removal._remove_trash, os.rmdir
    depth: list[str] = []

    def with_another(path: Path) -> None:
        """Between the locks and the trash, and between its emptying and its rmdir."""
        if not depth:
            depth.append("outer")
            second._retention.run()
        remove(path)

    def late(path: Path) -> None:
        if depth == ["outer"]:
            depth.append("rmdir")
            remove(path)
        rmdir(path)

    with monkeypatch.context() as patch:
        patch.setattr(removal, "_remove_trash", with_another)
        patch.setattr(os, "rmdir", late)
        first.delete(1)
    assert depth == ["outer", "rmdir"]
    assert on_disk(tmp_path) == {"step-2"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_pin_between_the_choice_and_the_removal_holds(tmp_path: Path, patch: Any) -> None:
    manager = manager_of(tmp_path, keep_last=1)
    save_steps(manager, 1)
    remove = DirectoryRoot.remove

    def pinned_first(root: DirectoryRoot, tag: str) -> None:
        manager.pin(tag)
        remove(root, tag)

    patch(DirectoryRoot, "remove", pinned_first)
    save_steps(manager, 2)
    assert manager.tags() == ["step-1", "step-2"]
    with pytest.raises(UnsupportedError, match="pinned"):
        manager.delete(1)


def test_what_is_being_deleted_cannot_be_pinned(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    save_steps(manager, 1)
    with being_deleted(tmp_path / "step-1"):
        with being_read(tmp_path / "step-1") as is_left_alone:
            assert not is_left_alone
        with pytest.raises(ConcurrentSaveError, match="being deleted"):
            manager.pin(1)
    assert not (tmp_path / "step-1" / ".dcpx.pin").exists()
    manager.pin(1)


def test_newest_that_could_not_be_deleted_is_the_newest(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    save_steps(manager, 1, 2)
    with being_read(tmp_path / "step-2"), pytest.raises(ConcurrentSaveError, match="reads"):
        manager.delete(2)
    assert manager.latest() == manager_of(tmp_path).latest() == "step-2"
    manager.delete(2)
    assert manager.latest() == manager_of(tmp_path).latest() == "step-1"


def test_save_waits_for_the_removal_of_what_lay_there(tmp_path: Path, patch: Any) -> None:
    """With keep_last=1 and two tags in turn, each save is to where the last but one goes."""
    manager = manager_of(tmp_path, keep_last=1)
    manager.save("a", step=1, user_content=0)
    asked = threading.Event()
    failed: list[BaseException] = []
    one_run, empty = manager._retention._one_run, removal._empty

    def told(doing: str) -> AbstractContextManager[None]:
        """Tells who comes to wait for the run under way."""
        if threading.current_thread() is again:
            asked.set()
        return one_run(doing)

    def save_again() -> None:
        try:
            manager.save("a", step=3, user_content=0)
        except BaseException as error:  # noqa: BLE001 - looked at below
            failed.append(error)
        finally:
            asked.set()

    again = threading.Thread(target=save_again)

    def emptied(*args: Any) -> Any:
        if again.ident is None:
            again.start()
            assert asked.wait(seconds(60))
        return empty(*args)

    patch(manager._retention, "_one_run", told)
    patch(removal, "_empty", emptied)
    manager.save("b", step=2, user_content=0)
    manager._retention.wait()
    again.join(seconds(60))
    manager.wait()
    assert not failed, failed
    assert manager_of(tmp_path).resume().step == 3


def test_two_saves_to_a_tag_reserve_it_twice(tmp_path: Path) -> None:
    kept = manager_of(tmp_path)._retention
    kept.reserve("a")
    kept.reserve("a")
    kept.free("a")
    assert kept.busy == {"a"}
    kept.free("a")
    kept.free("a")  # a rank that is no coordinator reserves none
    assert kept.busy == frozenset()


def test_link_in_place_of_a_directory_on_its_way_out_is_not_followed(tmp_path: Path) -> None:
    manager = manager_of(tmp_path / "root", keep_last=1)
    save_steps(manager, 1)
    other = tmp_path / "other"
    other.mkdir()
    (other / ".dcpx.pin").write_text("")
    (tmp_path / "root" / ".dcpx.trash.abc").symlink_to(other)
    save_steps(manager, 2)
    assert [path.name for path in other.iterdir()] == [".dcpx.pin"]
    assert manager.tags() == ["step-2"]


def test_process_that_ends_without_close_ends_well(tmp_path: Path, run_warm: RunPython) -> None:
    """The interpreter's end waits for the removal behind the last save, too."""
    code = (
        "import sys, torch, torch_dcpx as dcpx\n"
        "manager = dcpx.CheckpointManager('root', keep_last=1)\n"
        "for step in range(5): manager.save(step, state={'x': torch.zeros(3)})"
    )
    run_warm(code, timeout_s=120)
    assert on_disk(tmp_path / "root") == {"step-4"}
    assert manager_of(tmp_path / "root").latest() == "step-4"


def killed(function: Callable[..., None], root: Path, tag: str) -> None:
    assert started(function, root, tag).wait(seconds(120)) == -signal.SIGKILL


def goes_on(root: Path, step: int, keep_last: int | None = None) -> set[str]:
    """Saves as the next job does. Returns what is left."""
    with manager_of(root, keep_last=keep_last) as manager:
        save_steps(manager, step)
    return on_disk(root)


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
def test_leavings_of_earlier_versions_go_if_named_as_steps(
    tmp_path: Path, tag: str, goes: bool
) -> None:
    goes_on(tmp_path, 1)
    killed(die_in_save, tmp_path, tag)
    (tmp_path / tag / ".dcpx.lock").write_text(f"host=me pid={os.getpid()} boot={boot_id()}\n")
    assert (tag not in goes_on(tmp_path, 3, 3)) is goes
