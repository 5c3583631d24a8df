"""How evenly ranks share what several of them hold: models as they are trained, planned only.

`python tests/planners/test_balance.py` prints the table of docs/develop/measurements.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script

from support.plan_states import as_rank, mesh_of
from torch.distributed.checkpoint.planner import SavePlan

from torch_dcpx import DcpxSavePlanner
from torch_dcpx.ranks.plan_wire import offered

HIDDEN, LAYERS, VOCABULARY = 768, 12, 50257


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the parameters of a GPT of 124 M parameters, an embedding a third of them."""
    found: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, HIDDEN), "pos": (1024, HIDDEN)}
    for layer in range(LAYERS):
        block = {
            "qkv.weight": (3 * HIDDEN, HIDDEN),
            "qkv.bias": (3 * HIDDEN,),
            "out.weight": (HIDDEN, HIDDEN),
            "up.weight": (4 * HIDDEN, HIDDEN),
            "up.bias": (4 * HIDDEN,),
            "down.weight": (HIDDEN, 4 * HIDDEN),
            "norm1": (HIDDEN,),
            "norm2": (HIDDEN,),
        }
        found.update((f"layers.{layer}.{name}", shape) for name, shape in block.items())
    return found


def sharded(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Any, ...]) -> DTensor:
    """Returns a DTensor without memory."""
    local = list(shape)
    for placement, count, at in zip(
        placements, mesh.shape, mesh.get_coordinate() or (), strict=True
    ):
        if isinstance(placement, Shard):
            size, step = local[placement.dim], -(-local[placement.dim] // count)
            local[placement.dim] = max(0, min(size, step * (at + 1)) - min(size, step * at))
    whole = torch.empty(1).expand(shape)
    return DTensor.from_local(
        torch.empty(1).expand(local),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def ddp() -> dict[str, Any]:
    return {name: torch.empty(1).expand(shape) for name, shape in shapes().items()}


def hsdp() -> dict[str, Any]:
    mesh = mesh_of((4, 8))
    return {n: sharded(shape, mesh, (Replicate(), Shard(0))) for n, shape in shapes().items()}


def tensor_parallel() -> dict[str, Any]:
    """Columns and rows of matrices are each rank's own; the rest all have."""
    mesh = mesh_of((8,))
    own = {"qkv": Shard(0), "up": Shard(0), "out.weight": Shard(1), "down.weight": Shard(1)}
    return {
        name: sharded(
            shape,
            mesh,
            (next((own[part] for part in own if part in name), Replicate()),),
        )
        for name, shape in shapes().items()
    }


# name -> (ranks, what a rank has, kinds of state: weights and the moments of an optimizer)
MODELS = {
    "DDP, 8 ranks, weights": (8, ddp, ("w",)),
    "DDP, 8 ranks": (8, ddp, ("w", "m", "v")),
    "HSDP, 4 x 8 ranks, weights": (32, hsdp, ("w",)),
    "HSDP, 4 x 8 ranks": (32, hsdp, ("w", "m", "v")),
    "tensor parallel, 8 ranks": (8, tensor_parallel, ("w", "m", "v")),
}


def planned(model: str, *, is_split: bool | None) -> list[SavePlan]:
    """Returns the plans of all ranks, as DcpxWriter sends them."""
    ranks, make, kinds = MODELS[model]
    plans = []
    for rank in range(ranks):
        with as_rank(rank, ranks):
            planner = DcpxSavePlanner(flatten_state_dict=False, split_replicas=is_split)
            state = {f"{kind}.{n}": t for kind in kinds for n, t in make().items()}
            planner.set_up_planner(state, None, rank == 0)
            plans.append(offered(planner.create_local_plan()))
    return planner.create_global_plan(plans)[0]


def loads_of(plans: list[SavePlan]) -> list[int]:
    """Returns the bytes that each rank writes."""
    return [
        sum(4 * item.tensor_data.chunk.sizes.numel() for item in plan.items if item.tensor_data)
        for plan in plans
    ]


def imbalance(loads: list[int]) -> float:
    return max(loads) * len(loads) / sum(loads)


def all_bytes(model: str) -> int:
    elements = sum(torch.Size(shape).numel() for shape in shapes().values())
    return len(MODELS[model][2]) * 4 * elements


# HSDP with an optimizer is more of the same: in the table alone.
@pytest.mark.parametrize("model", [one for one in MODELS if one != "HSDP, 4 x 8 ranks"])
def test_replicas_that_are_split_load_all_ranks_evenly(model: str) -> None:
    plans = planned(model, is_split=True)
    loads = loads_of(plans)
    assert sum(loads) == all_bytes(model)
    assert imbalance(loads) <= 1.05, loads
    if model.startswith("DDP"):
        assert planned(model, is_split=True) == plans


@pytest.mark.parametrize("model", ["HSDP, 4 x 8 ranks, weights", "tensor parallel, 8 ranks"])
def test_replicas_by_placement_load_all_ranks_evenly_by_default(model: str) -> None:
    plans = planned(model, is_split=None)
    loads = loads_of(plans)
    assert sum(loads) == all_bytes(model)
    assert imbalance(loads) <= 1.05, loads
    if model.startswith("tensor"):
        assert imbalance(loads_of(planned(model, is_split=False))) > 1.2


def test_plain_tensors_are_whole_by_default() -> None:
    model = "DDP, 8 ranks, weights"
    assert planned(model, is_split=None) == planned(model, is_split=False)


if __name__ == "__main__":
    print(f"{'split_replicas':28}{'None':>8}{'True':>8}{'False':>8}   most and mean bytes, False")
    for name in MODELS:
        default, rows, whole = (
            loads_of(planned(name, is_split=is_split)) for is_split in (None, True, False)
        )
        mean = sum(whole) / len(whole)
        print(
            f"{name:28}{imbalance(default):8.3f}{imbalance(rows):8.3f}{imbalance(whole):8.3f}   "
            f"{max(whole) / 1e6:.1f} MB and {mean / 1e6:.1f} MB"
        )
