"""Ranks that are nodes of their own: the second has another client's mount under the same path."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fuse_fixture import MountedClient
from support.nodes import enter_node
from support.rank_fixture import StartRanks

import torch_dcpx as dcpx
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
from torch_dcpx.checkpoint import save_run, sight
from torch_dcpx.checkpoint.same_directory import Spread
from torch_dcpx.checkpoint.sight import Sight, look_for
from torch_dcpx.writer.commit import check_present


def on_all(call: Callable[[], Any]) -> list[Any]:
    """Returns what each rank's call returns, or its error as a text."""
    try:
        own = call()
    except dcpx.DcpxError as error:
        own = f"{type(error).__name__}: {error}"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def state(value: int) -> dict[str, Any]:
    return {f"w{dist.get_rank()}": torch.full((1 << 15,), float(value)), "v": value}


def loaded(path: Path) -> int:
    target = state(-1)
    dcpx.load(target, path)
    weights = target[f"w{dist.get_rank()}"]
    assert weights.eq(target["v"]).all()
    return int(target["v"])


def saves(path: Path, value: int, **options: Any) -> Callable[[], None]:
    return lambda: dcpx.save(state(value), path, options=dcpx.WriteOptions(**options)) and None


def look_at_all(path: Path) -> None:
    """Has this node's client keep what is there."""
    for name in os.listdir(path):
        os.stat(path / name)
        (path / name).read_bytes()


def load_that_follows_a_save_sees_it_on_every_node(
    root: Path, other: Path, check: bool | str
) -> None:
    rank = dist.get_rank()
    enter_node(rank, root, other)
    for value in range(3):  # the same path
        assert on_all(saves(root / "same", value, check_visible=check)) == [None] * 2
        assert on_all(lambda: loaded(root / "same")) == [value] * 2
        look_at_all(root / "same")
    with dcpx.CheckpointManager(root / "root", keep_last=2) as manager:
        for value in range(1, 4):
            manager.save(value, state=state(value))
            manager.wait()
            target = state(-1)
            found = on_all(lambda target=target: manager.resume(state=target).tag)
            assert found == [f"step-{value}"] * 2, found
            assert target["v"] == value
            look_at_all(root / "root" / f"step-{value}")
        if rank == 0:
            assert "damaged" not in (root / "root" / "newest").read_text()


def one_rank_of_each_other_node_of_a_group_looks(root: Path, other: Path) -> None:
    rank, looked = dist.get_rank(), []
    enter_node(rank % 2, root, other)
    true_look = save_run.look_for
    save_run.look_for = lambda *given: (looked.append(given), true_look(*given))[1]
    ranks: dict[str, Any] = {"process_group": dist.new_group([1, 2, 3])}  # on nodes 1, 0, 1
    if rank == 0:
        return

    def check(value: int) -> None:
        target = state(-1)
        dcpx.load(target, root / "same", **ranks)
        assert target["v"] == value and target[f"w{rank}"].eq(value).all()
        look_at_all(root / "same")

    for value in (0, 1):
        dcpx.save(state(value), root / "same", **ranks)
        check(value)
    dcpx.async_save(state(2), root / "same", **ranks).result()
    check(2)
    with dcpx.CheckpointManager(root / "root", keep_last=1, **ranks) as manager:
        for value in (3, 4):
            manager.save(value, state=state(value))
            manager.wait()
            target = state(-1)
            assert manager.resume(state=target).tag == f"step-{value}"
            assert target["v"] == value
    assert len(looked) == (5 if rank == 2 else 0)


def save_that_a_node_does_not_see_fails_on_all_and_is_whole(
    root: Path, other: Path, address: str, pid: int
) -> None:
    rank, path = dist.get_rank(), root / "same"
    enter_node(rank, root, other)
    assert on_all(saves(path, 1)) == [None] * 2
    assert on_all(lambda: loaded(path)) == [1] * 2
    if rank == 1:
        client = MountedClient(other, address, pid)
        client.fail("lookup open", errno.ENOENT, "same/.metadata")
    found = on_all(saves(path, 2, visible_s=1.0))
    for text in found:
        assert "is committed and durable, but rank 1 (node1) does not see it" in text, text
        assert "StorageError" in text and "check_visible=False" in text
    # A load of the same job knows what must be there.
    options = dcpx.ReadOptions(visible_s=1.0)
    for text in on_all(lambda: dcpx.load(state(-1), path, options=options)):
        assert "NotCommittedError" in text and "this job has committed save" in text, text
        assert "on node1, for 1 s" in text
    if rank == 0:
        assert "is whole" in str(dcpx.verify(path))
        target = state(-1)
        dcpx.load(target, path, no_dist=True)
        assert target["v"] == 2


