"""Two jobs at one root as processes: who is refused, who is waited for, who needs no lock."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from root_jobs import (
    NEVER,
    PROOFS,
    Job,
    alarm,
    locks,
    manager_of,
    put,
    save,
    save_and_become_another,
    save_once,
    started,
)
from support.machine import seconds
from trainings import Log, Patch, damage, large

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager, ConcurrentSaveError, CorruptionError, StorageError
from torch_dcpx.manager.directory_root import DirectoryRoot
from torch_dcpx.storage import root_lock
from torch_dcpx.storage.holder import Holder
from torch_dcpx.storage.names import root_lock_name
from torch_dcpx.storage.root_record import FileRecord, identity_of

FLAGS = pytest.mark.parametrize("flags", [(), ("no-flock",)])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def start(*flags: str, root: Path = tmp_path, **values: float) -> Job:
        made.append(Job(root, *flags, **values))
        return made[-1]

    yield start
    for one in made:
        one.kill()


@pytest.fixture(autouse=True)
def _proofs(monkeypatch: Patch) -> None:
    for name, value in PROOFS.items():
        monkeypatch.setattr(root_lock, name, value)


def is_given_back(root: Path) -> bool:
    (name,) = locks(root)
    found = Holder.decoded((root / name).read_bytes())
    return found is not None and found.is_over


def is_refused(found: Any) -> bool:
    return bool(found["error"] == "ConcurrentSaveError")


@FLAGS
def test_second_live_job_is_refused_before_a_byte(tmp_path: Path, job: Any, flags: Any) -> None:
    def snapshot() -> dict[Path, bytes]:
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files if ".dcpx.root." not in path.name}

    first, second = job(*flags), job(*flags)
    assert first.tell("save 1") is None
    before = snapshot()
    found = second.tell("save 2")
    assert is_refused(found), found
    owner = f"host={socket.gethostname()} pid={first.process.pid} since=20"
    assert found["owner"].startswith(owner)
    assert found["owner"] in found["text"]
    assert "a root of its own" in found["text"]
    assert snapshot() == before
    assert second.tell("resume") == 1
    assert first.tell("save 3") is None
    assert first.tell("close") is None
    assert second.tell("save 4") is None
    assert len(locks(tmp_path)) == 1


@FLAGS
def test_job_that_is_restarted_here_waits_for_no_killed_one(job: Any, flags: Any) -> None:
    first = job(*flags)
    assert first.tell("save 1") is None
    first.process.send_signal(signal.SIGKILL)
    second = job(*flags)  # also where nobody has waited for the killed one
    assert second.tell("resume") == 1
    assert second.tell("save 2") is None


def test_job_that_is_about_to_end_is_waited_for(job: Any) -> None:
    first, second = job(), job(_ENDING_S=NEVER, _LIMIT_S=NEVER)
    assert first.tell("save 1") is None
    pid = first.process.pid
    end = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    end.start()
    assert second.tell("save 2") is None
    end.join()


def test_stopped_job_on_this_machine_is_not_gone(job: Any) -> None:
    first, second = job(), job(_GONE_S=0.0)
    assert first.tell("save 1") is None
    first.process.send_signal(signal.SIGSTOP)
    assert is_refused(second.tell("save 2"))
    first.process.send_signal(signal.SIGCONT)
    assert first.tell("save 3") is None


def test_who_only_reads_needs_no_lock(tmp_path: Path, job: Any) -> None:
    first = job()
    assert first.tell("save 1") is None
    held = locks(tmp_path)
    manager = manager_of(tmp_path)
    assert manager.resume(state={"x": torch.zeros(8)}).step == 1
    assert (manager.tags(), manager.latest()) == (["step-1"], "step-1")
    manager.pin(1)
    manager.unpin(1)
    assert dcpx.verify(tmp_path / "step-1").ok
    assert locks(tmp_path) == held
    assert first.tell("save 2") is None
    manager.delete(1)  # the pointer stays
    with pytest.raises(ConcurrentSaveError, match="another job's manager saves there"):
        save(manager, 3)
    assert first.tell("save 4") is None
    with pytest.raises(ConcurrentSaveError, match="another job's manager saves there"):
        manager.delete(4)
    assert manager.tags() == ["step-2", "step-4"]


@FLAGS
def test_copy_of_a_live_root_is_a_root_of_its_own(tmp_path: Path, job: Any, flags: Any) -> None:
    first = job(*flags)
    assert first.tell("save 1") is None
    for name, how in (("copies", shutil.copy2), ("links", os.link)):
        copied, left = tmp_path / name, shutil.ignore_patterns("copies", "links")
        shutil.copytree(tmp_path, copied, copy_function=how, ignore=left)
        with manager_of(copied) as manager:
            save(manager, 2)
            assert locks(copied) == [root_lock_name(2)]
            assert first.tell("save 1") is None
            save(manager, 4)
        assert manager_of(copied).tags() == ["step-1", "step-2", "step-4"]


def test_reader_notes_damage_if_it_can_hold_the_root(tmp_path: Path, job: Any, caplog: Log) -> None:
    with manager_of(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state={"x": large(step)})
    damage(tmp_path / "step-2")
    other, pointer = job(_ENDING_S=NEVER), tmp_path / "newest"
    assert other.tell("save 3") is None
    before = pointer.read_bytes()
    with alarm():
        reader = manager_of(tmp_path)
        with pytest.raises(CorruptionError):
            reader.resume(state={"x": large(0)}, tag=2)
        reader._root.tell_damaged()
    assert "later jobs are not told what is damaged" in caplog.text
    assert (pointer.read_bytes(), len(locks(tmp_path))) == (before, 1)
    assert other.tell("close") is None
    reader._root.tell_damaged()
    assert b"damaged" in pointer.read_bytes()
    assert job().tell("save 4") is None


def test_delete_holds_the_root_for_its_call_only(tmp_path: Path, job: Any) -> None:
    with manager_of(tmp_path) as manager:
        save(manager, 1)
        save(manager, 2)
    manager = manager_of(tmp_path)
    manager.delete(2)
    assert job().tell("save 3") is None


def test_child_neither_holds_nor_frees_the_root(tmp_path: Path, job: Any) -> None:
    manager = manager_of(tmp_path)
    save(manager, 1)
    held = manager._root.files.lock._held
    assert held is not None
    assert isinstance(held.record, FileRecord)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert held.record._fd < 0  # else it would outlive the parent's process by its flock
            save(manager_of(tmp_path), 2)
        except ConcurrentSaveError as error:
            code = 0 if f"pid={os.getppid()} " in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_refused(job().tell("save 3"))
    save(manager, 4)


def test_end_of_the_process_frees_the_root_for_other_machines(tmp_path: Path, job: Any) -> None:
    one = job()
    assert one.tell("save 1") is None
    one.end()
    assert is_given_back(tmp_path)


def test_holder_that_becomes_another_program_by_exec_is_gone(tmp_path: Path) -> None:
    if identity_of(tmp_path).endswith("@0"):
        pytest.skip("this file system has no id: its flocks prove nothing")
    reads, asks = os.pipe()
    answers, writes = os.pipe()
    with os.fdopen(reads) as stdin, os.fdopen(writes, "w") as out:
        other = started(save_and_become_another, tmp_path, stdin=stdin, out=out)
    with os.fdopen(answers) as lines, os.fdopen(asks, "w"):
        assert lines.readline() == "done\n"
        save(manager_of(tmp_path), 2)
        assert other.poll() is None
    assert other.wait(seconds(60)) == 0


def test_holder_of_the_root_by_another_mount_lives(tmp_path: Path, job: Any) -> None:
    """FUSE shows the inode without an id of the file system, and not the flock."""
    one = job(root=tmp_path / "other")
    inode, pid = identity_of(tmp_path).partition("@")[0], one.process.pid
    holder = Holder.own(f"{inode}@other")._replace(pid=pid, start="", has_flock=True)
    put(tmp_path, holder._replace(token="other"))
    with pytest.raises(ConcurrentSaveError, match=f"pid={pid} "):
        save(manager_of(tmp_path), 1)
    assert locks(tmp_path) == [root_lock_name(1)]
    one.kill()
    save_once(tmp_path)


def test_managers_of_one_process_share_the_root(tmp_path: Path, job: Any) -> None:
    one, other = manager_of(tmp_path), manager_of(tmp_path)
    save(one, 1)
    save(other, 2)
    one.close()
    third = job()
    assert is_refused(third.tell("save 3"))
    save(other, 3)
    other.close()
    other.close()
    assert third.tell("save 4") is None


def test_pointer_that_is_begun_behind_the_lock_stays(tmp_path: Path, monkeypatch: Patch) -> None:
    save(manager_of(tmp_path), 1)
    gc.collect()
    files = manager_of(tmp_path)._root.files
    old, new = (tmp_path / f"newest.{digit * 12}.tmp" for digit in "ab")
    old.touch()

    def take(_: float) -> bool:
        new.touch()  # by another manager of this process, which has a share at once
        return True

    monkeypatch.setattr(files.lock, "take", take)
    files.hold(1.0)
    assert (old.exists(), new.exists()) == (False, True)


def test_two_managers_commit_at_once(tmp_path: Path) -> None:
    """Neither removes the other's pointer, half-way written."""
    failed: list[BaseException] = []

    def train(manager: CheckpointManager, begin: int) -> None:
        try:
            for step in range(begin, begin + 20):
                save(manager, step)
        except BaseException as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    begins = (0, 100)
    threads = [threading.Thread(target=train, args=(manager_of(tmp_path), at)) for at in begins]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds(120))
    assert not failed, failed
    assert len(manager_of(tmp_path).tags()) == 40


