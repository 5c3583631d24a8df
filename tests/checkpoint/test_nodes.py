"""Saves and loads of ranks on several nodes, each with a view of the file system of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fuse_fixture import MountedClient
from support.ranks import run_cases

from torch_dcpx import CheckpointManager, ReadOptions, UnsupportedError, WriteOptions

WORKER = Path(__file__).with_name("nodes_worker.py")
Clients = tuple[MountedClient, MountedClient]


@pytest.mark.multirank
@pytest.mark.parametrize("check", ["auto", "no"])
def test_a_save_that_returned_is_seen_on_every_node(two_clients: Clients, check: str) -> None:
    first, second = two_clients
    run_cases(WORKER, 2, "late", first.path, second.path, check)


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


def test_a_manager_refuses_disks_of_each_node_by_name(tmp_path: Path) -> None:
    for options in (
        {"options": WriteOptions(node_local=True)},
        {"read_options": ReadOptions(node_local=True)},
    ):
        with pytest.raises(UnsupportedError, match="node_local=True: a CheckpointManager"):
            CheckpointManager(tmp_path, **options)
