"""Errors of close and of renames, as file systems that many nodes mount have them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import RunPython

from torch_dcpx import StorageError, _replacing
from torch_dcpx.integrations import _folder_place
from torch_dcpx.storage.directory import Directory, rename_path
from torch_dcpx.storage.publish import put

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
