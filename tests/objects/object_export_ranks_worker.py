"""One rank of test_object_export_ranks.py: exports to a store with the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from object_exports import tensors_of
from object_outcomes import MIB, retries
from support.no_collectives import no_collectives
from support.worker import rank_case
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_dcpx as dcpx
from torch_dcpx import PlanError, StorageError, UnsupportedError, WriteOptions

OPTIONS = WriteOptions(host_memory_bytes=20 * MIB)


def export(source: Any, url: str) -> dcpx.ExportReport:
    with no_collectives():
        return dcpx.export(source, url, max_shard_bytes=1, options=OPTIONS, overwrite=True)


@rank_case("export")
def every_rank_uploads_whole_files(root: Path, url: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = tensors_of(1, 2 * MIB)
    written = [0] * ranks
    for name in ("same", "same/"):  # one place, and the second replaces the first
        report = export(state, f"{url}/{name if rank else 'same'}")
        dist.all_gather_object(written, report.written_bytes)
        assert sum(written) == report.nbytes and min(written) > 0, written
    mesh = init_device_mesh("cpu", (ranks,))
    parts = {n: distribute_tensor(one, mesh, [Shard(0)]) for n, one in state.items()}
    dcpx.save(parts, f"{url}/ckpt")
    report = export(f"{url}/ckpt/" if rank else f"{url}/ckpt", f"{url}/stored")
    dist.all_gather_object(written, report.written_bytes)
    assert sum(written) == report.nbytes and min(written) > 0, written
    export({f"stage{rank}": torch.full((50,), rank)}, f"{url}/stages")


@rank_case("refused")
def what_no_rank_can_upload_is_refused_by_name(root: Path, url: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    state: dict[str, Any] = {**tensors_of(1)}
    state["a"] = distribute_tensor(state["a"], mesh, [Shard(0)])
    with pytest.raises(UnsupportedError, match="'a', whose shards lie on several"):
        export(state, url)
    with pytest.raises(UnsupportedError, match="torch archive"):
        export(tensors_of(1), f"{url}/m.pt")
    with pytest.raises(PlanError, match="path="):
        export(tensors_of(1), f"{url}{rank}")
    dcpx.save(tensors_of(1), f"{url}-{rank}", no_dist=True)
    with pytest.raises(PlanError, match="source="):
        export(f"{url}-{rank}", url)


@rank_case("fail")
def rank_that_cannot_upload_fails_all(root: Path, url: str) -> None:
    with retries(0), pytest.raises(StorageError, match="00001-of-00002"):
        export(tensors_of(2), url)
