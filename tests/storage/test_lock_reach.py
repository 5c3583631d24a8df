"""Locks on file systems that many nodes mount: how far they reach is said, none is in the way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest
import torch

import torch_dcpx
from torch_dcpx import CheckpointManager, ConcurrentSaveError
from torch_dcpx import _mounts as mounts
from torch_dcpx._mounts import Mount, shared_mount
from torch_dcpx.storage import lock_reach
from torch_dcpx.storage.lock_reach import check_reach, locks_of_one_node
from torch_dcpx.storage.names import LOCK_NAME, READERS_NAME
from torch_dcpx.storage.save_lock import boot_id


def test_file_system_that_makes_no_file_for_reading_alone_is_tidied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """rclone answers such an open by EIO."""
    real = os.open

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT and not flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    with CheckpointManager(tmp_path, keep_last=1, no_dist=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, model=torch.nn.Linear(2, 2))
            manager.wait()
        assert manager.tags() == ["step-3"]
    assert [each.message for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_readers_file_of_another_user_is_locked_by_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if os.fspath(path).endswith(READERS_NAME) and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *args, **kwargs)

    with CheckpointManager(tmp_path, keep_last=1, no_dist=True) as manager:
        manager.save(1, model=torch.nn.Linear(2, 2))
        manager.wait()
        monkeypatch.setattr(os, "open", opened)
        (tmp_path / "step-2").mkdir()
        (tmp_path / "step-2" / READERS_NAME).touch()
        manager.save(2, model=torch.nn.Linear(2, 2))
        manager.wait()
        assert manager.tags() == ["step-2"]


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Mount]:
    """Lets the test's directory be a file system of some type."""

    def mount(kind: str, *options: str) -> Mount:
        made = Mount(str(tmp_path), kind, options)
        monkeypatch.setattr(mounts, "HAS_SHARED", made.is_shared)
        monkeypatch.setattr(mounts, "MOUNTS", {str(tmp_path): made})
        monkeypatch.setattr(mounts, "_kept", {})
        monkeypatch.setattr(lock_reach, "_known", set())
        return made

    return mount


REACHES = {
    "sshfs": (("fuse.sshfs",), "fuse.sshfs"),
    "NFS that locks here": (("nfs4", "rw", "local_lock=all"), "local_lock=all"),
    "NFS": (("nfs4", "rw", "local_lock=none"), ""),
    "Lustre that locks here": (("lustre", "localflock"), "localflock"),
    "CephFS": (("ceph", "rw"), ""),
    "a disk": (("ext4", "rw"), ""),
}


@pytest.mark.parametrize(("given", "why"), REACHES.values(), ids=REACHES.keys())
def test_saves_say_once_that_locks_end_at_this_node(
    tmp_path: Path,
    mounted: Callable[..., Mount],
    caplog: pytest.LogCaptureFixture,
    given: tuple[str, ...],
    why: str,
) -> None:
    assert locks_of_one_node(mounted(*given)) == why
    for name in ("a", "b"):
        torch_dcpx.save({"x": torch.ones(3)}, tmp_path / name, no_dist=True)
    said = [each.message for each in caplog.records if "locks on" in each.message]
    assert len(said) == bool(why)
    assert all(f"({why})" in each for each in said)


@pytest.mark.parametrize("reach", ["all", "one node", "unknown"])
def test_rank_of_another_node_says_once_that_it_does_not_meet_the_coordinators_lock(
    tmp_path: Path, mounted: Callable[..., Mount], caplog: pytest.LogCaptureFixture, reach: str
) -> None:
    mounted("fuse.new")
    boot = boot_id() if reach == "unknown" else "of-another-machine"
    (tmp_path / LOCK_NAME).write_text(f"host=far pid=9 boot={boot}\n")
    with (tmp_path / LOCK_NAME).open("r+b") as coordinator:
        if reach == "all":
            fcntl.flock(coordinator, fcntl.LOCK_EX)
        for _ in range(2):
            check_reach(tmp_path)
        # It is left as it was found.
        with (tmp_path / LOCK_NAME).open("r+b") as other:
            if reach != "all":
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    said = [each.message for each in caplog.records if "locks on" in each.message]
    assert len(said) == (reach == "one node")


WAITS = "it may be of a lost node"


