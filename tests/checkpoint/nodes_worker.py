"""Ranks that are nodes of their own: the second has another client's mount under the same path."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.fuse_fixture import MountedClient
from support.nodes import enter_node
from support.worker import rank_case

import torch_dcpx as dcpx
from torch_dcpx.checkpoint import save_run


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


@rank_case("late")
def load_that_follows_a_save_sees_it_on_every_node(root: Path, other: str, check: str) -> None:
    rank = dist.get_rank()
    enter_node(rank, root, other)
    is_checked = {"auto": "auto", "no": False}[check]
    for value in range(3):  # the same path
        assert on_all(saves(root / "same", value, check_visible=is_checked)) == [None] * 2
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


@rank_case("group")
def one_rank_of_each_other_node_of_a_group_looks(root: Path, other: str) -> None:
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


@rank_case("never")
def save_that_a_node_does_not_see_fails_on_all_and_is_whole(
    root: Path, other: str, address: str, pid: str
) -> None:
    rank, path = dist.get_rank(), root / "same"
    enter_node(rank, root, other)
    assert on_all(saves(path, 1)) == [None] * 2
    assert on_all(lambda: loaded(path)) == [1] * 2
    if rank == 1:
        client = MountedClient(Path(other), address, int(pid))
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


@rank_case("apart")
def path_that_is_another_directory_on_each_node_is_told_before_a_byte(
    root: Path, other: str
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


@rank_case("lost mount")
def mount_that_goes_between_two_saves_fails_the_second(
    root: Path, other: str, elsewhere: str
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
