"""States and groups of ranks for tests of planners, in one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_dcpx.checkpoint.save_plan import default_save_planner
from torch_dcpx.planners import save_planner


def mixed_state() -> dict[str, Any]:
    """Returns what a training job saves, and a few things that few do."""
    weight = torch.arange(60, dtype=torch.float32).reshape(5, 12)
    parameter = torch.nn.Parameter(weight * 2)
    parameter.tag = "kept by an optimizer"  # type: ignore[attr-defined]
    return {
        "model": {
            "weight": weight,
            "bias": parameter,
            "half": torch.ones(7, dtype=torch.bfloat16, requires_grad=True),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "columns": weight.t(),
            "part": weight[1:3, 2:5],
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(4.0), "exp_avg": torch.full((5, 12), 0.5)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}],
            "list": [torch.ones(2), {"inner": torch.zeros(3)}, "text"],
        },
        "step": 17,
        "rates": [0.1, 0.2],
        "stream": io.BytesIO(b"bytes"),
        "none": None,
    }


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process believe that it is a rank of a group; no other rank is asked anything."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    """Returns a mesh of all ranks of `as_rank`'s group."""
    ranks = torch.arange(dist.get_world_size()).reshape(sizes)
    names = tuple(f"dim{number}" for number in range(len(sizes)))
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def part_of(whole: torch.Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    """Returns the DTensor of this rank with its own elements of `whole`.

    Source: torch.distributed.tensor._utils.compute_local_shape_and_global_offset, whose boxes are
    what a checkpoint is made of.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    local = whole
    for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
        local = local.narrow(dim, at if size else 0, size)
    return DTensor.from_local(
        local.clone(),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


MakeState = Callable[[int], dict[str, Any]]


def set_up(planner: DefaultSavePlanner, state: dict[str, Any], rank: int = 0) -> SavePlan:
    planner.set_up_planner(copy.copy(state), None, rank == 0)
    return planner.create_local_plan()


def plan_all(
    planners: list[Any], make_state: MakeState
) -> tuple[list[SavePlan], Any, list[SavePlan]]:
    """Returns the final plan of each rank, the metadata, and the local plans."""
    local = []
    for rank, planner in enumerate(planners):
        with as_rank(rank, len(planners)):
            local.append(set_up(planner, make_state(rank), rank))
    plans, metadata = planners[0].create_global_plan(local)
    final = []
    for rank, (planner, plan) in enumerate(zip(planners, plans, strict=True)):
        with as_rank(rank, len(planners)):
            final.append(planner.finish_plan(plan))
    return final, metadata, local


def said(plan: SavePlan) -> list[Any]:
    """All that the items of a plan say, hints included, which their own comparison leaves out."""
    return [(item, item.index.index) for item in plan.items]


class Counting:
    """Plans made: of this rank, and of all."""

    def __init__(self, maker: Any) -> None:
        self._maker = maker
        self.plans = [0, 0]

    def write_items(self, rows: Any) -> Any:
        self.plans[0] += 1
        return self._maker.write_items(rows)

    def global_plan(self, *arguments: Any) -> Any:
        self.plans[1] += 1
        return self._maker.global_plan(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._maker, name)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """[local plans, global plans] that were made so far."""
    counting = Counting(save_planner.MAKER)
    monkeypatch.setattr(save_planner, "MAKER", counting)
    default_save_planner().dcpx_planning.plans._known.clear()
    yield counting.plans
    default_save_planner().dcpx_planning.plans._known.clear()
