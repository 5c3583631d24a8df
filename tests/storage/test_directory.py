"""The directory held by descriptor: durable mkdir, small files, and typed errors of each call."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torch_dcpx import CorruptionError, StorageError, _descriptors
from torch_dcpx.storage import directory, system_calls
from torch_dcpx.storage.directory import Directory, make_directory


class FailingOs:
    """The os module, one function of which fails; counts its calls."""

    def __init__(self, name: str, code: int) -> None:
        self._name, self._code = name, code
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(os, name)
        return self._fail

    def _fail(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        raise OSError(self._code, os.strerror(self._code))


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the paths that are fsynced, in order."""
    paths: list[str] = []

    class Recording:
        def __getattr__(self, name: str) -> Any:
            return self._fsync if name == "fsync" else getattr(os, name)

        def _fsync(self, fd: int) -> None:
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.fsync(fd)

    monkeypatch.setattr(directory, "os", Recording())
    return paths


# ---- make_directory -----------------------------------------------------------------------------


def test_missing_parents_are_made_and_the_parent_of_each_is_synced(
    tmp_path: Path, synced: list[str]
) -> None:
    make_directory(tmp_path / "a" / "b" / "c", is_durable=True)
    assert (tmp_path / "a" / "b" / "c").is_dir()
    # That of the one that was there first: who made it may have been killed before it did.
    made = [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    assert synced == [str(path) for path in (tmp_path.parent, *made)]


def test_nothing_is_synced_for_a_directory_that_is_there_or_without_durability(
    tmp_path: Path, synced: list[str]
) -> None:
    make_directory(tmp_path, is_durable=True)
    make_directory(tmp_path / "a" / "b", is_durable=False)
    assert synced == []
    assert (tmp_path / "a" / "b").is_dir()


def test_directory_that_another_rank_makes_meanwhile_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def raced(path: Any, *args: Any, **kwargs: Any) -> None:
        made.append(Path(path).name)
        os.mkdir(path, *args, **kwargs)
        os.mkdir(path, *args, **kwargs)

    monkeypatch.setattr(directory, "os", SimpleNamespace(**{**vars(os), "mkdir": raced}))
    make_directory(tmp_path / "a" / "b", is_durable=True)
    assert (tmp_path / "a" / "b").is_dir() and made == ["a", "b"]


@pytest.mark.parametrize("below", [False, True], ids=["itself", "below it"])
@pytest.mark.parametrize("kind", ["file", "link to nothing"])
def test_place_that_is_taken_is_a_storage_error(tmp_path: Path, kind: str, below: bool) -> None:
    taken = tmp_path / "taken"
    taken.write_text("") if kind == "file" else taken.symlink_to("nowhere")
    with pytest.raises(StorageError) as caught:
        make_directory(taken / "a" if below else taken, is_durable=True)
    lost = (errno.ENXIO,)  # as of a disk that is not mounted
    assert caught.value.errno in ((errno.EEXIST, errno.ENOTDIR) if kind == "file" else lost)
    assert caught.value.path is not None
    assert caught.value.path.startswith(str(taken))


# ---- Directory ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_leaks")
def test_small_file_is_created_read_renamed_and_unlinked(tmp_path: Path) -> None:
    with Directory(tmp_path) as opened:
        opened.create("a", [b"one ", memoryview(b"two")], is_durable=True)
        assert opened.read_small("a") == b"one two"
        opened.create("b", [], is_durable=False)
        opened.rename("a", "b")
        assert (opened.names(), opened.read_small("b")) == (["b"], b"one two")
        assert opened.is_regular("b")
        opened.sync()
        opened.unlink("b")
        opened.unlink("b")  # gone already
        assert (opened.names(), opened.is_regular("b")) == ([], False)
    opened.close()  # twice


def test_create_never_touches_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("victim")
    with Directory(tmp_path) as opened:
        for name in ("file", "link"):
            with pytest.raises(StorageError) as caught:
                opened.create(name, [b"x"], is_durable=True)
            assert (caught.value.errno, caught.value.path) == (errno.EEXIST, str(tmp_path / name))
    assert (tmp_path / "file").read_text() == "kept"
    assert not (tmp_path / "victim").exists()


def test_what_is_held_by_descriptor_survives_a_rename_of_its_path(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with Directory(tmp_path / "a") as opened:
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "a").mkdir()
        opened.create("file", [b"x"], is_durable=True)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["file"]
    assert list((tmp_path / "a").iterdir()) == []


def test_write_that_moves_nothing_is_an_error_and_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([0] * 10)  # a file system in user space may say so
    monkeypatch.setattr(directory.os, "write", lambda *_: next(answers))
    with Directory(tmp_path) as opened, pytest.raises(StorageError) as caught:
        opened.create("file", [b"x" * 100], is_durable=True)
    assert (caught.value.errno, caught.value.offset, caught.value.nbytes) == (errno.EIO, 0, 100)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        def __getattr__(self, name: str) -> Any:
            return self._write if name == "write" else getattr(os, name)

        def _write(self, fd: int, data: memoryview) -> int:
            return os.write(fd, data[:3])

    monkeypatch.setattr(directory, "os", Short())
    with Directory(tmp_path) as opened:
        opened.create("a", [b"0123456789", b"abc"], is_durable=True)
    assert (tmp_path / "a").read_bytes() == b"0123456789abc"


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "missing"])
def test_read_of_what_is_no_regular_file_is_a_typed_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "link":
        path.symlink_to("victim")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    with Directory(tmp_path) as opened:
        assert not opened.is_regular("file")
        with pytest.raises((CorruptionError, StorageError)) as caught:
            opened.read_small("file")
    assert type(caught.value) is (StorageError if kind == "missing" else CorruptionError)
    assert caught.value.path == str(path)


