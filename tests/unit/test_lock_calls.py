"""The save lock where single system calls on its file fail or do less than was asked."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torch_dcpx import StorageError, lock
from torch_dcpx.directory import Directory
from torch_dcpx.lock import SaveLock
from torch_dcpx.running_save import RunningSave

NAME = ".dcpx.lock"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    with Directory(tmp_path) as opened:
        yield opened


def taken(directory: Directory) -> SaveLock:
    return SaveLock(directory, NAME, RunningSave(taken))


@pytest.mark.usefixtures("no_leaks")
def test_record_is_whole_where_writes_are_short(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def half(fd: int, data: bytes, offset: int) -> int:
        return write(fd, data[: (len(data) + 1) // 2], offset)

    monkeypatch.setattr(lock.os, "pwrite", half)
    held = taken(directory)
    (line,) = (directory.path / NAME).read_text().splitlines()
    assert [part.split("=")[0] for part in line.split()] == ["host", "pid", "boot"]
    held.release()
    again = taken(directory)
    assert again.left_by == "this machine"
    again.release(has_ended_well=True)


@pytest.mark.usefixtures("no_leaks")
def test_lock_file_that_may_not_be_made_is_no_missing_file(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(lock.os, "open", refuse)
        with pytest.raises(StorageError) as caught:
            taken(directory)
    assert (caught.value.errno, caught.value.path) == (errno.EACCES, str(directory.path / NAME))
    taken(directory).release(has_ended_well=True)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("call", ["pread", "fstat"])
def test_lock_file_that_cannot_be_read_is_a_storage_error_and_leaves_nothing_held(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(lock.os, call, fail)
        with pytest.raises(StorageError) as caught:
            taken(directory)
    assert (caught.value.errno, caught.value.path) == (errno.EIO, str(directory.path / NAME))
    taken(directory).release(has_ended_well=True)
