"""flock, close and rename where they fail, as on file systems that many nodes mount."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RunPython

import torch_dcpx
from torch_dcpx import CheckpointManager, StorageError, _replacing
from torch_dcpx.integrations import _folder_place
from torch_dcpx.integrations._dcp_calls import Part
from torch_dcpx.integrations._folders import FolderSaves
from torch_dcpx.storage import flock
from torch_dcpx.storage.directory import Directory, rename_path
from torch_dcpx.storage.publish import put

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    with (tmp_path / "file").open("wb") as file:
        yield file.fileno()


def test_file_system_without_locks_is_told_and_a_lock_of_somebody_is_one_error(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in NO_LOCKS:
        monkeypatch.setattr(fcntl, "flock", failing(number))
        error = flock.take(fd, fcntl.LOCK_EX)
        assert error is not None and error.errno == number
        flock.give_back(fd)
    for number in (errno.EWOULDBLOCK, errno.EACCES):
        monkeypatch.setattr(fcntl, "flock", failing(number))
        with pytest.raises(BlockingIOError):
            flock.take(fd, fcntl.LOCK_EX)


def test_file_that_nfs_cannot_lock_is_one_that_may_not_be_written(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.EBADF))
    assert flock.take(fd, fcntl.LOCK_EX, is_writable=False) is not None
    with pytest.raises(OSError, match="Bad file"):
        flock.take(fd, fcntl.LOCK_EX)


def test_other_failures_are_raised_and_a_return_never_fails(
    fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        flock.take(fd, fcntl.LOCK_EX)
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        flock.give_back(fd)
    assert "closing its file alone" in caplog.text


def _folder(path: Path) -> None:
    saves = FolderSaves("save", None)
    target = saves.begin(lambda: path)
    saves.commit([Part({"a": torch.ones(3)}, target / "model")], list).result()


def _managed(path: Path) -> None:
    with CheckpointManager(path, keep_last=1, no_dist=True) as manager:
        for step in (1, 2):
            manager.save(step, model=torch.nn.Linear(2, 2))
        manager.wait()
        assert manager.tags() == ["step-2"]


DOORS: dict[str, Callable[[Path], Any]] = {
    "save": lambda path: torch_dcpx.save({"a": torch.ones(3)}, path, no_dist=True),
    "manager": _managed,
    "export": lambda path: torch_dcpx.export(
        torch.nn.Linear(2, 2), path, no_dist=True, overwrite=True
    ),
    "folder": _folder,
    "file": lambda path: put(path, b"content"),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_saves_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    for _ in range(2):
        DOORS[door](tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]


# No handler of logging is set up, as in most programs: warnings would go to stderr.
STALE = """
import errno, os, sys
import torch, torch_dcpx

real, stale = os.close, []

def close(fd):
    there = os.readlink(f"/proc/self/fd/{fd}")
    real(fd)
    if there.startswith(os.getcwd()) and not there.endswith(".tmp"):
        stale.append(there)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

state = {"a": torch.arange(9)}
os.close = close
torch_dcpx.save(state, "ckpt", no_dist=True)
torch_dcpx.load(state, "ckpt", no_dist=True)
assert len(stale) > 3, stale
"""


def test_close_that_loses_nothing_prints_nothing_where_it_fails(run_warm: RunPython) -> None:
    assert run_warm(STALE).stderr == ""


def test_file_whose_last_bytes_are_refused_at_its_close_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems in user space send a file off when it is closed."""
    put(tmp_path / "file", b"old")
    real = os.close

    def close(fd: int) -> None:
        is_written = os.readlink(f"/proc/self/fd/{fd}").endswith(".tmp")
        real(fd)
        if is_written:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        with pytest.raises(StorageError) as caught:
            put(tmp_path / "file", b"new")
    assert caught.value.errno == errno.EDQUOT
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def _of_directory(old: Path, new: Path) -> None:
    with Directory(old.parent) as directory:
        directory.rename(old.name, new.name)


def _without_replacing(old: Path, new: Path) -> None:
    with Directory(old.parent) as directory:
        directory.rename(old.name, new.name, replaces=False)


RENAMES: dict[str, Callable[[Path, Path], None]] = {
    "of a directory": _of_directory,
    "to a new name": _without_replacing,
    "of a checkpoint that goes": rename_path,
    "of a folder that goes": lambda old, _: _folder_place._remove_new(old),
    "of two": _replacing.exchange,
}


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES.keys())
def test_rename_that_fails_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rename: Callable[[Path, Path], None]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "old")

    monkeypatch.setattr(os, "rename", fail)
    monkeypatch.setattr(_replacing, "rename_new", fail)
    old, new = tmp_path / "old", tmp_path / "new"  # neither is there
    with pytest.raises(OSError, match="old") as caught:
        rename(old, new)
    assert caught.value.errno in (errno.EIO, errno.ENOENT)
    assert str(new) in str(caught.value) or "/.dcpx." in str(caught.value)