def test_file_too_large_for_metadata_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(11))
    monkeypatch.setattr(directory, "MAX_METADATA_BYTES", 10)
    with Directory(tmp_path) as opened, pytest.raises(CorruptionError) as caught:
        opened.read_small("file")
    assert caught.value.nbytes == 11


def write_with_holes(path: Path, written: int) -> None:
    """Writes 65 MiB, of which so many bytes at the beginning and the last 4 KiB are no hole."""
    nbytes = 65 << 20
    with path.open("wb") as file:
        file.write(bytes(written))
        file.seek(nbytes - 4096)
        file.write(bytes(4096))


def test_large_file_of_holes_is_refused_unread_where_the_file_system_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes, failing = 65 << 20, FailingOs("lseek", errno.EINVAL)
    with Directory(tmp_path) as opened:
        write_with_holes(tmp_path / "file", 4096)
        with pytest.raises(CorruptionError, match="holes") as caught:
            opened.read_small("file")
        assert (caught.value.nbytes, caught.value.path) == (nbytes, str(tmp_path / "file"))
        with monkeypatch.context() as patch:
            patch.setattr(system_calls, "os", failing)
            assert len(opened.read_small("file")) == nbytes
        assert failing.calls == 1
        for written in (nbytes, 300 << 10):  # zeros, or some holes
            write_with_holes(tmp_path / "file", written)
            assert opened.read_small("file") == bytes(nbytes)


OPERATIONS: dict[str, Callable[[Directory], Any]] = {
    "open": lambda opened: opened.create("new", [b"x"], is_durable=True),
    "write": lambda opened: opened.create("new", [b"x"], is_durable=True),
    "fsync": lambda opened: opened.create("new", [b"x"], is_durable=True),
    "close": lambda opened: opened.create("new", [b"x"], is_durable=True),
    "rename": lambda opened: opened.rename("file", "new"),
    "unlink": lambda opened: opened.unlink("file"),
    "listdir": lambda opened: opened.names(),
    "fstat": lambda opened: opened.read_small("file"),
}


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_failing_call_is_one_storage_error_with_errno_and_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for code in (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS):
        (tmp_path / "file").write_text("x")
        (tmp_path / "new").unlink(missing_ok=True)
        failing = FailingOs(name, code)
        with Directory(tmp_path) as opened, monkeypatch.context() as patch:
            for module in (directory, system_calls, _descriptors):
                patch.setattr(module, "os", failing)
            with pytest.raises(StorageError) as caught:
                OPERATIONS[name](opened)
        assert caught.value.errno == code
        assert (caught.value.path or "").startswith(str(tmp_path))
        assert os.strerror(code) in str(caught.value)
        assert failing.calls == 1  # an error is final: an fsync that is asked again lies


def test_failing_fsync_of_a_directory_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Directory(tmp_path) as opened:
        for sync in (opened.sync, lambda: directory.fsync_path(tmp_path)):
            failing = FailingOs("fsync", errno.EIO)
            with monkeypatch.context() as patch:
                patch.setattr(directory, "os", failing)
                with pytest.raises(StorageError) as caught:
                    sync()
            assert (caught.value.errno, caught.value.path) == (errno.EIO, str(tmp_path))
            assert failing.calls == 1


def test_directory_that_cannot_be_opened_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, code in (("missing", errno.ENOENT), ("file", errno.ENOTDIR)):
        with pytest.raises(StorageError) as caught:
            Directory(tmp_path / name)
        assert (caught.value.errno, caught.value.path) == (code, str(tmp_path / name))