@pytest.mark.parametrize("how", ["", "async", "handle", "async handle", "fails"])
def test_dropped_manager_frees_the_root(
    tmp_path: Path, job: Any, how: str, monkeypatch: Patch
) -> None:
    def fails(*_: object) -> None:
        raise StorageError("it fails", errno=errno.EIO)

    manager = manager_of(tmp_path, async_save="async" in how or how == "fails")
    if how == "fails":
        monkeypatch.setattr(DirectoryRoot, "check_save", fails)
    handle = manager.save(1, state={"x": torch.ones(8)})
    if how == "fails":
        assert isinstance(handle.exception(), StorageError)
        dcpx.wait()
    else:
        handle.result()
        manager.wait()  # the removal of old checkpoints has it
    if "handle" not in how:
        del handle
    del manager
    gc.collect()
    assert job().tell("save 2") is None


def test_dropped_manager_gives_its_root_back_without_a_collection(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, keep_last=1)
    gc.disable()
    try:
        save(manager, 1)
        manager.wait()
        del manager
        save_once(tmp_path, 2)
        assert is_given_back(tmp_path)
    finally:
        gc.enable()


def test_root_that_was_removed_is_taken_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    manager = manager_of(root)
    save(manager, 1)
    root.rename(tmp_path / "away")
    save(manager, 2)
    assert manager.tags() == ["step-2"]
    for name in locks(root):
        (root / name).unlink()
    save(manager, 3)
    assert locks(root) == [root_lock_name(1)]


def test_root_that_was_copied_by_hard_links_is_free(tmp_path: Path) -> None:
    manager = manager_of(tmp_path / "root")
    save(manager, 1)
    shutil.copytree(tmp_path / "root", tmp_path / "copy", copy_function=os.link)
    with manager_of(tmp_path / "copy") as other:
        save(other, 2)
        assert other.tags() == ["step-1", "step-2"]
    save(manager, 3)
    assert manager.tags() == ["step-1", "step-3"]


@pytest.mark.parametrize("goes_on", [True, False])
def test_renamed_root_is_given_back(tmp_path: Path, goes_on: bool) -> None:
    root, away = tmp_path / "run", tmp_path / "run.old"
    manager = manager_of(root)
    save(manager, 1)
    root.rename(away)
    if goes_on:
        save(manager, 2)
    else:
        manager.close()
    assert is_given_back(away)
    with manager_of(away) as other:
        save(other, 3)
