"""Commits that fail around their rename, with a directory of its own on each node.

Ranks are threads; the coordinator's directory has the `.metadata`, a follower's never does.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.saves import data_files, load
from support.states import assert_same
from support.store_ranks import Ranks
from torch.distributed import HashStore

from torch_dcpx import DcpxSavePlanner, DcpxWriter, StorageError, WriteOptions
from torch_dcpx.checkpoint.save_run import SaveRun
from torch_dcpx.storage.directory import Directory

OPTIONS = WriteOptions(node_local=True)
EIO = StorageError("the disk is gone", errno=errno.EIO, path="c")

Fail = Callable[[], object]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    found = Ranks(HashStore(), 2)
    yield found
    found.close()


def state_of(seed: int, rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return {f"rank{rank}": torch.randn(5000, generator=generator)}


def node(root: Path, rank: int) -> Path:
    return root / f"node{rank}" / "ckpt"


def save(ranks: Ranks, root: Path, seed: int) -> list[Any]:
    """Saves as `dcpx.save` does; returns what each rank got."""

    def one(rank: int) -> Any:
        path = node(root, rank)
        writer = DcpxWriter(path, options=OPTIONS)
        exchange = ranks.exchange(rank)
        with SaveRun(state_of(seed, rank), path, writer, DcpxSavePlanner(), exchange) as run:
            plan = run.plan(lambda: None)
            return run.write_and_settle(lambda: (plan, run.planner))

    return ranks.run(one)


def raise_(error: BaseException) -> None:
    raise error


def fail_at(monkeypatch: pytest.MonkeyPatch, root: Path, where: str, fail: Fail) -> None:
    """Makes the coordinator's next commit fail: "rename" before it, "renamed" in it, but after it
    happened, "sync" in the fsync after it, "unreadable" as well, and nothing can be read from then
    on.
    """
    rename, sync = Directory.rename, Directory.sync
    has_renamed = False

    def failing_rename(self: Directory, name: str, new_name: str) -> None:
        nonlocal has_renamed
        if new_name != ".metadata":
            rename(self, name, new_name)
            return
        if where == "rename":
            fail()
        rename(self, name, new_name)
        has_renamed = True
        if where == "renamed":
            fail()

    def failing_sync(self: Directory) -> None:
        if where in ("sync", "unreadable") and has_renamed and self.path == node(root, 0):
            if where == "unreadable":
                monkeypatch.setattr(Directory, "open_small", lambda *_: raise_(EIO))
            fail()
        sync(self)

    monkeypatch.setattr(Directory, "rename", failing_rename)
    monkeypatch.setattr(Directory, "sync", failing_sync)


def joined(root: Path, metadata: bytes) -> Path:
    """Returns a directory with the files of both nodes, as a launcher's copy step makes it."""
    there = root / "joined"
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir()
    for rank in range(2):
        for name in data_files(node(root, rank)):
            shutil.copy(node(root, rank) / name, there / name)
    (there / ".metadata").write_bytes(metadata)
    return there


def assert_loads(root: Path, metadata: bytes, seed: int) -> None:
    expected = {**state_of(seed, 0), **state_of(seed, 1)}
    for reader in ("ours", "stock"):
        assert_same(expected, load(expected, joined(root, metadata), reader))


@pytest.mark.parametrize("where", ["rename", "renamed", "sync", "unreadable"])
def test_commit_that_fails_leaves_the_checkpoint_that_the_coordinator_has(
    tmp_path: Path, ranks: Ranks, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = node(tmp_path, 0) / ".metadata"
    for seed, error in enumerate((EIO, KeyboardInterrupt(), SystemExit(3))):
        old, new = 10 * seed, 10 * seed + 1
        save(ranks, tmp_path, old)
        before = metadata.read_bytes()
        files_before = [data_files(node(tmp_path, rank)) for rank in range(2)]
        with monkeypatch.context() as patch:
            fail_at(patch, tmp_path, where, lambda error=error: raise_(error))
            got = save(ranks, tmp_path, new)
        assert all(isinstance(each, BaseException) for each in got), (error, got)
        after = metadata.read_bytes()
        is_there = where != "rename"
        assert (after != before) is is_there, error
        assert_loads(tmp_path, after, new if is_there else old)
        if is_there:
            assert_loads(tmp_path, before, old)  # which a power cut may bring back
        else:
            assert [data_files(node(tmp_path, rank)) for rank in range(2)] == files_before
        save(ranks, tmp_path, new + 1)
        assert_loads(tmp_path, metadata.read_bytes(), new + 1)
