"""dcpx.export by two and three ranks: one artifact, and the error of one on all."""

from __future__ import annotations

import errno
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from export_cases import assert_artifact
from support.no_collectives import no_collectives
from support.rank_fixture import StartRanks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_dcpx as dcpx
from torch_dcpx import _C


def dense() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    return {
        "rows": torch.randn(101, 33, generator=g),
        "columns": torch.randn(64, 1000, generator=g).bfloat16(),
        "both": torch.randn(30, 20, generator=g),
        "same": torch.randn(3000, generator=g),
        "few": torch.arange(2),
        "turned": torch.randn(40, 50, generator=g).T.contiguous(),
    }


def sharded(whole: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    places = {"rows": Shard(0), "columns": Shard(1), "both": Shard(1), "same": Replicate(),
              "few": Shard(0), "turned": Shard(0)}  # fmt: skip
    state = {n: distribute_tensor(t, mesh, [places[n]]) for n, t in whole.items()}
    if dist.get_world_size() == 2:
        grid = init_device_mesh("cpu", (2, 1))
        state["both"] = distribute_tensor(whole["both"], grid, [Shard(1), Shard(0)])
    return state


def export_together(path: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    whole = dense()
    state = sharded(whole, mesh)
    with no_collectives():
        report = dcpx.export(state, path / "live", max_shard_bytes=20_000)
    assert_artifact(path / "live", whole)
    written = [0] * world
    dist.all_gather_object(written, report.written_bytes)
    total = sum(t.numel() * t.element_size() for t in whole.values())
    assert sum(written) == total and max(written) < total, written  # each byte once, by all
    dcpx.save(state, path / "ckpt")
    with no_collectives():
        dcpx.export(path / "ckpt", path / "stored")
    assert_artifact(path / "stored", whole)
    rules = dcpx.KeyMap(dcpx.Split("columns", ["l", "r"], dim=1), dcpx.Transpose("rows"))
    left, right = whole["columns"].chunk(2, 1)
    turned = {**whole, "l": left, "r": right, "rows": whole["rows"].T}
    del turned["columns"]
    for name, source in (("live", state), ("stored", path / "ckpt")):
        dcpx.export(source, path / name, key_map=rules, overwrite=True)
        assert_artifact(path / name, turned)
    failure_of_one_rank_is_raised_on_all(path, state, whole, turned)
    for source in (state, path / "ckpt"):
        dcpx.export(source, path / "net.pt", format="torch", overwrite=True)
        with zipfile.ZipFile(path / "net.pt") as archive:
            assert archive.testzip() is None  # checksums of all ranks' rows together
        loaded = torch.load(path / "net.pt", weights_only=True)
        assert loaded.keys() == whole.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.items())
        dist.barrier()
    if world == 2:  # each rank has names of its own, as stages of a pipeline have
        own = {f"stage{rank}": torch.full((50,), rank)}
        dcpx.export(own, path / "stages")
        assert_artifact(path / "stages", {f"stage{r}": torch.full((50,), r) for r in range(2)})
        with pytest.raises(dcpx.PlanError, match="on rank 1 and"):
            dcpx.export({"w": torch.ones(2 + rank)}, path / "stages")
    name = list(whole)[rank]
    with pytest.raises(dcpx.PlanError, match=rf"rank {world - 1}: keys=.* where"):
        dcpx.export(state, path / "other", keys=[name])
    dist.barrier()
    assert not (path / "other").exists()


def failure_of_one_rank_is_raised_on_all(
    path: Path,
    state: dict[str, torch.Tensor],
    whole: dict[str, torch.Tensor],
    old: dict[str, torch.Tensor],
) -> None:
    for failing in range(dist.get_world_size()):
        for kind in ("pwrite", "fsync"):
            dist.barrier()
            if dist.get_rank() == failing:
                _C.arm_fault(0, errno.EIO, kind)
            with pytest.raises(dcpx.StorageError, match="Input/output error"):
                dcpx.export(state, path / "live", overwrite=True)
            _C.disarm_fault()
            dist.barrier()
            assert_artifact(path / "live", old)
    dist.barrier()
    dcpx.export(state, path / "live", overwrite=True)
    assert_artifact(path / "live", whole)


@pytest.mark.slow  # 10 s a number of ranks
@pytest.mark.multirank
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_write_one_artifact_together(tmp_path: Path, ranks: StartRanks, count: int) -> None:
    ranks(count)(export_together, tmp_path)
