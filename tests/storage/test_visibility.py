"""What another node changed is looked for again; what is wrong on this node's disk is not."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

import torch_dcpx
from torch_dcpx import CorruptionError, NotCommittedError, ShortReadError, StorageError, _mounts
from torch_dcpx.errors import DcpxError, UnsafePickleError
from torch_dcpx.storage import visibility
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.names import TOMBSTONE_NAME
from torch_dcpx.storage.visibility import (
    hidden,
    is_of_another_save,
    look_until_seen,
    note_saved,
    refuse_older,
    saved_at,
    until_of_one_save,
)

TABLE = """\
22 1 7:9 / / rw,relatime - ext4 /dev/vda rw
31 22 0:41 / /cluster rw,relatime shared:1 master:2 - fuse.glusterfs host:/v1 rw,user_id=0
32 22 0:42 / /home\\040nfs rw - nfs4 server:/home rw
"""


class Looks:
    """Raises its errors, one a call, then returns."""

    def __init__(self, *errors: DcpxError) -> None:
        self.errors = list(errors)
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.count


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that goes only while somebody sleeps."""
    pauses: list[float] = []
    monkeypatch.setattr(visibility.time, "sleep", pauses.append)
    monkeypatch.setattr(visibility.time, "monotonic", lambda: sum(pauses))
    return pauses


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(visibility, "is_shared", lambda _: True)
    return tmp_path / "checkpoint"


def late_errors() -> list[DcpxError]:
    return [
        StorageError("gone", errno=errno.ENOENT),
        StorageError("stale", errno=errno.ESTALE),
        ShortReadError("short", errno=errno.EIO),
        CorruptionError("torn"),
    ]


@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [("ext4", False), ("fuse.fuse-overlayfs", False)]
    + [(kind, True) for kind in ("nfs4", "fuse.sshfs", "fuse", "lustre", "autofs")],
)
def test_types_of_mounts_tell_which_other_nodes_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_shared: bool
) -> None:
    table, place = tmp_path / "mountinfo", tmp_path / "place"
    (place / "within").mkdir(parents=True)
    (tmp_path / "link").symlink_to(place / "within")
    monkeypatch.setattr(_mounts, "_TABLE", table)
    table.write_text(TABLE + f"33 22 7:8 / {place} rw - {kind} source rw\n")
    for path in (place, place / "within" / "no" / "such", tmp_path / "link" / "x"):
        assert _mounts.is_shared(path) == is_shared
    assert not _mounts.is_shared(tmp_path)
    assert _mounts.is_shared("/home nfs/x") and _mounts.is_shared("/cluster")
    table.unlink()
    assert not _mounts.is_shared(place)


def test_nodes_without_a_disk_share_what_is_mounted_at_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"
    monkeypatch.setattr(_mounts, "_TABLE", table)
    table.write_text(
        "22 1 0:20 / / ro - nfs4 server:/image rw\n"
        "23 22 0:21 / /tmp rw - tmpfs tmpfs rw\n"
        "24 22 0:22 / /proc rw - proc proc rw\n"
    )
    assert _mounts.is_shared("/") and _mounts.is_shared("/srv/checkpoints")
    assert not _mounts.is_shared("/tmp/x") and not _mounts.is_shared("/proc/self")


def test_late_looks_are_repeated_until_one_sees(shared: Path, slept: list[float]) -> None:
    looks = Looks(*late_errors())
    assert look_until_seen(shared, 30.0, looks) == 5
    assert slept == sorted(slept) and len(slept) == 4


def test_what_no_look_mends_is_raised_at_once(shared: Path, slept: list[float]) -> None:
    for error in (
        NotCommittedError("nothing", errno=errno.ENOENT),
        StorageError("io", errno=errno.EIO),
        StorageError("down", errno=errno.ENOTCONN),
        UnsafePickleError("code"),
        DcpxError("other"),
    ):
        looks = Looks(error)
        with pytest.raises(type(error)):
            look_until_seen(shared, 30.0, looks)
        assert (looks.count, slept) == (1, [])


def test_a_disk_of_this_node_is_looked_at_once(tmp_path: Path, slept: list[float]) -> None:
    note_saved(tmp_path, "1" * 32)
    for error in late_errors():
        looks = Looks(error)
        with pytest.raises(type(error)):
            look_until_seen(tmp_path, 30.0, looks)
        assert (looks.count, slept) == (1, [])


