"""The save lock: one save at a time, and no failed save in the way of the next."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import RunPython
from support.machine import seconds
from support.warm import WarmProcess, warm_parent

from torch_dcpx import ConcurrentSaveError
from torch_dcpx.storage import save_lock as lock
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.running_save import RunningSave
from torch_dcpx.storage.save_lock import SaveLock

NAME = ".dcpx.lock"

HOLDER = """
import signal, sys
from pathlib import Path
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.save_lock import SaveLock
from torch_dcpx.storage.running_save import RunningSave
held = SaveLock(Directory(Path(sys.argv[1])), ".dcpx.lock", RunningSave(SaveLock),
                is_shared=len(sys.argv) > 2)
print("held", flush=True)
signal.pause()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    with Directory(tmp_path) as opened:
        yield opened


class Writer:
    """Whatever a save is made through."""


WRITER = Writer()


def save_lock(directory: Directory, *, is_shared: bool = False) -> SaveLock:
    """Takes the lock for a save that this thread begins here."""
    return SaveLock(directory, NAME, RunningSave(WRITER), is_shared=is_shared)


def in_thread(work: Callable[[], Any]) -> Any:
    """Returns what `work` returned or raised in a thread that has ended."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:  # noqa: BLE001
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(seconds(60))
    assert not thread.is_alive()
    return found[0]


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[Callable[..., WarmProcess]]:
    """Starts a process that holds the lock until it is killed."""
    started: list[WarmProcess] = []

    def start(*args: str) -> WarmProcess:
        read_end, write_end = os.pipe()
        with open(read_end) as said:
            with open(write_end, "w") as out:
                command = ["-c", HOLDER, str(tmp_path), *args]
                started.append(warm_parent().start(command, out, sys.__stderr__, env=os.environ))
            assert said.readline() == "held\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(seconds(60))


@pytest.mark.usefixtures("no_leaks")
def test_lock_of_another_living_thread_is_refused_with_its_owner(directory: Directory) -> None:
    first = save_lock(directory)
    error = in_thread(lambda: save_lock(directory))
    assert type(error) is ConcurrentSaveError
    assert f"pid={os.getpid()}" in error.owner
    assert f"host={socket.gethostname()}" in error.owner
    assert error.path == str(directory.path / NAME)
    assert first.is_held
    first.release()
    del error
    in_thread(lambda: save_lock(directory).release())


@pytest.mark.usefixtures("no_leaks")
def test_lock_of_a_save_that_is_over_is_free(directory: Directory) -> None:
    first = save_lock(directory)
    second = save_lock(directory)  # the same thread begins another save
    assert (first.is_held, second.is_held) == (False, True)
    first.release()  # twice, and without taking the second's away
    assert type(in_thread(lambda: save_lock(directory))) is ConcurrentSaveError
    second.release()
    kept = [save_lock(directory, is_shared=True), save_lock(directory, is_shared=True)]
    exclusive = save_lock(directory)
    assert [lock.is_held for lock in [*kept, exclusive]] == [False, False, True]
    exclusive.release()
    of_a_thread = in_thread(lambda: save_lock(directory))  # that has ended
    assert of_a_thread.is_held
    held = [save_lock(directory)]
    assert (of_a_thread.is_held, held[0].is_held) == (False, True)
    assert type(in_thread(lambda: save_lock(directory))) is ConcurrentSaveError
    held.clear()  # nobody refers to it
    gc.collect()
    in_thread(lambda: save_lock(directory).release())
    assert lock._held == {}


def test_lock_of_another_process_is_refused_until_that_is_killed(
    directory: Directory, other_process: Callable[..., WarmProcess]
) -> None:
    process = other_process()
    for is_shared in (True, False):
        with pytest.raises(ConcurrentSaveError) as caught:
            save_lock(directory, is_shared=is_shared)
    assert f"pid={process.pid}" in (caught.value.owner or "")
    process.kill()
    process.wait(timeout=seconds(60))
    save_lock(directory).release()


def test_shared_locks_exclude_an_exclusive_one_and_not_each_other(
    directory: Directory, other_process: Callable[..., WarmProcess]
) -> None:
    other_process("shared")
    mine = save_lock(directory, is_shared=True)
    assert mine.is_held
    with pytest.raises(ConcurrentSaveError):
        save_lock(directory)
    mine.release()


FORKING = """
import fcntl, os, signal, sys
from pathlib import Path
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.save_lock import SaveLock
from torch_dcpx.storage.running_save import RunningSave
held = SaveLock(Directory(Path(sys.argv[1])), ".dcpx.lock", RunningSave(SaveLock))
is_left = len(sys.argv) > 2
read_end, write_end = os.pipe()
child = os.fork()
if child == 0:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1), os.dup2(null, 2)
    if not is_left:
        held.release()
    os.write(write_end, b"x")
    signal.pause()
