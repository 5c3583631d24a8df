"""Saves and loads of a GPU's tensors, bit for bit, while streams go on. On a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import RunPython
from cuda_states import _warm_processes, assert_same, blank, busy, on_host, ordinals, state_on
from support.async_saves import no_save_is_left

import torch_dcpx as dcpx
from torch_dcpx import DcpxReader, DcpxStager, DcpxWriter, WriteOptions

__all__ = ["_warm_processes", "no_save_is_left"]

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_save_is_left")]

OVERLAP = WriteOptions(overlap=True)


def stock_load(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    target = blank(like)
    dcp.load(target, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return target


def test_save_is_what_stock_loads_and_load_is_what_stock_saved(
    tmp_path: Path,
) -> None:
    for ordinal in ordinals():
        state = state_on(f"cuda:{ordinal}", ordinal)
        ours, stock = tmp_path / f"ours{ordinal}", tmp_path / f"stock{ordinal}"
        dcp.save(state, storage_writer=DcpxWriter(ours), no_dist=True)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(stock), no_dist=True)
        assert_same(stock_load(ours, state), on_host(state))
        for path in (ours, stock):
            target = blank(state)
            dcp.load(target, storage_reader=DcpxReader(path), no_dist=True)
            assert_same(target, on_host(state))


def test_load_fills_strided_targets_and_other_dtypes(tmp_path: Path) -> None:
    wanted = torch.randn(512, 512)
    dcp.save({"w": wanted.cuda()}, storage_writer=DcpxWriter(tmp_path / "a"), no_dist=True)
    whole = torch.zeros(1024, 1024, device="cuda")
    for target in (whole[::2, ::2], whole.t()[:512, :512], whole[:512, 512:].bfloat16()):
        target.zero_()
        dcp.load({"w": target}, storage_reader=DcpxReader(tmp_path / "a"), no_dist=True)
        assert torch.equal(target.cpu(), wanted.to(target.dtype))


def test_load_on_a_side_stream_is_ordered_between_what_it_queues(tmp_path: Path) -> None:
    wanted = torch.randn(1 << 22)
    dcp.save({"w": wanted}, storage_writer=DcpxWriter(tmp_path / "a"), no_dist=True)
    target = torch.zeros(1 << 22, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        busy(0.2)
        target.fill_(3.0)  # before the load, though it runs late
        dcp.load({"w": target}, storage_reader=DcpxReader(tmp_path / "a"), no_dist=True)
        doubled = target * 2
    side.synchronize()
    assert torch.equal(doubled.cpu(), wanted * 2)


@pytest.mark.parametrize("options", [WriteOptions(), OVERLAP], ids=["staged", "overlapped"])
def test_async_save_is_what_was_there_at_the_call(tmp_path: Path, options: WriteOptions) -> None:
    state = {k: t for k, t in state_on("cuda", 1).items() if k != "expanded"}
    wanted = on_host(state)
    busy(0.1)
    handle = dcpx.async_save(state, tmp_path / "a", no_dist=True, options=options)
    handle.guard.wait()
    for tensor in state.values():
        tensor.zero_()
    handle.result()
    assert_same(stock_load(tmp_path / "a", state), wanted)


def test_overlapped_save_returns_while_the_device_is_busy(tmp_path: Path) -> None:
    state = state_on("cuda", 2)
    wanted = on_host(state)
    dcpx.prewarm(state)
    dcpx.async_save(state, tmp_path / "warm", no_dist=True).result()
    busy(3.0)
    handle = dcpx.async_save(state, tmp_path / "a", no_dist=True, options=OVERLAP)
    assert not handle.staged.done()
    handle.result()
    assert_same(stock_load(tmp_path / "a", state), wanted)


def test_memory_freed_after_an_overlapped_call_is_not_reused_before_it_is_copied(
    tmp_path: Path,
) -> None:
    state = {"w": torch.randn(1 << 24, device="cuda")}
    wanted = on_host(state)
    busy(0.5)
    handle = dcpx.async_save(state, tmp_path / "a", no_dist=True, options=OVERLAP)
    state.clear()
    side = torch.cuda.Stream()  # not held back
    with torch.cuda.stream(side):
        others = [torch.full((1 << 24,), 9.0, device="cuda") for _ in range(4)]
    handle.result()
    assert_same(stock_load(tmp_path / "a", wanted), wanted)
    del others


def test_guarded_optimizer_steps_behind_the_copies(tmp_path: Path) -> None:
    model = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    hook = dcpx.guard_optimizer(optimizer)
    for number in range(5):
        model(torch.randn(8, 4096, device="cuda")).square().mean().backward()
        state = dict(model.state_dict())
        wanted = on_host(state)
        handle = dcpx.async_save(state, tmp_path / str(number), no_dist=True, options=OVERLAP)
        optimizer.step()
        handle.result()
        assert_same(stock_load(tmp_path / str(number), wanted), wanted)
    hook.remove()


@pytest.mark.parametrize("overlap", [False, True])
def test_stager_serves_stocks_async_save(tmp_path: Path, overlap: bool) -> None:
    state = state_on("cuda", 5)
    wanted = on_host(state)
    stager = DcpxStager(overlap=overlap)
    done = dcp.async_save(
        state, storage_writer=DcpxWriter(tmp_path / "a"), async_stager=stager, no_dist=True
    )
    stager.guard.wait()
    state["large"].zero_()
    (done.upload_completion if overlap else done).result()
    assert_same(stock_load(tmp_path / "a", wanted), wanted)


def test_state_beyond_the_budget_goes_in_waves(tmp_path: Path) -> None:
    side = torch.cuda.Stream()
    state = {f"w{i}": torch.zeros(1 << 20, device="cuda") for i in range(16)}
    torch.cuda.synchronize()
    options = WriteOptions(host_memory_bytes=16 << 20, workers=1, slot_bytes=1 << 20)
    with torch.cuda.stream(side):
        busy(0.2)
        for i, tensor in enumerate(state.values()):
            tensor.fill_(float(i))
        handle = dcpx.async_save(state, tmp_path / "a", no_dist=True, options=options)
        for tensor in state.values():
            tensor.zero_()
    handle.result()
    wanted = {f"w{i}": torch.full((1 << 20,), float(i)) for i in range(16)}
    assert_same(stock_load(tmp_path / "a", wanted), wanted)


class Held:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Tagged(torch.Tensor):
    """A class of a user's own."""


