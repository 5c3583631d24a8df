"""One rank of tests/staging/test_stager.py: what DcpxStager stages, both modes of async_save."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.placements import PLACEMENTS, distribute, fits, make_meshes
from support.states import raw
from support.tensor_bits import bits
from support.tensor_cases import ODD, REGULAR, allowed, generator
from support.worker import rank_case
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torch_dcpx import DcpxReader, DcpxStager, DcpxWriter, UnsupportedError
from torch_dcpx.staging.arena import process_pool

VALUELESS = {"meta", "fake", "lazy parameter", "masked"}  # nothing to compare; never saved
REFUSED = {"zero tensor", "freed storage", "functionalized"}
STOCK_IS_WRONG = {"conj view", "conj view, transposed", "neg view"}  # it drops the bit
LOSES_CLASS = {"Parameter subclass"}  # as with stock: no class of a parameter is saved
MANY = 400
FEW = 4  # descriptors that come and go, however many tensors there are


def comparable(name: str, value: Any) -> Any:
    return bits(value.to_dense() if name == "oneDNN layout" else value)


def check_case(name: str, value: Any) -> None:
    state = {"case": value}
    staged = DcpxStager().stage(state)
    if name in VALUELESS:
        assert type(staged["case"]) is type(value), name
        return
    if name not in LOSES_CLASS:
        assert comparable(name, staged["case"]) == comparable(name, value), name
    if name in REGULAR and name not in STOCK_IS_WRONG:
        try:
            stock: Any = DefaultStager(StagingOptions(False, False, False, False)).stage(state)
        except RuntimeError as error:
            if "graph leaves" not in str(error):
                raise
            return  # stock 2.9 stages no tensor that autograd has made
        assert bits(staged["case"]) == bits(stock["case"]), f"{name}: not as stock"


def check_refused(value: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"'deep\.case'"):
        DcpxStager().stage({"deep": {"case": value}})


def cases() -> None:
    """Every kind of tensor and value, and the regular ones in every placement."""
    meshes = make_meshes()
    for name, case in {**REGULAR, **ODD}.items():
        value = case.make(generator(7))
        if name in REFUSED:
            check_refused(value)
            continue
        with allowed(case):
            check_case(name, value)
        if name in REGULAR and case.is_cut and not case.is_rare:
            for where, place in PLACEMENTS.items():
                if fits(where, value):
                    check_placed(f"{name} in {where}", place(value, meshes))


def check_placed(name: str, placed: Any) -> None:
    staged = DcpxStager().stage({"case": placed})["case"]
    assert type(staged) is type(placed), name
    assert bits(staged) == bits(placed), name
    if isinstance(placed, DTensor):
        assert staged.placements == placed.placements, name
        assert (staged.shape, staged.device_mesh) == (placed.shape, placed.device_mesh), name
    else:
        for key, value in vars(placed).items():
            assert bits(vars(staged)[key]) == bits(value) or key == "_metadata", (name, key)


def state_of(seed: int) -> dict[str, Any]:
    """Returns new objects each time: a shard, hundreds of small tensors, tied ones and values."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    g = torch.Generator().manual_seed(seed)
    full = torch.randn(64, 33, generator=g)
    many = torch.randn(MANY, 8, generator=g)
    tied = torch.randn(300, 700, generator=g)
    return {
        "sharded": distribute(full, mesh, (Shard(0),)),
        "many": {f"layer{i}.bias": many[i].clone() for i in range(MANY)},
        "head": tied,
        "embedding": tied,
        "transposed": torch.randn(200, 100, generator=g).t(),
        "half": torch.randn(33, generator=g).to(torch.float8_e5m2),
        "empty": torch.zeros(0, 3),
        "step": seed,
    }


def tensors_of(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_of(value)]
    if isinstance(state, DTensor):
        return [state.to_local()]
    return [state] if isinstance(state, torch.Tensor) else []


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Watch(DefaultSavePlanner):
    """Writes down what the process that saves has open, when it has the whole state."""

    def __init__(self, report: Path) -> None:
        super().__init__()
        self.report = report

    def create_local_plan(self) -> SavePlan:
        self.report.write_text(f"{open_files()} {len(os.listdir('/dev/shm'))}")
        return super().create_local_plan()


def async_saves(path: Path, kind: AsyncCheckpointerType, by_writer: bool) -> None:
    """Saves of new states, each changed as soon as async_save returns; one arena for all."""
    writer = DcpxWriter(path / "unused")
    stager = None if by_writer else DcpxStager()
    rank = dist.get_rank()
    opened = []
    process_pool().close()
    in_shm = len(os.listdir("/dev/shm"))
    for step in range(3):
        state = state_of(step)
        future: Any = dcp.async_save(
            state,
            checkpoint_id=path / str(step),
            storage_writer=writer,
            async_stager=stager,
            planner=Watch(path.parent / f"{path.name}-{step}-{rank}"),
            async_checkpointer_type=kind,
        )
        for tensor in tensors_of(state):
            tensor.zero_()
        del state
        future.result(seconds(120))
        del future
        opened.append(open_files())
        assert process_pool().count == 1, (kind, step)
    assert max(opened) - opened[0] <= FEW, opened
    seen = [(path.parent / f"{path.name}-{step}-{rank}").read_text() for step in range(3)]
    files, shm = zip(*(map(int, line.split()) for line in seen), strict=True)
    assert max(shm) <= in_shm, (in_shm, shm)
    assert max(files) - files[0] <= FEW, files
    assert max(files) < MANY // 4, files
    for step in range(3):
        expected = state_of(step)
        target = state_of(step + 100)
        dcp.load(target, storage_reader=DcpxReader(path / str(step)))
        pairs = zip(tensors_of(expected), tensors_of(target), strict=True)
        assert all(torch.equal(raw(a), raw(b)) for a, b in pairs), (kind, step)


@rank_case()
def main(root: Path) -> None:
    warnings.simplefilter("ignore")
    cases()
    for kind in AsyncCheckpointerType:
        for by_writer in (False, True):
            async_saves(root / f"{kind.value}-{by_writer}", kind, by_writer)
