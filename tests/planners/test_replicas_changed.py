"""Rows are shared by what a planner said of the items that it made, not of any others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.hook_planners import ForeignSave
from support.plan_states import mesh_of, part_of
from support.rank_hooks import save, states_of
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from torch_dcpx import DcpxSavePlanner, PlanError

State = dict[str, Any]

LARGE = torch.arange(800 * 64, dtype=torch.float32).reshape(800, 64)  # 200 KiB


def own_copy(path: Path, name: str, ranks: int) -> bool:
    """Returns whether a checkpoint has a tensor as one of the ranks had it: `LARGE + rank`."""
    found = {name: torch.zeros_like(LARGE)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return any(torch.equal(found[name], LARGE + rank) for rank in range(ranks))


def renamed(items: Sequence[WriteItem], name: Callable[[str], str]) -> list[WriteItem]:
    return [
        dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=name(item.index.fqn)))
        for item in items
    ]


class Prefixes(ForeignSave):
    """Gives all names of a planner of ours a prefix."""

    def __init__(self) -> None:
        self.inner: Any = DcpxSavePlanner(flatten_state_dict=False)

    def create_local_plan(self) -> Any:
        return self._outer(self.inner.create_local_plan())

    def finish_plan(self, new_plan: Any) -> Any:
        items = renamed(new_plan.items, lambda name: name.removeprefix("model."))
        return self._outer(self.inner.finish_plan(dataclasses.replace(new_plan, items=items)))

    def resolve_data(self, write_item: WriteItem) -> Any:
        (item,) = renamed([write_item], lambda name: name.removeprefix("model."))
        return self.inner.resolve_data(item)

    def _outer(self, plan: SavePlan) -> SavePlan:
        return dataclasses.replace(plan, items=renamed(plan.items, "model.{}".format))


class Adds(DcpxSavePlanner):
    """Plans a buffer that the state has elsewhere by itself."""

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        self.buffer = {"model.w": state_dict.pop("w")}
        super().set_up_planner(state_dict, *args, **kwargs)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        more = create_default_local_save_plan(self.buffer, is_coordinator=False).items
        self.state_dict.update(self.buffer)
        return dataclasses.replace(plan, items=[*plan.items, *more])


def copies_and_a_buffer(rank: int) -> State:
    return {"v": part_of(LARGE[:300], mesh_of((2,)), [Replicate()]), "w": LARGE + rank}


@pytest.mark.parametrize("kind", [Prefixes, Adds])
def test_plain_tensor_of_a_name_that_the_planner_did_not_know_is_whole(
    kind: Callable[[], Any], tmp_path: Path
) -> None:
    states = states_of(2, copies_and_a_buffer)
    save(states, tmp_path, planners=[kind() for _ in states])
    assert own_copy(tmp_path, "model.w", 2)


class LeavesOut(DcpxSavePlanner):
    """Lets every second rank save nothing."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[]) if torch.distributed.get_rank() % 2 else plan


def apart(rank: int) -> State:
    """Returns what a rank of four has where two pairs train by themselves."""
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]][rank // 2]))
    return {"w": part_of(LARGE + rank // 2, mesh, [Replicate()])}


def test_ranks_that_leave_items_out_do_not_hide_two_meshes(tmp_path: Path) -> None:
    states = states_of(4, apart)
    save(states, tmp_path, planners=[LeavesOut() for _ in states])
    assert own_copy(tmp_path, "w", 2)


class Composed(DefaultSavePlanner):
    """Has its plans made by a planner of ours, and gives the data by itself."""

    def create_local_plan(self) -> SavePlan:
        self.inner = DcpxSavePlanner(flatten_state_dict=False)
        self.inner.set_up_planner(self.state_dict, is_coordinator=self.is_coordinator)
        self.plan = dataclasses.replace(self.inner.create_local_plan(), planner_data=self.mappings)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return self.inner.create_global_plan(all_plans)


@pytest.mark.parametrize("is_plain", [False, True])
def test_rows_of_a_planner_that_is_not_told_of_them_are_refused(
    is_plain: bool, tmp_path: Path
) -> None:
    def make(_: int) -> State:
        return {"w": LARGE if is_plain else part_of(LARGE, mesh_of((2,)), [Replicate()])}

    class Vouches(Composed):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            return dataclasses.replace(plan, can_split=is_plain)  # as split_replicas=True says

    states = states_of(2, make)
    with pytest.raises(PlanError, match=r"gave \[800, 64\] for rows of .* finish_plan") as caught:
        save(states, tmp_path, planners=[Vouches() for _ in states])
    assert caught.value.fqn == "w"


def test_whole_tensors_of_a_planner_that_is_not_told_of_rows_are_saved(tmp_path: Path) -> None:
    states = states_of(2, copies_and_a_buffer)
    for state in states:
        state["v"] = torch.ones(3)
    save(states, tmp_path, planners=[Composed() for _ in states])
    assert own_copy(tmp_path, "w", 2)