@pytest.fixture
def held(tmp_path: Path, mounted: Callable[..., Mount]) -> Iterator[Callable[[str], IO[bytes]]]:
    """Holds the lock of saves on a file system of many nodes, by a record that says who does."""
    mounted("ceph")
    with contextlib.ExitStack() as stack:

        def hold(record: str) -> IO[bytes]:
            (tmp_path / LOCK_NAME).write_text(record + "\n")
            file = stack.enter_context((tmp_path / LOCK_NAME).open("r+b"))
            fcntl.flock(file, fcntl.LOCK_EX)
            return file

        yield hold


GONE = 1 << 22  # no pid is that high


@pytest.mark.parametrize(
    "record",
    [
        "host=far pid=9 boot=of-another-machine",
        f"host=far pid=9 boot={boot_id()}",  # of a container
        f"host={socket.gethostname()} pid={GONE} boot={boot_id()}",  # of a client that is no more
    ],
)
def test_save_waits_for_a_lock_that_a_lost_node_may_have_left(
    tmp_path: Path,
    held: Callable[[str], IO[bytes]],
    caplog: pytest.LogCaptureFixture,
    record: str,
) -> None:
    left = held(record)

    def free() -> None:
        while not any(WAITS in each.message for each in caplog.records):
            time.sleep(0.01)
        left.close()

    with ThreadPoolExecutor() as pool:
        freed = pool.submit(free)
        torch_dcpx.save({"x": torch.ones(3)}, tmp_path, no_dist=True)
        freed.result()
    said = [each.message for each in caplog.records if WAITS in each.message]
    assert len(said) == 1 and record in said[0]
    assert torch_dcpx.verify(tmp_path).ok


def test_wait_for_the_lock_of_a_lost_node_ends_before_the_save_does(
    tmp_path: Path, held: Callable[[str], IO[bytes]]
) -> None:
    held("host=far pid=9 boot=of-another-machine")
    options = torch_dcpx.WriteOptions(save_timeout_s=1)
    with pytest.raises(ConcurrentSaveError, match="host=far pid=9"):
        torch_dcpx.save({"x": torch.ones(3)}, tmp_path, options=options, no_dist=True)
    assert os.listdir(tmp_path) == [LOCK_NAME]


@pytest.mark.parametrize("record", [f"host={socket.gethostname()} pid=1 boot={boot_id()}", ""])
def test_lock_of_a_process_that_runs_here_or_of_none_that_is_named_refuses_at_once(
    tmp_path: Path,
    held: Callable[[str], IO[bytes]],
    caplog: pytest.LogCaptureFixture,
    record: str,
) -> None:
    held(record)
    with pytest.raises(ConcurrentSaveError):
        torch_dcpx.save({"x": torch.ones(3)}, tmp_path, no_dist=True)
    assert not any(WAITS in each.message for each in caplog.records)


def test_shared_mount_is_found_by_names_and_through_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, near = tmp_path / "far", tmp_path / "far" / "in" / "near"
    made = {
        str(where): Mount(str(where), kind, ())
        for where, kind in ((Path("/"), "ext4"), (far, "fuse.sshfs"), (near, "tmpfs"))
    }
    monkeypatch.setattr(mounts, "MOUNTS", made)
    monkeypatch.setattr(mounts, "_kept", {})
    there = tmp_path / "there"
    there.mkdir()
    (there / "absolute").symlink_to(far / "x")
    (there / "relative").symlink_to("../far")
    (there / "twice").symlink_to("relative/deep")
    (there / "self").symlink_to("self")
    expected = {
        far: True, far / "x": True, far / "in": True, near: False, near / "x": False,
        tmp_path / "farther": False, there: False, there / "absolute" / "y": True,
        there / "relative": True, there / "twice": True, there / "self": False,
        there / ".." / "far": True,
    }  # fmt: skip
    for path, is_shared in expected.items():
        for _ in range(2):
            found = shared_mount(str(path))
            assert (found is not None) == is_shared, path
            assert found is None or found.where == str(far)


def test_mounts_of_this_process_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda rw\n"
        "50 22 0:44 / /mnt/with\\040space rw,nosuid - nfs4 server:/x rw,vers=4.2,local_lock=none\n"
    )
    monkeypatch.setattr(mounts, "_TABLE", table)
    found = mounts._table()
    assert found["/"] == Mount("/", "ext4", ("rw", "relatime", "rw"), os.makedev(8, 1))
    nfs = found["/mnt/with space"]
    assert nfs.is_shared and not found["/"].is_shared
    assert "local_lock=none" in nfs.options
