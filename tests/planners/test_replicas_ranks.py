"""Ranks that save replicas named by placements, by every call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.rank_fixture import StartRanks
from support.tensor_bits import bits
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_dcpx as dcpx

OPTIONS = dcpx.WriteOptions(durability="none", workers=1, slot_bytes=256 << 10)
WHOLE = torch.arange(801 * 64, dtype=torch.float32).reshape(801, 64)


def mesh_of_all() -> Any:
    """Returns a mesh whose first dimension has copies: 2 ranks, or 2 x 2."""
    ranks = dist.get_world_size()
    return init_device_mesh("cpu", (2,) if ranks == 2 else (2, ranks // 2))


def state(mesh: Any, fill: float, *, is_copied: bool = True) -> dict[str, Any]:
    """Returns replicas and, on a mesh of two dimensions, replicated shards; elsewhere with
    `is_copied=False`.
    """
    more = [Shard(0)] * (mesh.ndim - 1)
    own = [Replicate(), *more] if is_copied else [Shard(1), *more]
    return {
        "model": {
            "w": distribute_tensor(WHOLE * fill, mesh, own),
            "norm": distribute_tensor(WHOLE[:5] * fill, mesh, [Replicate()] * mesh.ndim),
            "plain": WHOLE[:20] * fill,
        },
        "step": int(fill),
    }


def check(path: Path, mesh: Any, fill: float, *, is_cut: bool = True) -> None:
    """Checks what each reader finds by each planner, where it was and elsewhere, and the chunks."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    chunks = {
        fqn: len(entry.chunks)
        for fqn, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }
    shards = mesh.size() // 2
    assert chunks == {"model.w": shards * (1 + is_cut), "model.norm": 1, "model.plain": 1}, chunks
    for reader, planner in (
        (dcp.FileSystemReader, dcp.DefaultLoadPlanner),
        (dcpx.DcpxReader, dcpx.DcpxLoadPlanner),
    ):
        for is_copied in (True, False):
            found = state(mesh, 0.0, is_copied=is_copied)
            dcp.load(found, storage_reader=reader(path), planner=planner())
            assert bits(found) == bits(state(mesh, fill, is_copied=is_copied))


def zero(wanted: dict[str, Any]) -> None:
    for tensor in wanted["model"].values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()


def calls(root: Path) -> None:
    mesh = mesh_of_all()
    planner = dcpx.DcpxSavePlanner()
    for number in (1.0, 2.0, 3.0):  # the second and third by the plan of the first
        dcpx.save(state(mesh, number), root / f"save {number}", options=OPTIONS)
        check(root / f"save {number}", mesh, number)
        writer = dcpx.DcpxWriter(root / f"dcp {number}", options=OPTIONS)
        dcp.save(state(mesh, number), storage_writer=writer, planner=planner)
        check(root / f"dcp {number}", mesh, number)
    wanted = state(mesh, 4.0)
    handle = dcpx.async_save(wanted, root / "async", options=OPTIONS)
    zero(wanted)
    handle.result(seconds(120))
    check(root / "async", mesh, 4.0)
    for number, stager in enumerate((None, dcpx.DcpxStager())):
        wanted = state(mesh, 5.0)
        path = root / f"dcp async {number}"
        writer = dcpx.DcpxWriter(path, options=OPTIONS)
        saved: Any = dcp.async_save(
            wanted, storage_writer=writer, planner=planner, async_stager=stager
        )
        zero(wanted)
        saved.result(seconds(120))
        check(path, mesh, 5.0)
    dcp.save(state(mesh, 6.0), storage_writer=dcp.FileSystemWriter(root / "stock"), planner=planner)
    check(root / "stock", mesh, 6.0, is_cut=False)
    whole = dcpx.DcpxSavePlanner(split_replicas=False)
    dcpx.save(state(mesh, 7.0), root / "whole", planner=whole, options=OPTIONS)
    check(root / "whole", mesh, 7.0, is_cut=False)
    kept_plans_say_whether_rows_are_cut(root / "kept", mesh)
    safetensors_by_name_hold_whole_tensors(root / "hf", mesh)
    checkpoint_is_exported(root / "save 1.0", root / "artifact", mesh)


