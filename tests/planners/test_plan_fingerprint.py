"""What makes another plan: each by itself, on one rank and in groups that are believed in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.plan_states import as_rank, made, mesh_of, mixed_state, part_of, said, set_up
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_dcpx import _C, DcpxSavePlanner
from torch_dcpx.planners.cache import fingerprint_of

__all__ = ["made"]

State = dict[str, Any]


def test_plan_that_is_used_again_says_what_a_new_one_says() -> None:
    planner = DcpxSavePlanner()
    first = set_up(planner, mixed_state())
    again = set_up(planner, mixed_state())
    fresh = set_up(DcpxSavePlanner(), mixed_state())
    assert planner.dcpx_planning.known is not None
    assert said(first) == said(again) == said(fresh)
    assert again.planner_data == fresh.planner_data
    assert (again.whole_names, again.can_split) == (fresh.whole_names, fresh.can_split)


WEIGHT = torch.arange(24, dtype=torch.float32).reshape(4, 6)


def base() -> State:
    return {"a": {"w": WEIGHT.clone(), "n": 3}, "b": [torch.ones(2), {"c": "text"}], "d": None}


def _set(path: str, value: Any) -> Callable[[State], Any]:
    def change(state: State) -> None:
        part = state
        *parents, last = path.split(".")
        for name in parents:
            part = part[name]
        part[last] = value

    return change


def _reversed(state: State) -> State:
    return dict(reversed(state.items()))


def _resized(state: State) -> None:
    state["a"]["w"].resize_(2, 6)


def _dotted(state: State) -> State:
    inner = state.pop("a")
    return {"a.w": inner["w"], "a.n": inner["n"], **state}


def _by_number(state: State) -> None:
    state["b"] = {"0": state["b"][0], "1": state["b"][1]}


class _Itself:
    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        return []


CHANGES: dict[str, Callable[[State], Any]] = {
    "name": _set("a.v", WEIGHT),
    "name of the same length": lambda state: {
        name if name != "d" else "e": value for name, value in state.items()
    },
    "name gone": lambda state: {name: state[name] for name in ("a", "b")},
    "order": _reversed,
    "shape": _set("a.w", torch.ones(6, 4)),
    "dimensions": _set("a.w", torch.ones(24)),
    "resized": _resized,
    "dtype": _set("a.w", WEIGHT.to(torch.int32)),
    "layout": _set("a.w", WEIGHT.to_sparse()),
    "gradient": _set("a.w", WEIGHT.clone().requires_grad_()),
    "kind": _set("a.n", torch.ones(())),
    "value for a tensor": _set("a.w", 17),
    "path": _dotted,
    "list for a dict": _by_number,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_state_is_planned_anew(change: Callable[[State], Any], made: list[int]) -> None:
    planner = DcpxSavePlanner()
    set_up(planner, base())
    set_up(planner, base())
    assert made[0] == 1
    state = base()
    changed = change(state) or state
    plan = set_up(planner, changed)
    assert made[0] == 2
    assert said(plan) == said(set_up(DcpxSavePlanner(), changed))


OPTIONS = [
    ("flatten_state_dict", False),
    ("flatten_sharded_tensors", False),
    ("dedup_save_to_lowest_rank", True),
    ("split_replicas", True),
    ("split_replicas", False),
    ("on_conflict", "error"),
]


def test_options_set_on_the_planner_make_another_plan(made: list[int]) -> None:
    for name, value in OPTIONS:
        planner, before = DcpxSavePlanner(), made[0]
        set_up(planner, base())
        setattr(planner, name, value)
        set_up(planner, base())
        assert made[0] == before + 2, (name, value)


def test_group_and_coordinator_and_grad_mode_make_another_plan(made: list[int]) -> None:
    planner = DcpxSavePlanner()
    set_up(planner, base(), rank=0)
    set_up(planner, base(), rank=1)
    assert made[0] == 2
    for group in ((0, 2, ""), (0, 3, ""), (1, 3, ""), (1, 3, "another")):
        planner.dcpx_planning.group = group
        set_up(planner, base())
    assert made[0] == 6
    with torch.no_grad():
        set_up(planner, base())
    assert made[0] == 7


def test_pinned_memory_makes_another_plan(made: list[int]) -> None:
    """No accelerator here: a state says by itself whether its memory is pinned."""
    reader = _C.StateReader({**PARTS, "Tensor": _Pinned})
    tensor = _Pinned(False)
    before = reader.fingerprint({"a": tensor}, None)
    assert before == reader.fingerprint({"a": _Pinned(False)}, None)
    assert before != reader.fingerprint({"a": _Pinned(True)}, None)


class _Pinned:
    shape, dtype, layout, requires_grad = torch.Size([2]), torch.int8, torch.strided, False

    def __init__(self, is_pinned: bool) -> None:
        self._is = is_pinned

    def is_pinned(self) -> bool:
        return self._is

    def stride(self) -> tuple[int, ...]:
        return (1,)


PARTS: dict[str, Any] = {
    "Parameter": torch.nn.Parameter,
    "DTensor": object,
    "Shard": Shard,
    "Replicate": Replicate,
    "kind_of": lambda _: 0,
    "describe_mesh": lambda _: None,
    "describe_placement": lambda _: None,
    "describe_value": lambda _: None,
    "hooks": (),
    "has_strides": False,
}


def test_strides_make_another_plan_where_plans_have_them() -> None:
    for has_strides in (False, True):
        reader = _C.StateReader({**PARTS, "Tensor": torch.Tensor, "has_strides": has_strides})
        square = torch.ones(3, 3)
        plain, turned = (reader.fingerprint({"a": one}, None) for one in (square, square.t()))
        assert (plain != turned) is has_strides


PLACEMENTS = {
    "rows": [Shard(0), Replicate()],
    "columns": [Shard(1), Replicate()],
    "other dimension of the mesh": [Replicate(), Shard(0)],
    "both": [Shard(0), Shard(0)],
    "strided": [_StridedShard(0, split_factor=2), Shard(0)],
    "strided by three": [_StridedShard(0, split_factor=3), Shard(0)],
    "sum": [Partial(), Replicate()],
}


class _GivesOthers(DcpxSavePlanner):
    """May give what is planned, whatever local shapes the state has."""

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(index)


def test_placements_and_meshes_and_global_shapes_make_other_plans() -> None:
    planner = _GivesOthers()
    seen = set()

    def note(tensor: torch.Tensor) -> None:
        planner.set_up_planner({"t": tensor}, None, True)
        # A sum, where torch refuses it; what torch 2.9 cannot split.
        with contextlib.suppress(ValueError, RuntimeError):
            planner.create_local_plan()
        seen.update(planner.dcpx_planning.plans._known)

    for rank, sizes in ((0, (2, 3)), (0, (3, 2)), (5, (2, 3))):
        with as_rank(rank, 6):
            mesh = mesh_of(sizes)
            for placements in PLACEMENTS.values():
                local = torch.ones(2, 2)
                for shape in (torch.Size([12, 12]), torch.Size([24, 12])):
                    note(
                        DTensor.from_local(
                            local, mesh, placements, run_check=False, shape=shape, stride=(12, 1)
                        )
                    )
    assert len(seen) >= 3 * 2 * (len(PLACEMENTS) - 1)


def test_distributed_tensor_that_is_frozen_is_planned_anew(made: list[int]) -> None:
    planner = DcpxSavePlanner()
    with as_rank(0, 2):
        weight = part_of(WEIGHT, mesh_of((2,)), [Shard(0)]).requires_grad_()
        for count, needs_grad in ((1, True), (1, True), (2, False), (2, False)):
            weight.requires_grad_(needs_grad)
            plan = set_up(planner, {"w": weight})
            assert made[0] == count
            (item,) = plan.items
            assert item.tensor_data.properties.requires_grad is needs_grad


def test_state_that_plans_itself_is_planned_each_time(made: list[int]) -> None:
    planner = DcpxSavePlanner()
    hooked = torch.ones(2)
    hooked.global_shape = (4,)  # type: ignore[attr-defined]
    for value in (_Itself(), torch.ones(2).as_subclass(_OtherTensor), hooked):
        before = made[0]
        for _ in range(2):
            set_up(planner, {**base(), "itself": value})
            assert planner.dcpx_planning.known is None
        assert made[0] == before + 2


class _OtherTensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("path", "other"),
    [
        (("foo", "w"), ("bar", "w")),
        (("foo",), (-4,)),
        (("",), (-1,)),
        ((1,), ("1",)),
        (("a", "bc"), ("ab", "c")),
    ],
)
def test_path_that_is_not_the_names_own_makes_another_plan(path: Any, other: Any) -> None:
    state = {"w": torch.ones(2)}
    found = [fingerprint_of(state, {"w": one}, ()) for one in (path, other, path)]
    assert found[0] is not None
    assert found[0] == found[2] != found[1]
