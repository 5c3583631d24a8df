"""The save lock where calls on its file fail or do less than was asked, or it is no such file."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import RunPython
from support.machine import seconds
from support.saves import assert_whole, save
from support.states import mixed_state
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import ConcurrentSaveError, StorageError
from torch_dcpx.storage import save_lock as lock
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.running_save import RunningSave
from torch_dcpx.storage.save_lock import SaveLock

NAME = ".dcpx.lock"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    with Directory(tmp_path) as opened:
        yield opened


def taken(directory: Directory) -> SaveLock:
    return SaveLock(directory, NAME, RunningSave(taken))


@pytest.mark.usefixtures("no_leaks")
def test_record_is_whole_where_writes_are_short_and_left_out_where_they_move_nothing(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, answers = os.pwrite, iter([0] * 10)  # a file system in user space may say so

    def half(fd: int, data: bytes, offset: int) -> int:
        return write(fd, data[: (len(data) + 1) // 2], offset)

    with monkeypatch.context() as patch:
        patch.setattr(lock.os, "pwrite", lambda *_: next(answers))
        held = taken(directory)
        assert held.is_held
        held.release(has_ended_well=True)
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
        patch.setattr(os, "open", refuse)
        with pytest.raises(StorageError) as caught:
            taken(directory)
    assert (caught.value.errno, caught.value.path) == (errno.EACCES, str(directory.path / NAME))
    taken(directory).release(has_ended_well=True)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("call", ["pread", "fstat", "flock"])
def test_lock_file_that_cannot_be_read_or_locked_is_a_storage_error_and_leaves_nothing_held(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(lock.fcntl if call == "flock" else lock.os, call, fail)
        with pytest.raises(StorageError) as caught:
            taken(directory)
    assert (caught.value.errno, caught.value.path) == (errno.EIO, str(directory.path / NAME))
    taken(directory).release(has_ended_well=True)


def is_free(directory: Directory) -> bool:
    """Whether another process would get the lock."""
    with (directory.path / NAME).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("left", ["", "host=elsewhere pid=1 boot=old"])
def test_lock_of_somebody_who_may_only_read_is_refused_with_pid_and_host(
    directory: Directory, left: str
) -> None:
    """Its holder wrote no record; what is there is of a save that was killed."""
    (directory.path / NAME).write_text(left)
    with (directory.path / NAME).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(ConcurrentSaveError) as caught:
            taken(directory)
    owner = caught.value.owner
    assert owner is not None and owner in str(caught.value)
    assert owner.startswith(f"host={socket.gethostname()} pid={os.getpid()}") and left in owner
    taken(directory).release(has_ended_well=True)


@pytest.mark.parametrize(
    "locks",
    [None, "", "no such line\n", "1: FLOCK  ADVISORY  WRITE 0 00:00:1 0 EOF\n",
     "1: -> FLOCK  ADVISORY  WRITE 77 {at} 0 EOF\n2: POSIX  ADVISORY  READ 78 {at} 0 EOF\n"],
)  # fmt: skip
def test_holder_that_the_system_does_not_tell_is_named_by_the_lock_file(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, locks: str | None
) -> None:
    def read_text(path: Path) -> str:
        assert path == Path("/proc/locks")
        if locks is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        status = (directory.path / NAME).stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        return locks.format(at=f"{device}:{status.st_ino}")

    (directory.path / NAME).write_text("host=elsewhere pid=1 boot=old\n")
    with (directory.path / NAME).open("rb") as file, monkeypatch.context() as patch:
        fcntl.flock(file, fcntl.LOCK_EX)
        patch.setattr(Path, "read_text", read_text)
        with pytest.raises(ConcurrentSaveError) as caught:
            taken(directory)
    assert caught.value.owner == "host=elsewhere pid=1 boot=old"


@pytest.mark.usefixtures("no_leaks")
def test_signal_in_the_middle_of_a_release_does_not_leave_the_lock_to_nobody(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = fcntl.flock, 0

    def flock(fd: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        real(fd, operation)

    held = taken(directory)
    with monkeypatch.context() as patch:
        patch.setattr(lock.fcntl, "flock", flock)
        with pytest.raises(KeyboardInterrupt):
            held.release()
    assert is_free(directory)
    assert lock._held == {}


@pytest.mark.usefixtures("no_leaks")
def test_record_is_emptied_while_its_file_is_open(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may give the lock of a save that is over back: not in the middle of this."""
    real, was_open = os.ftruncate, []
    held = taken(directory)
    other = threading.Thread(target=held.release)

    def truncate(fd: int, nbytes: int) -> None:
        other.start()
        other.join(0.1)  # it waits for this one, or was not kept from closing the file
        was_open.append(os.path.exists(f"/proc/self/fd/{fd}"))
        real(fd, nbytes)

    monkeypatch.setattr(lock.os, "ftruncate", truncate)
    held.release(has_ended_well=True)
    other.join(seconds(60))
    assert was_open == [True]
    assert (directory.path / NAME).read_bytes() == b""


# ---- Something else in place of the lock file ----------------------------------------------------

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


def test_lock_file_that_is_no_file_is_refused_by_name(tmp_path: Path) -> None:
    for kind, plant in PLANTS.items():
        path = tmp_path / kind / "ckpt"
        path.mkdir(parents=True)
        (tmp_path / kind / "secret").write_bytes(SECRET)
        plant(path / NAME)
        with pytest.raises(CheckpointException) as caught:
            save(mixed_state(), path)
        error = caught.value.failures[0][0]
        assert type(error) is StorageError, repr(error)
        assert error.path == str(path / NAME)
        assert sorted(os.listdir(path.parent)) == ["ckpt", "secret"]
        assert (tmp_path / kind / "secret").read_bytes() == SECRET
        assert os.listdir(path) == [NAME]


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


FORKED = """
import fcntl, os, sys, threading, time
from pathlib import Path
from torch_dcpx.storage import save_lock as lock
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.running_save import RunningSave
real, held = fcntl.flock, []
taken, go_on = threading.Event(), threading.Event()
def flock(fd, operation):
    real(fd, operation)
    if operation & fcntl.LOCK_EX:
        taken.set()
        assert go_on.wait(600)
lock.fcntl.flock = flock
directory = Directory(Path(sys.argv[1]))
take = lambda: held.append(lock.SaveLock(directory, ".dcpx.lock", RunningSave(take)))
thread = threading.Thread(target=take)
thread.start()
assert taken.wait(600)
child = os.fork()
if child == 0:
    sys.exit()  # finalizers run
assert os.waitpid(child, 0)[1] == 0
go_on.set()
thread.join(600)
with open(directory.path / ".dcpx.lock") as file:
    try:
        real(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("kept")
"""


@pytest.mark.slow
def test_child_that_was_forked_while_the_lock_was_taken_does_not_give_it_back(
    directory: Directory, run_warm: RunPython
) -> None:
    assert run_warm(FORKED, str(directory.path), timeout_s=120).stdout == "kept\n"
