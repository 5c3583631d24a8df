"""Our planners on two ranks, with stock's writers and readers and ours."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.rank_fixture import StartRanks
from support.tensor_bits import bits
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_dcpx as dcpx

ROWS, COLUMNS = 501, 1024  # 2 MiB


def state(mesh: Any, fill: float) -> dict[str, Any]:
    """Replicated tensors, one of which is most of all bytes, shards, and a value."""
    large = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) * fill
    return {
        "model": {
            "large": torch.nn.Parameter(large.clone()),
            "copied": distribute_tensor(large[:99] + fill, mesh, [Replicate()]),
            "rows": distribute_tensor(large[:31] - fill, mesh, [Shard(0)]),
            "small": torch.full((40,), fill),
        },
        "step": int(fill),
    }


def file_bytes(path: Path) -> list[int]:
    """Returns the bytes of each rank's files."""
    return [sum(file.stat().st_size for file in path.glob(f"__{r}_*")) for r in range(2)]


def every_pair_of_sides_loads_what_was_saved(root: Path, mesh: Any) -> None:
    planner = dcpx.DcpxSavePlanner(split_replicas=True)  # one for all saves
    writers = (dcpx.DcpxWriter, dcp.FileSystemWriter)
    for number, writer in enumerate(writers):
        path = root / str(number)
        wanted = state(mesh, 3.0 + number)
        dcp.save(dict(wanted), storage_writer=writer(path), planner=planner)
        sizes = file_bytes(path)
        assert max(sizes) * 2 / sum(sizes) <= 1.05, sizes
        sides = itertools.product(
            (dcpx.DcpxReader, dcp.FileSystemReader),
            (dcpx.DcpxLoadPlanner, dcp.DefaultLoadPlanner),
        )
        for reader, load_planner in sides:
            found = state(mesh, 0.0)
            dcp.load(found, storage_reader=reader(path), planner=load_planner())
            assert bits(found) == bits(wanted)


def own_entry_points_take_both_planners(root: Path, mesh: Any) -> None:
    wanted = state(mesh, 7.0)
    dcpx.save(wanted, root / "save", planner=dcpx.DcpxSavePlanner(split_replicas=True))
    handle = dcpx.async_save(
        wanted, root / "async", planner=dcpx.DcpxSavePlanner(split_replicas=True)
    )
    with torch.no_grad():
        wanted["model"]["large"].zero_()
    handle.result()
    for name in ("save", "async"):
        sizes = file_bytes(root / name)
        assert max(sizes) * 2 / sum(sizes) <= 1.05, sizes
        found = state(mesh, 0.0)
        dcpx.load(found, root / name, planner=dcpx.DcpxLoadPlanner())
        assert bits(found) == bits(state(mesh, 7.0))


def values_that_differ_are_an_error_on_both(root: Path, rank: int) -> None:
    planner = dcpx.DcpxSavePlanner(on_conflict="error")
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"seed": rank}, storage_writer=dcpx.DcpxWriter(root / "no"), planner=planner)
    (error, _), *_ = caught.value.failures.values()
    assert isinstance(error, dcpx.PlanError) and error.fqn == "seed"
    assert not (root / "no" / ".metadata").exists()
    dcp.save({"seed": 1}, storage_writer=dcpx.DcpxWriter(root / "yes"), planner=planner)


def hole_that_one_rank_sees_fails_the_load_of_both(root: Path, mesh: Any) -> None:
    path = root / "0"
    reader = dcpx.DcpxReader(path)
    read = reader.read_metadata

    def with_a_hole(**kwargs: Any) -> Any:
        metadata = read(**kwargs)
        metadata.state_dict_metadata["model.rows"].chunks.pop()
        return metadata

    reader.read_metadata = with_a_hole  # type: ignore[method-assign]
    found = state(mesh, 0.0)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(found, storage_reader=reader, planner=dcpx.DcpxLoadPlanner())
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, dcpx.CorruptionError) and error.fqn == "model.rows"
    assert list(caught.value.failures) == [1]
    assert bits(found) == bits(state(mesh, 0.0))


def saves_and_loads(root: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    every_pair_of_sides_loads_what_was_saved(root, mesh)
    own_entry_points_take_both_planners(root, mesh)
    values_that_differ_are_an_error_on_both(root, dist.get_rank())
    hole_that_one_rank_sees_fails_the_load_of_both(root, mesh)


@pytest.mark.slow
def test_two_ranks_save_and_load_by_our_planners(ranks: StartRanks, tmp_path: Path) -> None:
    ranks(2)(saves_and_loads, tmp_path)