def test_stager_puts_tensors_of_other_classes_and_in_objects_on_the_host() -> None:
    side = torch.cuda.Stream()
    tensors = [torch.zeros(1 << 20, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        busy(0.2)
        for tensor in tensors:
            tensor.fill_(7.0)
        state = {"held": Held(tensors[0]), "tagged": tensors[1].as_subclass(Tagged)}
        staged = DcpxStager().stage(state)
    for found in (staged["held"].tensor, staged["tagged"]):
        assert found.is_cpu
        assert torch.equal(found.as_subclass(torch.Tensor), torch.full((1 << 20,), 7.0))
    assert type(staged["tagged"]) is Tagged


def test_shards_of_a_sharded_tensor_are_staged(run_python: RunPython) -> None:
    code = """
import torch, torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch_dcpx import DcpxStager
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
torch.cuda.set_device(0)
spec = ChunkShardingSpec(dim=0, placements=["rank:0/cuda:0"])
value = sharded_tensor.rand(spec, 300, 40)
staged = DcpxStager(is_shared=False).stage({"s": value})["s"]
for found, source in zip(staged.local_shards(), value.local_shards(), strict=True):
    assert found.tensor.is_cpu and str(found.metadata.placement) == "rank:0/cpu"
    assert torch.equal(found.tensor, source.tensor.cpu())
dist.destroy_process_group()
"""
    run_python(code)


# ---- Processes ----------------------------------------------------------------------------------

BEGIN = """
import os, sys, torch
import torch_dcpx as dcpx
from torch_dcpx import StagingError, UnsupportedError, WriteOptions
state = {"w": torch.arange(1 << 24, device="cuda")}
"""


def test_exit_with_copies_under_way_waits_for_the_save(
    run_python: RunPython, tmp_path: Path
) -> None:
    code = BEGIN + (
        "torch.cuda._sleep(2_000_000_000)\n"
        "options = WriteOptions(overlap=True)\n"
        "dcpx.async_save(state, sys.argv[1], no_dist=True, options=options)\n"
        "state.clear()\n"
    )
    run_python(code, str(tmp_path / "a"))
    wanted = {"w": torch.arange(1 << 24)}
    assert_same(stock_load(tmp_path / "a", wanted), wanted)


def test_forked_child_refuses_and_the_parent_goes_on(run_python: RunPython, tmp_path: Path) -> None:
    code = BEGIN + (
        "from torch_dcpx import _C\n"
        "handle = dcpx.async_save(state, sys.argv[1], no_dist=True)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        _C.SourceEvents([(0, 0)])\n"
        "    except StagingError:\n"
        "        os._exit(3)\n"
        "    os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3\n"
        "handle.result()\n"
    )
    run_python(code, str(tmp_path / "a"))


def test_fsdp_state_is_saved_overlapped_and_loaded(run_python: RunPython, tmp_path: Path) -> None:
    code = """
import sys, torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import torch_dcpx as dcpx
from torch_dcpx import WriteOptions

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cuda", (1,))

def made(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())

def step(model, optimizer):
    model(torch.ones(4, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def state_of(model, optimizer):
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}

def values(model):
    return [p.full_tensor().detach().cpu() for p in model.parameters()]

model, optimizer = made(1)
step(model, optimizer)
dcpx.guard_optimizer(optimizer)
wanted = values(model)
handle = dcpx.async_save(
    state_of(model, optimizer), sys.argv[1], options=WriteOptions(overlap=True)
)
step(model, optimizer)
handle.result()
other, others = made(2)
step(other, others)
state = state_of(other, others)
dcpx.load(state, sys.argv[1])
set_state_dict(
    other, others, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
)
assert all(torch.equal(a, b) for a, b in zip(values(other), wanted, strict=True))
step(other, others)
assert all(torch.equal(a, b) for a, b in zip(values(other), values(model), strict=True))
dist.destroy_process_group()
"""
    run_python(code, str(tmp_path / "a"), timeout_s=240)
