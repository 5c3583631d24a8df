"""DTensor states of three ranks, and a rank that fails."""

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
from support.states import assert_same, random_bytes
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_dcpx import _C, DcpxReader, DcpxWriter
from torch_dcpx.errors import StorageError

# name -> (global shape, dtype, placements on the mesh of one or of two dimensions)
CASES: dict[str, tuple[tuple[int, ...], torch.dtype, tuple[Placement, ...]]] = {
    "rows": ((64, 33), torch.float32, (Shard(0),)),
    "columns": ((33, 64), torch.bfloat16, (Shard(1),)),
    "replicated": ((50, 7), torch.float64, (Replicate(),)),
    "uneven_rows": ((7, 5), torch.int64, (Shard(0),)),
    "fewer_rows_than_ranks": ((1, 9), torch.uint8, (Shard(0),)),
    "no_rows": ((0, 4), torch.float32, (Shard(0),)),
    "scalar": ((), torch.float32, (Replicate(),)),
    "vector": ((30_003,), torch.int32, (Shard(0),)),
    "large_rows": ((401, 177), torch.float32, (Shard(0),)),
    "grid": ((130, 70), torch.complex64, (Shard(0), Shard(1))),
    "uneven_grid": ((5, 3), torch.int16, (Shard(0), Shard(1))),
    "hybrid": ((40, 30), torch.float32, (Replicate(), Shard(0))),
    "strided": ((48, 6), torch.float32, (_StridedShard(0, split_factor=2), Shard(0))),
}


def full_tensor(name: str, seed: int) -> torch.Tensor:
    """Returns the whole tensor of a case, the same on every rank and in every process."""
    shape, dtype, _ = CASES[name]
    g = torch.Generator().manual_seed(seed * 100 + list(CASES).index(name))
    return random_bytes(shape, dtype, g)


def placements_on(name: str, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Returns a case's placements on this mesh."""
    _, _, placements = CASES[name]
    is_strided = any(isinstance(placement, _StridedShard) for placement in placements)
    # A strided shard's split factor is the size of the second dimension.
    if is_strided and mesh.size(1) != 2:
        return Shard(0), Replicate()
    return placements


def states(seed: int, meshes: list[DeviceMesh]) -> dict[str, Any]:
    """Returns this rank's part of the state, plain tensors and Python values included."""
    state: dict[str, Any] = {}
    for name, (_, _, placements) in CASES.items():
        mesh = meshes[len(placements) - 1]
        state[name] = distribute(full_tensor(name, seed), mesh, placements_on(name, mesh))
    g = torch.Generator().manual_seed(seed)
    state["plain"] = {"weight": torch.randn(300, 400, generator=g), "bias": torch.randn(3).zero_()}
    state["values"] = {"step": seed, "betas": (0.9, 0.95), "name": "adamw", "none": None}
    return state


def blank(state: Any) -> Any:
    """Returns targets for `state`: shards filled with ones, None for values."""
    if isinstance(state, DTensor):
        local = torch.full_like(state.to_local(), 1, memory_format=torch.contiguous_format)
        return DTensor.from_local(
            local, state.device_mesh, state.placements, run_check=False,
            shape=state.shape, stride=state.stride(),
        )  # fmt: skip
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    return {key: blank(value) for key, value in state.items()} if isinstance(state, dict) else None


def local(state: Any) -> Any:
    """Returns the state with shards in place of DTensors, to compare."""
    if isinstance(state, DTensor):
        return state.to_local().clone(memory_format=torch.contiguous_format)
    return {key: local(value) for key, value in state.items()} if isinstance(state, dict) else state


def load(expected: dict[str, Any], reader: Any) -> None:
    """Loads into blank targets of the same placements and compares this rank's part."""
    target = blank(expected)
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
    meshes = [init_device_mesh("cpu", (3,)), init_device_mesh("cpu", (3, 1))]
    path = root / "ckpt"
    writer = DcpxWriter(path)
    kept = states(seed, meshes)
    dcp.save(kept, storage_writer=writer)
    for number, (failing, error, kwargs) in enumerate(faults(seed), start=1):
        dist.barrier()
        committed = (path / ".metadata").read_bytes()
        try:
            with pytest.raises(CheckpointException) as caught:  # on every rank
                dcp.save(states(seed + number, meshes), storage_writer=writer, **kwargs)
        finally:
            _C.disarm_fault()
        failures = caught.value.failures
        assert {rank: type(failure[0]) for rank, failure in failures.items()} == {failing: error}
        assert (path / ".metadata").read_bytes() == committed
        for reader in (DcpxReader(path), dcp.FileSystemReader(path)):
            load(kept, reader)
        dist.barrier()
        kept = states(seed + 100 + number, meshes)
        dcp.save(kept, storage_writer=writer)
        load(kept, DcpxReader(path) if number % 2 else dcp.FileSystemReader(path))
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
