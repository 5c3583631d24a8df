"""System calls on a file system that other nodes mount are made on a thread that can be left."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import RunPython
from support.machine import seconds

from torch_dcpx import StorageError, _answered_os, _mounts
from torch_dcpx._answered_os import AnsweredOs, path_of
from torch_dcpx._answers import StorageTimeout, answered, wait_at_most
from torch_dcpx._mounts import Mount

SOON_S = 0.2


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on what counts as such a file system; beside it is a local one."""
    there = tmp_path / "shared"
    there.mkdir()
    (tmp_path / "local").mkdir()
    made = {str(there): Mount(str(there), "fuse.new", ())}
    monkeypatch.setattr(_mounts, "MOUNTS", made)
    monkeypatch.setattr(_mounts, "_kept", {})
    return there


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
    """Lets a function of `os` not return; the event that it gives ends that, and the test does."""
    answers: list[threading.Event] = []

    def stop(name: str) -> threading.Event:
        real, event = getattr(os, name), threading.Event()

        def call(*args: Any, **kwargs: Any) -> Any:
            event.wait()
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)
        answers.append(event)
        return event

    yield stop
    for event in answers:
        event.set()


def threads_of(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[threading.Thread]:
    real, found = getattr(module, name), list[threading.Thread]()

    def call(*args: Any, **kwargs: Any) -> Any:
        found.append(threading.current_thread())
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, call)
    return found


class There(NamedTuple):
    """A directory, an open file in it, and what calls go through."""

    os: AnsweredOs
    path: Path
    fd: int
    above: int