def test_looks_end_and_say_where_for_how_long_and_what_was_expected(
    shared: Path, slept: list[float]
) -> None:
    always = [StorageError("'x' is gone", errno=errno.ENOENT) for _ in range(1000)]
    with pytest.raises(StorageError, match=r"'x' is gone \(on .*, for 5 s; another node") as info:
        look_until_seen(shared, 30.0, Looks(*always))
    assert info.value.errno == errno.ENOENT
    note_saved(shared, "a" * 32)
    missing = [NotCommittedError("no", errno=errno.ENOENT) for _ in range(1000)]
    with pytest.raises(
        NotCommittedError, match=f"for 30 s; this job has committed save {'a' * 32}"
    ):
        look_until_seen(shared, 30.0, Looks(*missing))


def test_a_check_ends_the_looks_by_an_error_of_its_own(shared: Path, slept: list[float]) -> None:
    def check(error: DcpxError) -> None:
        raise StorageError("replaced", errno=errno.ESTALE)

    with pytest.raises(StorageError, match="replaced"):
        look_until_seen(shared, 30.0, Looks(*late_errors()), check)
    assert slept == []


def test_a_save_that_was_replaced_is_older_and_an_unknown_one_is_later(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = ("a" * 32, "b" * 32, "c" * 32)
    note_saved(tmp_path, second, first)
    refuse_older(tmp_path, second)
    with pytest.raises(StorageError, match=f"still that of save {first}.*{second}") as info:
        refuse_older(tmp_path, first)
    assert info.value.errno == errno.ESTALE
    note_saved(tmp_path, third)
    monkeypatch.chdir(tmp_path.parent)
    for path in (tmp_path, Path(tmp_path.name)):
        for older in (first, second):
            with pytest.raises(StorageError):
                refuse_older(path, older)
    refuse_older(tmp_path, "d" * 32)  # somebody else has saved: nothing is known from now on
    assert saved_at(tmp_path) is None
    refuse_older(tmp_path, first)


def test_a_checkpoint_that_was_put_back_on_a_disk_of_this_node_is_loaded(tmp_path: Path) -> None:
    for value in (1, 2):
        torch_dcpx.save({"v": value}, tmp_path / "run")
        shutil.copytree(tmp_path / "run", tmp_path / f"copy-{value}")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "copy-1").rename(tmp_path / "run")
    state = {"v": 0}
    torch_dcpx.load(state, tmp_path / "run")
    assert state == {"v": 1}


def test_removal_is_known_to_have_left_what_is_not_younger_than_its_note(shared: Path) -> None:
    shared.mkdir()
    ages = {"__0_0.distcp": 30, "__0_1.distcp": 20, TOMBSTONE_NAME: 10}
    for name, age_s in ages.items():
        (shared / name).touch()
        os.utime(shared / name, (0, 1000 - age_s))
    with Directory(shared) as directory:
        assert not hidden(directory, list(ages))
        os.utime(shared / "__0_1.distcp", (0, 1000))  # a save that came behind the removal
        assert "data files behind its removal" in hidden(directory, list(ages))
        assert not hidden(directory, [TOMBSTONE_NAME])


def test_notes_of_saves_are_bounded(tmp_path: Path) -> None:
    for number in range(visibility._MAX_NOTES + 10):
        note_saved(tmp_path / str(number), "a" * 32)
    assert len(visibility._saved) == visibility._MAX_NOTES
    assert saved_at(tmp_path / "0") is None and saved_at(tmp_path / "99") is not None
    for number in range(1000):  # to one path
        note_saved(tmp_path, f"{number:032x}")
    known = saved_at(tmp_path)
    assert known is not None and len(known.before) < 100
    assert known.before[-1] == f"{998:032x}"


def test_a_load_of_two_saves_begins_anew_and_only_so_often(slept: list[float]) -> None:
    for times in (0, 1, 5):
        stale = [StorageError("replaced", errno=errno.ESTALE) for _ in range(times)]
        assert until_of_one_save(Looks(*stale)) == times + 1
    assert 0 <= sum(slept) <= 2 * 3.5
    other: DcpxError
    for other, count in ((StorageError("x", errno=errno.ESTALE), 6), (CorruptionError("x"), 1)):
        looks = Looks(*[other] * 9)
        with pytest.raises(type(other)):
            until_of_one_save(looks)
        assert looks.count == count
        assert is_of_another_save(other) == (count == 6)