def path_that_is_another_directory_on_each_node_is_told_before_a_byte(
    root: Path, other: Path
) -> None:
    enter_node(dist.get_rank(), root, other)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    handler.setLevel(logging.WARNING)
    logging.getLogger("torch_dcpx").addHandler(handler)
    for value in (1, 2):
        assert on_all(saves(root / "plain", value)) == [None] * 2
    told = [line for line in lines if "is another directory than on rank 0" in line]
    assert len(told) == (dist.get_rank() == 0), lines  # once
    manager = dcpx.CheckpointManager(root / "of a manager" / "root", async_save=False)
    for text in on_all(lambda: manager.save(1, state=state(1)) and None):
        assert "PlanError" in text and "on rank 1 (node1)" in text, text
        assert "mount it on each" in text and "node_local=True" in text
    assert not list((root / "of a manager" / "root").glob("step-1/*"))


def mount_that_goes_between_two_saves_fails_the_second(
    root: Path, other: Path, elsewhere: Path
) -> None:
    rank = dist.get_rank()
    enter_node(rank, root, other)
    options = dcpx.WriteOptions(visible_s=1.0)
    manager = dcpx.CheckpointManager(root / "root", keep_last=1, options=options, async_save=False)
    assert on_all(lambda: manager.save(1, state=state(1)) and None) == [None] * 2
    enter_node(rank, root, elsewhere)  # on node 1 another directory lies at that path from now on
    for text in on_all(lambda: manager.save(2, state=state(2)) and None):
        assert "PlanError" in text and "rank 1 (node1) has written" in text, text
        assert "is not one directory on all nodes" in text
    if rank == 0:
        alone = dcpx.CheckpointManager(root / "root", no_dist=True)
        assert alone.tags() == ["step-1"]


# ---- Tests --------------------------------------------------------------------------------------

Clients = tuple[MountedClient, MountedClient]
multirank = pytest.mark.multirank


@multirank
@pytest.mark.parametrize(
    ("count", "check", "more"),
    [
        (2, load_that_follows_a_save_sees_it_on_every_node, lambda *_: ("auto",)),
        (2, load_that_follows_a_save_sees_it_on_every_node, lambda *_: (False,)),
        (4, one_rank_of_each_other_node_of_a_group_looks, lambda *_: ()),
        (
            2,
            save_that_a_node_does_not_see_fails_on_all_and_is_whole,
            lambda second, _: (second.address, second.pid),
        ),
        (2, mount_that_goes_between_two_saves_fails_the_second, lambda _, elsewhere: (elsewhere,)),
    ],
)
def test_nodes_that_have_a_client_each(
    ranks: StartRanks, two_clients: Clients, tmp_path: Path, count: int, check: Any, more: Any
) -> None:
    first, second = two_clients
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ranks(count, anew=True)(check, first.path, second.path, *more(second, elsewhere))


@multirank
def test_nodes_that_do_not_share_a_path_hear_it(ranks: StartRanks, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    run = ranks(2, anew=True)
    run(path_that_is_another_directory_on_each_node_is_told_before_a_byte, one, other)


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


@pytest.mark.parametrize("late", ["gone", "short", ".metadata"])
def test_node_looks_for_data_files_and_metadata_of_a_save(tmp_path: Path, late: str) -> None:
    dcpx.save({"w": torch.ones(9)}, tmp_path, no_dist=True)
    (data,) = tmp_path.glob("*.distcp")
    options = WriteOptions(check_visible=True, visible_s=0.1)
    save = Sight(tmp_path, Spread(("node0", "node1"), (1,)), options)
    seen = save.seen("some-save", {data.name: data.stat().st_size})
    assert seen is not None
    exchange: Any = SimpleNamespace(rank=1, host="node1")
    look_for(seen, tmp_path, "some-save", exchange, options)
    if late == "gone":
        data.unlink()
    else:
        path = data if late == "short" else tmp_path / ".metadata"
        os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(StorageError, match=r"committed and durable, but rank 1 \(node1\) does not"):
        look_for(seen, tmp_path, "some-save", exchange, options)


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
