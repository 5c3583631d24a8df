"""Saves and loads of ranks on several nodes, each with a view of the file system of its own."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fuse_fixture import MountedClient
from support.ranks import run_cases

from torch_dcpx import (
    CheckpointManager,
    DcpxError,
    PlanError,
    ReadOptions,
    StorageError,
    UnsupportedError,
    WriteOptions,
)
from torch_dcpx._mounts import Mount
from torch_dcpx.checkpoint import sight
from torch_dcpx.checkpoint.same_directory import Spread
from torch_dcpx.checkpoint.sight import Sight
from torch_dcpx.writer.commit import check_present

WORKER = Path(__file__).with_name("nodes_worker.py")
Clients = tuple[MountedClient, MountedClient]


@pytest.mark.multirank
@pytest.mark.parametrize("check", ["auto", "no"])
def test_a_save_that_returned_is_seen_on_every_node(two_clients: Clients, check: str) -> None:
    first, second = two_clients
    run_cases(WORKER, 2, "late", first.path, second.path, check)


@pytest.mark.multirank
def test_one_rank_of_each_other_node_of_a_group_looks(two_clients: Clients) -> None:
    first, second = two_clients
    run_cases(WORKER, 4, "group", first.path, second.path)


@pytest.mark.multirank
def test_a_save_that_a_node_does_not_see_fails_on_all(two_clients: Clients) -> None:
    first, second = two_clients
    run_cases(WORKER, 2, "never", first.path, second.path, second.address, second.pid)


@pytest.mark.multirank
def test_nodes_that_do_not_share_a_path_hear_it(two_clients: Clients, tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    run_cases(WORKER, 2, "apart", tmp_path / "one", tmp_path / "other")


@pytest.mark.multirank
def test_a_mount_that_is_lost_fails_a_managers_save(two_clients: Clients, tmp_path: Path) -> None:
    first, second = two_clients
    (tmp_path / "elsewhere").mkdir()
    run_cases(WORKER, 2, "lost mount", first.path, second.path, tmp_path / "elsewhere")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN, errno.ENOENT])
def test_a_file_that_cannot_be_looked_at_is_no_mount_that_is_missing(
    tmp_path: Path, number: int
) -> None:
    path = str(tmp_path / "__1_0.distcp")

    def check_sizes(*_: Any, **__: Any) -> None:
        raise StorageError(f"stat '{path}': {os.strerror(number)}", errno=number, path=path)

    place: Any = SimpleNamespace(path=tmp_path, missing=lambda _: [], check_sizes=check_sizes)
    save: Any = SimpleNamespace(hosts=("node0", "node1"))
    with pytest.raises(DcpxError) as caught:
        check_present(place, (), (), save, 0.1)
    is_missing = number == errno.ENOENT
    assert type(caught.value) is (PlanError if is_missing else StorageError)
    assert ("mount it on each" in str(caught.value)) == is_missing


def test_a_coordinator_that_does_not_see_its_own_commit_says_that_it_is_one(tmp_path: Path) -> None:
    spread = Spread(("node0", "node1"), (1,))
    save = Sight(tmp_path, spread, WriteOptions(check_visible=True))
    text = r"save abc to .* is committed and durable, but rank 0 \(node0\) does not see it"
    with pytest.raises(StorageError, match=text):
        save.seen("abc", {})


def test_a_manager_refuses_disks_of_each_node_by_name(tmp_path: Path) -> None:
    for options in (
        {"options": WriteOptions(node_local=True)},
        {"read_options": ReadOptions(node_local=True)},
    ):
        with pytest.raises(UnsupportedError, match="node_local=True: a CheckpointManager"):
            CheckpointManager(tmp_path, **options)


@pytest.mark.parametrize("kind", ["fuse.ceph-fuse", "ceph", "nfs4"])
def test_the_node_that_renamed_the_metadata_opens_it_for_writing_on_cephfs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    metadata = tmp_path / ".metadata"
    metadata.write_bytes(b"of a save")
    opened: list[tuple[Path, int]] = []

    def note(path: Path, flags: int) -> int:
        opened.append((path, flags & (os.O_ACCMODE | os.O_TRUNC | os.O_CREAT)))
        return os.open(path, flags)

    monkeypatch.setattr(sight, "shared_mount", lambda path: Mount(path, kind, ()))
    monkeypatch.setattr(sight, "os", SimpleNamespace(**vars(os) | {"open": note}))
    save = Sight(tmp_path, Spread(("node0", "node1"), (1,)), WriteOptions(check_visible=True))
    assert save.seen("some-save", {}) == (9, b"of a save", {})
    assert opened == ([] if kind == "nfs4" else [(metadata, os.O_WRONLY)])
    metadata.unlink()
    with pytest.raises(StorageError, match="rank 0"):
        save.seen("some-save", {})