def kept_plans_say_whether_rows_are_cut(root: Path, mesh: Any) -> None:
    copied = [Replicate()] * mesh.ndim
    even = {name: distribute_tensor(WHOLE, mesh, copied) for name in "abcd"}  # one or two a rank
    for number, (wanted, is_cut) in enumerate(((state(mesh, 1.0), True), (even, False))):
        planner = dcpx.DcpxSavePlanner()
        for _ in range(2):
            dcpx.save(wanted, root / str(number), planner=planner, options=OPTIONS)
        known = planner.dcpx_planning.known
        assert known is not None and known.replicas is not None and known.agreement is not None
        plan: Any = known.agreement.plan
        assert plan.can_split is is_cut


def safetensors_by_name_hold_whole_tensors(root: Path, mesh: Any) -> None:
    from safetensors.torch import load_file

    model = {
        name: distribute_tensor(WHOLE + number, mesh, [Replicate()] * mesh.ndim)
        for number, name in enumerate("abc")
    }
    files = {name: number for number, name in enumerate(model, 1)}
    writer = dcp.HuggingFaceStorageWriter(str(root), fqn_to_index_mapping=files)
    dcp.save(model, storage_writer=writer, planner=dcpx.DcpxSavePlanner())
    found = [load_file(path) for path in sorted(root.glob("*.safetensors"))]
    assert [list(file) for file in found] == [["a"], ["b"], ["c"]]
    for number, file in enumerate(found):
        assert torch.equal(*file.values(), WHOLE + number)


def checkpoint_is_exported(path: Path, artifact: Path, mesh: Any) -> None:
    from safetensors.torch import load_file

    live = artifact.with_name("live")
    for source, target in ((path, artifact), (state(mesh, 1.0), live)):
        dcpx.export(source, target, options=OPTIONS)
        found = load_file(target / "model.safetensors")
        wanted = {"w": WHOLE, "norm": WHOLE[:5], "plain": WHOLE[:20]}
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def process(root: Path) -> None:
    mesh = mesh_of_all()
    for number, stager in enumerate((None, dcpx.DcpxStager())):
        path = root / str(number)
        saved: Any = dcp.async_save(
            state(mesh, 8.0),
            storage_writer=dcpx.DcpxWriter(path, options=OPTIONS),
            planner=dcpx.DcpxSavePlanner(),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=stager,
        )
        saved.result(seconds(200))
        check(path, mesh, 8.0)


def model_of(mesh: Any, fill: float) -> torch.nn.Module:
    layer = torch.nn.Linear(64, 801)
    for name, own in (("weight", WHOLE * fill), ("bias", WHOLE[:, 0] * fill)):
        placed = distribute_tensor(own, mesh, [Replicate()] * mesh.ndim)
        setattr(layer, name, torch.nn.Parameter(placed))
    return layer


def training(root: Path) -> None:
    mesh = mesh_of_all()
    model = model_of(mesh, 3.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    wanted = bits(dict(model.state_dict())), bits(dict(optimizer.state_dict()["state"]))
    with dcpx.CheckpointManager(root / "run", options=OPTIONS) as manager:
        for step in (1, 2):
            manager.save(step, model=model, optimizer=optimizer)
    metadata = dcp.FileSystemReader(root / "run" / "step-2").read_metadata()
    assert max(len(getattr(e, "chunks", ())) for e in metadata.state_dict_metadata.values()) > 1
    again = model_of(mesh, 0.0)
    other = torch.optim.AdamW(again.parameters(), lr=0.01)
    with dcpx.CheckpointManager(root / "run", options=OPTIONS) as manager:
        assert manager.resume(model=again, optimizer=other).step == 2
        assert (bits(dict(again.state_dict())), bits(dict(other.state_dict()["state"]))) == wanted
        manager.export(2, root / "artifact")
    from safetensors.torch import load_file

    found = load_file(root / "artifact" / "model.safetensors")
    weight: Any = model.get_parameter("weight")
    assert torch.equal(found["weight"], weight.to_local().detach())


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_share_replicas_by_rows_in_every_call(
    ranks: StartRanks, tmp_path: Path, count: int
) -> None:
    ranks(count)(calls, tmp_path)


@pytest.mark.slow
def test_saves_of_a_process_of_its_own_and_a_managers_training_share_them_too(
    ranks: StartRanks, tmp_path: Path
) -> None:
    ranks(2)(training, tmp_path / "training")
    ranks(2, anew=True)(process, tmp_path / "process")
