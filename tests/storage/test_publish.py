"""One file, published: nobody sees a part of it, and nothing else changes."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from support.fuse_fixture import MountedClient
from support.machine import seconds

from torch_dcpx import StorageError
from torch_dcpx._answers import StorageTimeout, wait_at_most
from torch_dcpx.storage import publish as module
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.publish import publish, put, put_from
from torch_dcpx.storage.save_lock import machine

ID = "0123456789ab"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "last.ckpt"


def left_by(path: Path, *, of: str | None = None, key: str = ID) -> Path:
    """Returns the name under which a process writes a file."""
    fd_names: list[str] = []
    put_from(path, lambda file: fd_names.append(os.readlink(f"/proc/self/fd/{file.fileno()}")))
    beginning = Path(fd_names[0]).name.rsplit(".", 2)[0]
    return path.with_name(f"{beginning}.{of or machine()}-{key}.tmp")


@pytest.mark.usefixtures("no_leaks")
def test_file_is_replaced_as_a_whole_and_alone(path: Path) -> None:
    put(path.parent / "made" / "one", b"first")
    put(path, b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"n")
        file.flush()
        assert path.read_bytes() == b"old"
        put(path, b"of another")  # whole, though this one is half done
        assert path.read_bytes() == b"of another"
        file.write(b"ew")

    put_from(path, write)
    assert path.read_bytes() == b"new"
    assert sorted(os.listdir(path.parent)) == ["last.ckpt", "made"]


def interrupted(_: BinaryIO) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "open", "flock", "fstat"])
def test_failure_leaves_what_was_there_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    put(path, b"old")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    write = fail if call == "write" else lambda file: file.write(b"new")
    with monkeypatch.context() as patch:
        if call != "write":
            patch.setattr(fcntl if call == "flock" else os, call, fail)
        with pytest.raises(StorageError) as caught:
            put_from(path, write)
    assert caught.value.errno == errno.EIO
    with pytest.raises(KeyboardInterrupt):  # another error of the function is raised as it is
        put_from(path, interrupted)
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["last.ckpt"]


@pytest.mark.parametrize("kind", ["link", "file", "directory", "fifo"])
def test_name_that_somebody_has_is_not_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    victim = path.with_name("victim")
    victim.write_text("precious")
    planted = left_by(path)
    path.unlink()
    {
        "link": lambda: planted.symlink_to(victim),
        "file": lambda: planted.hardlink_to(victim),
        "directory": planted.mkdir,
        "fifo": lambda: os.mkfifo(planted),
    }[kind]()
    monkeypatch.setattr(module, "_remove_left", lambda *_: None)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(ID + "0" * 20))
    with pytest.raises(StorageError) as caught:
        put(path, b"new")
    assert caught.value.errno == errno.EEXIST
    assert victim.read_text() == "precious"
    assert os.path.lexists(planted)
    assert not path.exists()


@pytest.mark.parametrize("kind", ["link", "hard link"])
def test_link_at_the_files_own_name_is_replaced_and_not_followed(path: Path, kind: str) -> None:
    victim = path.with_name("victim")
    victim.write_text("precious")
    path.symlink_to(victim) if kind == "link" else path.hardlink_to(victim)
    put(path, b"new")
    assert (victim.read_text(), path.read_bytes()) == ("precious", b"new")
    assert not path.is_symlink()


def test_only_what_a_dead_process_of_this_machine_has_left_of_this_file_goes(path: Path) -> None:
    dead, written, elsewhere = (
        left_by(path), left_by(path, key="f" * 12), left_by(path, of="ffffffff"),
    )  # fmt: skip
    other, linked = left_by(path.with_name("other")), left_by(path, key="e" * 12)
    for each in (dead, written, elsewhere, other):
        each.touch()
    (path.parent / "victim").touch()
    linked.symlink_to("victim")
    with written.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        put(path, b"new")
    assert not dead.exists()
    stay = [written, elsewhere, other, linked, path.parent / "victim"]
    assert all(os.path.lexists(each) for each in stay)


def test_without_locks_files_are_written_and_leftovers_stay(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_by(path)
    left.touch()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    put(path, b"new")
    assert path.read_bytes() == b"new"
    assert left.exists()


def test_file_that_another_process_took_for_a_dead_ones_is_made_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = fcntl.flock, []

    def flock(fd: int, kind: int) -> None:
        if not made:
            made.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.unlink(made[0])
        elif len(made) == 1:
            made.append("")
            raise BlockingIOError(errno.EWOULDBLOCK, "")
        real(fd, kind)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        put(path, b"new")
    assert path.read_bytes() == b"new"
    with monkeypatch.context() as patch:
        patch.setattr(module.flock, "take", _busy)
        with pytest.raises(StorageError, match="other processes removed"):
            put(path, b"newer")
    assert path.read_bytes() == b"new"


def _busy(*_: object) -> None:
    raise BlockingIOError(errno.EWOULDBLOCK, "")


@pytest.mark.parametrize("name", ["n" * 255, os.fsdecode(b"\xff\xfe"), "-", "*"])
def test_any_name_is_written(tmp_path: Path, name: str) -> None:
    for content in (b"1", b"2"):
        put(tmp_path / name, content)
    assert (tmp_path / name).read_bytes() == b"2"
    assert len(os.listdir(os.fsencode(tmp_path))) == 1


def test_small_file_is_published_or_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Directory(path.parent) as directory:
        publish(directory, path.name, [b"o", b"ld"], is_durable=True)
        for call in ("rename", "fsync"):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, fail)
                with pytest.raises(StorageError):
                    publish(directory, path.name, [b"new"], is_durable=True)
            assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_long_write_goes_on_while_its_bytes_move_to_a_shared_file_system(
    two_clients: tuple[MountedClient, MountedClient],
) -> None:
    path = two_clients[0].path / "last.ckpt"

    def write(file: BinaryIO) -> None:
        for _ in range(8):
            file.write(bytes(100_000))
            time.sleep(seconds(0.3))

    with wait_at_most(StorageTimeout(seconds(2), "save_timeout_s")):
        put_from(path, write)
    assert path.stat().st_size == 800_000