os.read(read_end, 1)
print(child, flush=True)
if is_left:
    os.kill(os.getpid(), signal.SIGKILL)
def is_free():
    with open(os.path.join(sys.argv[1], ".dcpx.lock")) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
print(is_free())
held.release()
print(is_free())
"""


@pytest.mark.parametrize("left", [[], ["left"]], ids=["alive", "killed"])
def test_forked_child_neither_keeps_nor_gives_away_the_lock_of_its_parent(
    directory: Directory, run_warm: RunPython, left: list[str]
) -> None:
    result = run_warm(FORKING, str(directory.path), *left, timeout_s=60, check=False)
    child, *found = result.stdout.split()
    try:
        assert found == ([] if left else ["False", "True"]), result.stderr
        save_lock(directory).release()
    finally:
        os.kill(int(child), 9)


@pytest.mark.usefixtures("no_leaks")
def test_file_system_without_locks_warns_once_and_lets_the_save_pass(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, operation: int) -> None:
        if operation != fcntl.LOCK_UN:
            raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    monkeypatch.setattr(lock, "_warned", set())
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        for _ in range(2):
            unlocked = save_lock(directory)
            assert not unlocked.is_held
            unlocked.release()
    assert len([r for r in caplog.records if "no locks" in r.message]) == 1


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("call", ["pwrite", "ftruncate"])
def test_owner_note_that_cannot_be_written_stops_no_save(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lock.os, call, full)
        held = save_lock(directory)
    assert held.is_held
    assert type(in_thread(lambda: save_lock(directory))) is ConcurrentSaveError
    held.release()
    in_thread(lambda: save_lock(directory).release())


# ---- The record in the file ---------------------------------------------------------------------


def test_record_says_whose_save_did_not_end(directory: Directory) -> None:
    path = directory.path / NAME
    first = save_lock(directory)
    assert first.left_by == "nobody"
    assert f"pid={os.getpid()}" in path.read_text()
    first.release()  # of a save that failed
    second = save_lock(directory)
    assert second.left_by == "this machine"
    second.release(has_ended_well=True)
    assert path.read_text() == ""
    assert save_lock(directory).left_by == "nobody"
    gc.collect()
    path.write_text("host=elsewhere pid=1 boot=b7f1\n")
    third = save_lock(directory)
    assert third.left_by == "another machine"
    third.release()


def test_record_is_all_that_its_file_holds(directory: Directory) -> None:
    path = directory.path / NAME
    held = save_lock(directory)
    own = path.read_bytes()
    held.release()
    path.write_bytes(own.rstrip() + b" name=" + b"z" * 1000 + b"\n")  # of a longer name
    held = save_lock(directory)
    assert path.read_bytes() == own
    held.release()


def test_save_that_fails_does_not_wipe_out_another_machines_line(directory: Directory) -> None:
    path = directory.path / NAME
    path.write_text("host=elsewhere pid=1 boot=b7f1\n")
    for _ in range(3):
        failed = save_lock(directory)
        assert failed.left_by == "another machine"
        error = in_thread(lambda: save_lock(directory))
        assert error.owner.startswith(f"host={socket.gethostname()} pid={os.getpid()} ")
        assert "\n" not in error.owner
        failed.release()
        assert path.read_text().count("\n") == 2
    save_lock(directory).release(has_ended_well=True)
    assert path.read_text() == ""


def test_lock_file_of_another_user_is_locked_and_not_written(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory.path / NAME
    path.write_text("host=here pid=1 boot=b7f1\n")
    real = os.open

    def refuse(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if name == NAME and flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    held = save_lock(directory)
    assert (held.is_held, held.left_by) == (True, "another machine")
    assert type(in_thread(lambda: save_lock(directory))) is ConcurrentSaveError
    held.release(has_ended_well=True)
    assert path.read_text() == "host=here pid=1 boot=b7f1\n"


@pytest.mark.usefixtures("no_leaks")
def test_lock_that_cannot_be_given_back_is_closed(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = save_lock(directory)

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(lock.fcntl, "flock", fail)
        held.release()
    assert "closing its file alone" in caplog.text
    in_thread(lambda: save_lock(directory).release())
