"""flock, and what stands for it where there is none."""

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

import torch_dcpx
from torch_dcpx import CheckpointManager
from torch_dcpx.integrations._dcp_calls import Part
from torch_dcpx.integrations._folders import FolderSaves
from torch_dcpx.storage import flock
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
