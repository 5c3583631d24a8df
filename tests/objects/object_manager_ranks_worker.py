"""One rank of test_object_manager_ranks.py: a manager of all ranks beneath a store's URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.placements import distribute
from support.worker import rank_case
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torch_dcpx import CheckpointManager, DcpxReader, RankError, ReadOptions, StorageError
from torch_dcpx.manager import resume as resume_module

ROWS = 24


def state(step: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(ROWS * 3.0).reshape(ROWS, 3) + step
    return {"x": distribute(whole, mesh, (Shard(0),)), "step": step}


def resumed(manager: CheckpointManager) -> str | None:
    """Returns the tag of a resume, all of which is that step's."""
    target = state(0)
    info = manager.resume(state=target)
    step, x = target["step"], target["x"]
    assert isinstance(x, DTensor)
    assert torch.equal(x.full_tensor(), torch.arange(ROWS * 3.0).reshape(ROWS, 3) + step)
    assert info.user_content == {"epoch": step} and info.step == step
    return info.tag


@rank_case("train")
def train(root: Path, url: str) -> None:
    with CheckpointManager(url, keep_last=2) as manager:
        assert manager.resume(state=state(0)).is_fresh
        for step in (1, 2, 3):
            manager.save(step, state=state(step), user_content={"epoch": step})
        manager.wait()
        assert (manager.latest(), manager.tags()) == ("step-3", ["step-2", "step-3"])
    assert resumed(CheckpointManager(url)) == "step-3"


@rank_case("resume")
def resume(root: Path, url: str) -> None:
    assert resumed(CheckpointManager(url)) == "step-3"


@rank_case("fail")
def fail(root: Path, url: str) -> None:
    """The store takes no data of rank 1 at step 4."""
    with CheckpointManager(url, keep_last=2) as manager:
        handle = manager.save(4, state=state(4), user_content={"epoch": 4})
        with pytest.raises((StorageError, RankError), match="AccessDenied"):
            handle.result()
        assert (manager.latest(), resumed(manager)) == ("step-3", "step-3")
        manager.save(5, state=state(5), user_content={"epoch": 5})
    assert resumed(CheckpointManager(url)) == "step-5"


@rank_case("removed")
def removed(root: Path, url: str) -> None:
    """Another job removes what the coordinator has chosen."""
    manager, gone = CheckpointManager(url), []
    reader = resume_module.quiet_reader

    def late(path: str, options: ReadOptions) -> DcpxReader:
        if dist.get_rank() == 0 and not gone:
            CheckpointManager(url, no_dist=True).delete(path.rpartition("/")[2])
        gone.append(path)
        dist.barrier()
        return reader(path, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume_module, "quiet_reader", late)
        assert resumed(manager) == "step-3"
    assert [path.rpartition("/")[2] for path in gone] == ["step-5", "step-3"]
