"""Whether, and of what, several ranks write rows of one tensor, and what a planner then keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.plan_states import as_rank, plan_all
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from torch_dcpx import DcpxSavePlanner, PlanError
from torch_dcpx.planners.replicas import RowPieces

LARGE = torch.arange(300_000.0).reshape(3000, 100)


def cutters(count: int) -> list[Any]:
    return [DcpxSavePlanner(split_replicas=True) for _ in range(count)]


def planned_again(planners: list[Any]) -> tuple[list[SavePlan], Metadata]:
    """Returns the plans of planners that are not set up again."""
    plans = [planner.create_local_plan() for planner in planners]
    plans, metadata = planners[0].create_global_plan(plans)
    each = zip(planners, plans, strict=True)
    return [planner.finish_plan(plan) for planner, plan in each], metadata


def written(planners: list[Any], plans: list[SavePlan]) -> torch.Tensor:
    """Returns what all ranks write, in the order of the rows."""
    found = {}
    for planner, plan in zip(planners, plans, strict=True):
        for item in plan.items:
            assert item.tensor_data is not None
            data, chunk = planner.resolve_data(item), item.tensor_data.chunk
            assert data.shape == chunk.sizes
            found[chunk.offsets[0]] = data
    return torch.cat([found[row] for row in sorted(found)])


def test_writer_of_one_file_a_name_keeps_all_rows() -> None:
    planners = [DcpxSavePlanner() for _ in range(2)]
    state = {"w": LARGE, "v": torch.arange(40.0)}
    plans, _, _ = plan_all(planners, lambda _: state)
    files: dict[str, torch.Tensor] = {}  # as HuggingFaceStorageWriter with a mapping of names
    for planner, plan in zip(planners, plans, strict=True):
        for item in plan.items:
            files[item.index.fqn] = planner.resolve_data(item)
    assert files.keys() == state.keys()
    assert all(torch.equal(files[fqn], state[fqn]) for fqn in state)


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: LARGE.to((torch.float32, torch.int32)[rank % 2]),
        lambda rank: LARGE.to((torch.bfloat16, torch.float16)[rank % 2]),
    ],
)
def test_tensors_of_several_dtypes_are_refused(make: Callable[[int], torch.Tensor]) -> None:
    with pytest.raises(PlanError, match=r"'w' is torch.\w+ of shape .* on rank 0 and .* on rank 1"):
        plan_all(cutters(3), lambda rank: {"w": make(rank)})


def test_partial_sums_are_never_cut() -> None:
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        summed = DTensor.from_local(LARGE, mesh, [Partial()], run_check=False)
        planner = DcpxSavePlanner(split_replicas=True)
        planner.set_up_planner({"w": summed})
        try:
            whole = planner.create_local_plan().whole_names
        except ValueError:  # newer torch does not plan them at all
            assert not hasattr(planner, "plan")
        else:
            assert whole == {"w"}


def test_planner_that_plans_again_plans_the_whole_tensor() -> None:
    planners = cutters(3)
    plans, first, _ = plan_all(planners, lambda _: {"w": LARGE})
    assert len(first.state_dict_metadata["w"].chunks) == 3
    for _ in range(2):
        plans, metadata = planned_again(planners)
        assert metadata == first
        assert torch.equal(written(planners, plans), LARGE)


def test_plan_that_is_finished_again_finds_its_rows() -> None:
    planners = cutters(2)
    plans, _, _ = plan_all(planners, lambda _: {"w": LARGE})
    plans = [planner.finish_plan(plan) for planner, plan in zip(planners, plans, strict=True)]
    assert torch.equal(written(planners, plans), LARGE)


def test_state_that_was_set_up_since_is_planned() -> None:
    planners = cutters(2)
    plan_all(planners, lambda _: {"w": LARGE})
    plans, _, _ = plan_all(planners, lambda _: {"w": LARGE + 1})
    assert torch.equal(written(planners, plans), LARGE + 1)


def test_hook_set_after_planning_leaves_rows_to_be_found() -> None:
    planners = cutters(2)
    for rank, planner in enumerate(planners):
        planner.set_up_planner({"w": LARGE}, is_coordinator=rank == 0)
    plans, _ = planners[0].create_global_plan([each.create_local_plan() for each in planners])
    for planner in planners:
        planner.transform_object = lambda _, data: data
    plans = [planner.finish_plan(plan) for planner, plan in zip(planners, plans, strict=True)]
    assert torch.equal(written(planners, plans), LARGE)


@pytest.mark.parametrize("offset", [None, (), (1, 0), (0, 0, 0)])
def test_rows_that_were_not_planned_are_refused(offset: Any) -> None:
    planners = cutters(2)
    plan_all(planners, lambda _: {"w": LARGE})
    index = MetadataIndex("w", offset)
    with pytest.raises(PlanError, match=r"'w' at .* not in the plan") as caught:
        planners[1].lookup_object(index)
    assert caught.value.fqn == "w"


def test_whole_tensor_beside_its_rows_is_refused() -> None:
    planners = cutters(2)
    plans, _, local = plan_all(planners, lambda _: {"w": LARGE})
    for planner, plan, own in zip(planners, plans, local, strict=True):
        with pytest.raises(PlanError) as caught:
            planner.finish_plan(SavePlan([*plan.items, *own.items]))
        assert caught.value.fqn == "w"


def test_rows_are_never_planned_for_a_tensor() -> None:
    planners = cutters(2)
    plan_all(planners, lambda _: {"w": LARGE})
    other = DcpxSavePlanner()
    other.set_up_planner(planners[1].state_dict)
    with pytest.raises(PlanError, match="'w' is rows of an earlier plan"):
        other.create_local_plan()


def test_planner_with_pieces_is_copied_with_its_rows() -> None:
    planners = cutters(2)
    plans, _, _ = plan_all(planners, lambda _: {"w": LARGE.clone()})
    copies = copy.deepcopy(planners)
    for planner in planners:
        pieces = planner.state_dict["w"]
        assert type(pieces) is RowPieces
        assert type(pieces + 1) is torch.Tensor
        pieces.zero_()
    assert torch.equal(written(copies, plans), LARGE)
    plans, _ = planned_again(copies)
    assert torch.equal(written(copies, plans), LARGE)