CALLS: dict[str, Callable[[There], Any]] = {
    "stat": lambda at: at.os.stat("file", dir_fd=at.above),
    "lstat": lambda at: at.os.lstat(at.path / "file"),
    "listdir": lambda at: at.os.listdir(at.above),
    "mkdir": lambda at: at.os.mkdir(at.path / "new"),
    "rename": lambda at: at.os.rename(at.path / "file", at.path / "moved"),
    "unlink": lambda at: at.os.unlink("file", dir_fd=at.above),
    "pwrite": lambda at: at.os.pwrite(at.fd, b"x", 0),
    "fsync": lambda at: at.os.fsync(at.fd),
    "close": lambda at: at.os.close(at.os.open(at.path / "file", os.O_RDONLY)),
    "scandir": lambda at: [each.name for each in at.os.scandir(at.path)],
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("where", ["shared", "local"])
def test_call_is_made_on_another_thread_where_others_mount_the_file_system_and_nowhere_else(
    shared: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    path = shared.parent / where
    (path / "file").write_text("x")
    made = AnsweredOs()
    above = made.open(path, os.O_RDONLY | os.O_DIRECTORY)
    fd = made.open("file", os.O_RDWR, dir_fd=above)
    try:
        threads = threads_of(monkeypatch, os, name)
        CALLS[name](There(made, path, fd, above))
    finally:
        made.close(fd)
        made.close(above)
    own = threading.current_thread()
    assert threads and [thread is own for thread in threads] == [where == "local"] * len(threads)


def test_descriptor_that_is_used_again_for_a_local_file_is_local(shared: Path) -> None:
    made = AnsweredOs()
    fd = made.open(shared, os.O_RDONLY)
    assert made.where(fd) == str(shared)
    made.close(fd)
    again = made.open(shared.parent, os.O_RDONLY)
    assert again == fd and made.where(again) is None
    made.close(again)


@pytest.mark.parametrize("name", ["stat", "listdir", "rmdir"])
def test_silence_is_an_error_with_the_path_at_the_bound(
    shared: Path, silent: Callable[[str], threading.Event], name: str
) -> None:
    made = AnsweredOs()
    silent(name)
    with (
        wait_at_most(StorageTimeout(SOON_S, "save_timeout_s")),
        pytest.raises(StorageError, match=f"{name} '{shared}': no answer for") as caught,
    ):
        getattr(made, name)(shared)
    assert (caught.value.errno, caught.value.path) == (errno.ETIMEDOUT, str(shared))


def test_file_that_is_opened_too_late_is_closed(
    shared: Path, silent: Callable[[str], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, real = threading.Event(), os.close

    def close(fd: int) -> None:
        assert os.readlink(f"/proc/self/fd/{fd}") == str(shared)
        real(fd)
        closed.set()

    made, answers = AnsweredOs(), silent("open")
    monkeypatch.setattr(os, "close", close)
    with wait_at_most(StorageTimeout(SOON_S, "save_timeout_s")), pytest.raises(StorageError):
        made.open(shared, os.O_RDONLY)
    answers.set()
    assert closed.wait(seconds(30))


def test_what_does_not_ask_the_file_system_is_pythons_own() -> None:
    made = AnsweredOs()
    assert made.fspath is os.fspath and made.O_RDONLY == os.O_RDONLY
    assert made.path.join is os.path.join


def test_flock_of_a_shared_file_waits_on_another_thread(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = AnsweredOs()
    threads = threads_of(monkeypatch, fcntl, "flock")
    fd = made.open(shared, os.O_RDONLY)
    made._by_path(fcntl, "flock")(fd, fcntl.LOCK_SH)
    made.close(fd)
    assert threads != [threading.current_thread()]


OWN = """
import fcntl, os, sys
from pathlib import Path
real = Path.read_text
line = f"22 1 8:1 / / rw shared:1 - {sys.argv[1]} source rw\\n"
Path.read_text = lambda self, **kw: line if self.name == "mountinfo" else real(self, **kw)
from torch_dcpx import _answered_os as ours
print(ours.os.stat is os.stat, ours.os.path is os.path, ours.fcntl.flock is fcntl.flock)
"""


@pytest.mark.parametrize(("kind", "is_own"), [("ext4", True), ("nfs4", False)])
def test_nothing_stands_between_where_nothing_shared_is_mounted(
    run_python: RunPython, kind: str, is_own: bool
) -> None:
    assert run_python(OWN, kind).stdout == f"{is_own} {is_own} {is_own}\n"


LATER = """
import os, sys, threading
from pathlib import Path
reads, mounts, real = [], ["1 0 8:1 / / rw - ext4 source rw"], Path.read_text
def read_text(self, **kw):
    if self.name != "mountinfo":
        return real(self, **kw)
    reads.append(self)
    return "\\n".join(mounts)
Path.read_text = read_text
import torch_dcpx, torch
from torch_dcpx import _mounts
from torch_dcpx._answered_os import os as answered_os
state, place = {"w": torch.ones(3)}, Path(sys.argv[1])
device = place.stat().st_dev
def threads_of_a_save():
    found, stat = set(), os.stat
    def noted(*args, **kw):
        found.add(threading.current_thread().name)
        return stat(*args, **kw)
    os.stat = noted
    torch_dcpx.save(state, place / "ckpt", no_dist=True)
    os.stat = stat
    return sorted(found)
local = threads_of_a_save()
again = threads_of_a_save()
print(local == again == ["MainThread"], len(reads), device in _mounts.LOCAL_DEVICES)
_mounts.LOCAL_DEVICES.clear()  # as if it were on a device that nobody has seen
mounts.append(f"2 1 0:77 / {place} rw - fuse.late source rw")
threads_of_a_save()
print(any(name.startswith("dcpx-answer") for name in threads_of_a_save()), len(reads))
found = {"w": torch.zeros(3)}
torch_dcpx.load(found, place / "ckpt", no_dist=True)
print(found["w"].tolist(), type(torch_dcpx.storage.object_url.location_of(str(place))).__name__)
"""


def test_mount_that_is_made_after_the_import_is_found_by_its_device(
    run_python: RunPython, tmp_path: Path
) -> None:
    said = run_python(LATER, str(tmp_path)).stdout.splitlines()
    assert said == ["True 2 True", "True 3", "[1.0, 1.0, 1.0] AnsweredPath"]


def test_relative_path_is_where_the_process_is_now(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, is_so in [(shared.parent / "local", False), (shared, True), (shared.parent, False)]:
        monkeypatch.chdir(folder)
        assert (_mounts.shared_mount("ckpt") is not None) == is_so


def test_relative_path_of_a_process_whose_directory_is_gone_is_on_no_mount(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = shared.parent / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert _mounts.shared_mount("ckpt") is None
    assert not _mounts.is_shared("ckpt")


PATH_CALLS: dict[str, Callable[[Path], Any]] = {
    "exists": lambda path: (path / "file").exists(),
    "iterdir": lambda path: [each.name for each in path.iterdir()],
    "glob": lambda path: [each.name for each in path.glob("*")],
    "read_bytes": lambda path: (path / "file").read_bytes(),
    "is_dir": lambda path: path.parent.joinpath("shared").is_dir(),
    "resolve": lambda path: path.resolve() == Path(path),
    "rename": lambda path: (path / "file").rename(path / "moved").name,
    "open": lambda path: (path / "file").open().close(),
}


@pytest.mark.parametrize("name", PATH_CALLS)
def test_path_on_such_a_file_system_asks_on_another_thread_and_gives_what_a_path_does(
    shared: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(_mounts, "HAS_SHARED", True)
    (shared / "file").write_text("x")
    own, asked = path_of(shared), list[str]()
    monkeypatch.setattr(
        _answered_os,
        "answered",
        lambda call, what, path: (asked.append(path), answered(call, what, path))[1],
    )
    found = PATH_CALLS[name](own)
    assert asked and all(str(shared) in path for path in asked)
    if name == "rename":
        (shared / "moved").rename(shared / "file")
    assert found == PATH_CALLS[name](shared)
    assert type(path_of(shared.parent, "local")) is type(shared)


def test_error_of_a_call_keeps_nothing_of_it_alive() -> None:
    class Held:
        """Stands for what a call is of."""

    def ask() -> weakref.ref[Held]:
        held = Held()

        def call() -> None:
            raise FileNotFoundError(held.__class__)

        try:
            answered(call, "stat 'a'", "a")
        except FileNotFoundError:
            return weakref.ref(held)
        raise AssertionError("no error")

    gc.disable()
    try:
        held = ask()
        end = time.monotonic() + seconds(20)
        while held() is not None and time.monotonic() < end:
            time.sleep(0.01)  # the thread drops the call a moment after its answer
        assert held() is None
    finally:
        gc.enable()
