"""A save of three ranks, one of which fails."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.placements import distribute
from support.rank_fixture import StartRanks
from support.states import assert_same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_dcpx import _C, DcpxReader, DcpxWriter
from torch_dcpx.errors import StorageError


def states(seed: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Returns this rank's part of the state, plain tensors and Python values included."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(401, 177, generator=g)
    return {
        "rows": distribute(rows, mesh, (Shard(0),)),
        "replicated": distribute(rows[:50].clone(), mesh, (Replicate(),)),
        "plain": {"weight": torch.randn(300, 400, generator=g), "bias": torch.randn(3).zero_()},
        "values": {"step": seed, "betas": (0.9, 0.95), "name": "adamw", "none": None},
    }


def local(state: Any) -> Any:
    """Returns the state with shards in place of DTensors, to compare."""
    if isinstance(state, DTensor):
        return state.to_local().clone()
    return {key: local(value) for key, value in state.items()} if isinstance(state, dict) else state


def load(expected: dict[str, Any], reader: Any, mesh: DeviceMesh) -> None:
    """Loads over another state, and compares this rank's part."""
    target = states(expected["values"]["step"] + 1, mesh)
    dcp.load(target, storage_reader=reader)
    assert_same(local(expected), local(target), str(reader.path))


class FailingPlanner(DefaultSavePlanner):
    """Fails on one rank when the data of its last item is asked for."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if dist.get_rank() == 1 and write_item.index == self.plan.items[-1].index:
            raise ZeroDivisionError("planned")
        return super().resolve_data(write_item)


def faults(seed: int) -> Iterator[tuple[int, type[BaseException], dict[str, Any]]]:
    """Yields (failing rank, its error, arguments of dcp.save), the fault armed."""
    yield 1, ZeroDivisionError, {"planner": FailingPlanner()}
    for failing in (0, 2):  # the coordinator itself, and a follower: their disk
        if dist.get_rank() == failing:
            _C.arm_fault(2 + seed % 2, errno.EIO)
        yield failing, StorageError, {}


def saves_in_which_a_rank_fails(root: Path, seed: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    path = root / "ckpt"
    writer = DcpxWriter(path)
    kept = states(seed, mesh)
    dcp.save(kept, storage_writer=writer)
    for number, (failing, error, kwargs) in enumerate(faults(seed), start=1):
        dist.barrier()
        committed = (path / ".metadata").read_bytes()
        try:
            with pytest.raises(CheckpointException) as caught:  # on every rank
                dcp.save(states(seed + number, mesh), storage_writer=writer, **kwargs)
        finally:
            _C.disarm_fault()
        failures = caught.value.failures
        assert {rank: type(failure[0]) for rank, failure in failures.items()} == {failing: error}
        assert (path / ".metadata").read_bytes() == committed
        for reader in (DcpxReader(path), dcp.FileSystemReader(path)):
            load(kept, reader, mesh)
        dist.barrier()
        kept = states(seed + 100 + number, mesh)
        dcp.save(kept, storage_writer=writer)
        load(kept, DcpxReader(path) if number % 2 else dcp.FileSystemReader(path), mesh)
        assert (path / ".metadata").read_bytes() != committed
        named = {
            info.relative_path for info in DcpxReader(path).read_metadata().storage_data.values()
        }
        assert {p.name for p in path.glob("*.distcp")} == named, "leftovers of the failed save"


@pytest.mark.multirank
def test_failed_rank_raises_on_every_rank_and_publishes_nothing(
    ranks: StartRanks, tmp_path: Path, seed: int
) -> None:
    ranks(3)(saves_in_which_a_rank_fails, tmp_path, seed % 10_000)
