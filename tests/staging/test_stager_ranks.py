"""What DcpxStager stages on two ranks: every kind of tensor, and both modes of async_save."""

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
from support.rank_fixture import StartRanks
from support.states import raw
from support.tensor_bits import bits
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


def check_case(name: str, value: Any, *, as_stock: bool) -> None:
    state = {"case": value}
    staged = DcpxStager().stage(state)
    if name in VALUELESS:
        assert type(staged["case"]) is type(value), name
        return
    if name not in LOSES_CLASS:
        assert comparable(name, staged["case"]) == comparable(name, value), name
    if as_stock and name not in STOCK_IS_WRONG:
        try:
            stock: Any = DefaultStager(StagingOptions(False, False, False, False)).stage(state)
        except RuntimeError as error:
            if "graph leaves" not in str(error):
                raise
            return  # stock 2.9 stages no tensor that autograd has made
        assert bits(staged["case"]) == bits(stock["case"]), f"{name}: not as stock"


def cases() -> None:
    """Every kind of tensor and value, and the regular ones in every placement."""
    from support.tensor_cases import ODD, REGULAR, allowed, generator  # warns of half complex

    meshes = make_meshes()
    for name, case in {**REGULAR, **ODD}.items():
        value = case.make(generator(7))
        if name in REFUSED:
            with pytest.raises(UnsupportedError, match=r"'deep\.case'"):
                DcpxStager().stage({"deep": {"case": value}})
            continue
        with allowed(case):
            check_case(name, value, as_stock=name in REGULAR)
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


def opened() -> tuple[int, int]:
    """Returns how many files this process has open, and how many are in shared memory."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))


class Watch(DefaultSavePlanner):
    """Writes down what the process that saves has open, when it has the whole state."""

    def __init__(self, report: Path) -> None:
        super().__init__()
        self.report = report

    def create_local_plan(self) -> SavePlan:
        self.report.write_text("{} {}".format(*opened()))
        return super().create_local_plan()


def async_saves(path: Path, kind: AsyncCheckpointerType, by_writer: bool) -> None:
    """Saves of new states, each changed as soon as async_save returns; one arena for all."""
    writer, stager = DcpxWriter(path / "unused"), None if by_writer else DcpxStager()
    reports = [path.parent / f"{path.name}-{step}-{dist.get_rank()}" for step in range(3)]
    process_pool().close()
    in_shm, here = opened()[1], []
    for step, report in enumerate(reports):
        state = state_of(step)
        future: Any = dcp.async_save(
            state,
            checkpoint_id=path / str(step),
            storage_writer=writer,
            async_stager=stager,
            planner=Watch(report),
            async_checkpointer_type=kind,
        )
        for tensor in tensors_of(state):
            tensor.zero_()
        del state
        future.result(seconds(120))
        del future
        here.append(opened()[0])
        assert process_pool().count == 1, (kind, step)
    assert max(here) - here[0] <= FEW, here
    files, shm = zip(*(map(int, report.read_text().split()) for report in reports), strict=True)
    assert max(shm) <= in_shm, (in_shm, shm)
    assert max(files) - files[0] <= FEW and max(files) < MANY // 4, files
    for step in range(3):
        target = state_of(step + 100)
        dcp.load(target, storage_reader=DcpxReader(path / str(step)))
        pairs = zip(tensors_of(state_of(step)), tensors_of(target), strict=True)
        assert all(torch.equal(raw(a), raw(b)) for a, b in pairs), (kind, step)


def stage_and_save(root: Path) -> None:
    warnings.simplefilter("ignore")
    cases()
    for kind in AsyncCheckpointerType:
        for by_writer in (False, True):
            async_saves(root / f"{kind.value}-{by_writer}", kind, by_writer)


@pytest.mark.slow
def test_every_kind_of_tensor_and_both_modes_on_two_ranks(
    ranks: StartRanks, tmp_path: Path
) -> None:
    ranks(2, anew=True)(stage_and_save, tmp_path)
