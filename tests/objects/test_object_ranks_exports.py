"""Several ranks export to one URL, and have a manager beneath one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from object_exports import assert_equal, export, exported, tensors_of
from object_outcomes import MIB, Store, retries
from object_roots import Root
from support.machine import seconds
from support.no_collectives import no_collectives
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.placements import distribute
from support.rank_fixture import StartRanks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torch_dcpx as dcpx
from torch_dcpx import (
    CheckpointManager,
    DcpxReader,
    PlanError,
    RankError,
    ReadOptions,
    StorageError,
    UnsupportedError,
    WriteOptions,
)
from torch_dcpx.manager import resume as resume_module

pytestmark = pytest.mark.multirank

RANKS, ROWS = 2, 24

# ---- Exports ------------------------------------------------------------------------------------


def export_all(source: Any, url: str) -> dcpx.ExportReport:
    options = WriteOptions(host_memory_bytes=20 * MIB)
    with no_collectives():
        return dcpx.export(source, url, max_shard_bytes=1, options=options, overwrite=True)


def upload_whole_files(url: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = tensors_of(1, 2 * MIB)
    written = [0] * ranks
    mesh = init_device_mesh("cpu", (ranks,))
    parts = {n: distribute_tensor(one, mesh, [Shard(0)]) for n, one in state.items()}
    dcpx.save(parts, f"{url}/ckpt")
    stored = f"{url}/ckpt/" if rank else f"{url}/ckpt"
    # "same" twice: one place, and the second replaces the first.
    for source, name in ((state, "same"), (state, "same/" if rank else "same"), (stored, "stored")):
        report = export_all(source, f"{url}/{name}")
        dist.all_gather_object(written, report.written_bytes)
        assert sum(written) == report.nbytes and min(written) > 0, written
    export_all({f"stage{rank}": torch.full((50,), rank)}, f"{url}/stages")


def are_refused(url: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    state: dict[str, Any] = {**tensors_of(1)}
    state["a"] = distribute_tensor(state["a"], mesh, [Shard(0)])
    with pytest.raises(UnsupportedError, match="'a', whose shards lie on several"):
        export_all(state, url)
    with pytest.raises(UnsupportedError, match="torch archive"):
        export_all(tensors_of(1), f"{url}/m.pt")
    with pytest.raises(PlanError, match="path="):
        export_all(tensors_of(1), f"{url}{rank}")
    dcpx.save(tensors_of(1), f"{url}-{rank}", no_dist=True)
    with pytest.raises(PlanError, match="source="):
        export_all(f"{url}-{rank}", url)


def fail_together(url: str) -> None:
    with retries(0), pytest.raises(StorageError, match="00001-of-00002"):
        export_all(tensors_of(2), url)


def test_ranks_upload_whole_files_of_one_artifact(store: Store, ranks: StartRanks) -> None:
    ranks(RANKS)(upload_whole_files, store.url)
    for name in ("same", "stored"):
        found, used = exported(store.server, f"{store.url}/{name}")
        assert_equal(found, tensors_of(1, 2 * MIB))
        assert store.names(name) == used
    found, _ = exported(store.server, f"{store.url}/stages")
    assert_equal(found, {f"stage{rank}": torch.full((50,), rank) for rank in range(RANKS)})


def test_what_no_rank_can_upload_is_refused_and_nothing_is_there(
    store: Store, ranks: StartRanks
) -> None:
    ranks(RANKS)(are_refused, store.url)
    assert not store.names()


def test_failed_rank_leaves_no_shard_of_a_rank_that_uploads_still(
    store: Store, proxy: FaultProxy, ranks: StartRanks
) -> None:
    export(tensors_of(1), store.url, "shards")
    old, failed = store.objects(), threading.Event()

    def refuse(_: Request) -> str:
        failed.set()
        return "403"

    def wait_long(_: Request) -> None:
        failed.wait(seconds(120))
        threading.Event().wait(3)  # the coordinator gives up meanwhile

    proxy.hook("put_object", wait_long, key="00002-of-00002")
    proxy.hook("put_object", refuse, times=None, key="00001-of-00002")
    ranks(RANKS)(fail_together, store.url)
    assert failed.is_set()
    assert store.objects() == old


# ---- Managers -----------------------------------------------------------------------------------


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


def train(url: str) -> None:
    with CheckpointManager(url, keep_last=2) as manager:
        assert manager.resume(state=state(0)).is_fresh
        for step in (1, 2, 3):
            manager.save(step, state=state(step), user_content={"epoch": step})
        manager.wait()
        assert (manager.latest(), manager.tags()) == ("step-3", ["step-2", "step-3"])
    assert resumed(CheckpointManager(url)) == "step-3"


def resume_from(url: str, tag: str) -> None:
    assert resumed(CheckpointManager(url)) == tag


def fail_and_go_on(url: str) -> None:
    """The store takes no data of rank 1 at step 4."""
    with CheckpointManager(url, keep_last=2) as manager:
        handle = manager.save(4, state=state(4), user_content={"epoch": 4})
        with pytest.raises((StorageError, RankError), match="AccessDenied"):
            handle.result()
        assert (manager.latest(), resumed(manager)) == ("step-3", "step-3")
        manager.save(5, state=state(5), user_content={"epoch": 5})
    assert resumed(CheckpointManager(url)) == "step-5"


def choose_again(url: str) -> None:
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


def test_ranks_save_resume_fail_and_choose_again_together(
    root: Root, proxy: FaultProxy, ranks: StartRanks
) -> None:
    ranks(RANKS)(train, root.url)
    ranks(3)(resume_from, root.url, "step-3")
    proxy.fail("put_object", "403", times=None, key="/step-4/__1_")
    ranks(RANKS)(fail_and_go_on, root.url)
    ranks(RANKS)(choose_again, root.url)
