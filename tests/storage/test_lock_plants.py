"""Something else in place of the lock file: nothing is written to it, and the error names it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support.saves import assert_whole, save
from support.states import mixed_state
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import StorageError

SECRET = b"somebody else's\n"


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's name is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


PLANTS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "socket": make_socket,
    "link": lambda path: path.symlink_to("../secret"),
    "dangling link": lambda path: path.symlink_to("../new"),
}


@pytest.mark.parametrize("kind", PLANTS)
def test_lock_file_that_is_no_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "ckpt").mkdir()
    PLANTS[kind](tmp_path / "ckpt" / ".dcpx.lock")
    with pytest.raises(CheckpointException) as caught:
        save(mixed_state(), tmp_path / "ckpt")
    error = caught.value.failures[0][0]
    assert type(error) is StorageError, repr(error)
    assert error.path == str(tmp_path / "ckpt" / ".dcpx.lock")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "secret"]
    assert (tmp_path / "secret").read_bytes() == SECRET
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == [".dcpx.lock"]


def test_lock_file_of_two_names_is_locked_and_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / ".dcpx.lock").hardlink_to(tmp_path / "secret")
    for _ in range(2):
        save(mixed_state(), tmp_path / "ckpt")
    assert (tmp_path / "secret").read_bytes() == SECRET
    assert "has 2 names" in caplog.text
    assert_whole(mixed_state(), tmp_path / "ckpt")
