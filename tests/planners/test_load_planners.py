"""`dcpx.load` with planners and readers of the caller's: asked, believed, and still checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import save
from support.states import assert_same, blank_like
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)

import torch_dcpx as dcpx
from torch_dcpx._compat import flatten_before_2_4

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_a_planner_that_does_not_flatten_is_asked_by_its_own_names(tmp_path: Path) -> None:
    state = {"a.b": torch.arange(3), "nested": {"x": 1}}
    dcp.save(
        state,
        storage_writer=dcpx.DcpxWriter(tmp_path),
        planner=DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    target = {"a.b": torch.zeros(3, dtype=torch.int64), "nested": None}
    assert dcpx.load(target, tmp_path, planner=planner).is_whole
    assert_same(state, target)
    with pytest.raises(dcpx.MismatchError) as caught:
        dcpx.load({"nested": {"t": torch.ones(1)}}, tmp_path)
    assert caught.value.missing == ("nested.t",)


def test_a_planner_that_allows_partial_loads_forgives_names_and_keeps_its_flag(
    tmp_path: Path,
) -> None:
    save({"w": torch.ones(2)}, tmp_path)
    for allowed in (True, False):
        planner = DefaultLoadPlanner(allow_partial_load=allowed)
        report = dcpx.load({"w": torch.zeros(2), "new": 1}, tmp_path, planner=planner, strict=False)
        assert report.missing == ("new",)
        assert planner.allow_partial_load is allowed
    planner = DefaultLoadPlanner(allow_partial_load=True)
    assert dcpx.load({"new": 1}, tmp_path, planner=planner).missing == ("new",)
    planner = DefaultLoadPlanner()
    with pytest.raises(dcpx.MismatchError):
        dcpx.load({"new": 1}, tmp_path, planner=planner)
    assert planner.allow_partial_load is False


class RenamingPlanner(DefaultLoadPlanner):
    """Reads each `new.X` from what is stored as `old.X`."""

    def create_local_plan(self) -> Any:
        def stored(name: str) -> str:
            return name.replace("new.", "old.")

        state, self.state_dict = self.state_dict, {stored(k): v for k, v in self.state_dict.items()}
        plan = super().create_local_plan()
        self.state_dict = state
        items = [
            dataclasses.replace(
                item,
                dest_index=dataclasses.replace(
                    item.dest_index, fqn=item.dest_index.fqn.replace("old.", "new.")
                ),
            )
            for item in plan.items
        ]
        return dataclasses.replace(plan, items=items)


def test_a_planner_that_renames_is_believed_and_still_checked(tmp_path: Path) -> None:
    save({"old": {"w": torch.arange(4), "v": torch.ones(2)}}, tmp_path)
    target = {"new": {"w": torch.zeros(4, dtype=torch.int64)}}
    report = dcpx.load(target, tmp_path, planner=RenamingPlanner())
    assert_same({"new": {"w": torch.arange(4)}}, target)
    assert report.unexpected == ("old.v",)
    wrong = {"new": {"w": torch.zeros(4), "x": 1}}
    with pytest.raises(dcpx.MismatchError) as caught:
        dcpx.load(wrong, tmp_path, planner=RenamingPlanner())
    assert caught.value.missing == ("new.x",)
    assert caught.value.dtypes == (("new.w", "int64", "float32"),)


class ConvertingPlanner(DefaultLoadPlanner):
    """Takes every tensor in a buffer of its own."""

    def resolve_tensor(self, read_item: Any) -> Any:
        self.buffer = torch.empty(tuple(read_item.lengths))
        return self.buffer

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        self.state_dict[read_item.dest_index.fqn].copy_(tensor * 2)


def test_a_planner_that_converts_is_not_asked_about_dtypes(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path)
    target = {"w": torch.zeros(2, dtype=torch.float64)}
    report = dcpx.load(target, tmp_path, planner=ConvertingPlanner())
    assert_same({"w": torch.tensor([2.0, 2.0], dtype=torch.float64)}, target)
    assert report.casts == ()


def test_a_planner_that_makes_the_state_hands_it_to_the_caller(tmp_path: Path) -> None:
    state = {"w": torch.arange(4), "nested": {"step": 3}}
    save(state, tmp_path)
    target: dict[str, Any] = {}
    assert dcpx.load(target, tmp_path, planner=_EmptyStateDictLoadPlanner()).unexpected == ()
    assert_same(state, {key: target[key] for key in state})


def test_a_checkpoint_with_the_names_of_torch_2_3_is_loaded_as_by_stock(tmp_path: Path) -> None:
    state = {
        "o": {"groups": [{"lr": 0.1, "betas": [1, 2]}, 7]},
        "l": [[{"a": 1}]],
        "w": torch.ones(2),
    }
    old = flatten_before_2_4(state)[0]
    assert old.keys() != set(DefaultLoadPlanner().mappings)
    dcp.save(
        old,
        storage_writer=dcpx.DcpxWriter(tmp_path),
        planner=DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    target = {
        "o": {"groups": [{"lr": 0, "betas": [0, 0]}, 0]},
        "l": [[{"a": 0}]],
        "w": torch.zeros(2),
    }
    assert dcpx.load(target, tmp_path).is_whole
    assert_same(state, target)


def test_names_of_torch_2_3_are_made_without_a_word_to_other_threads() -> None:
    """Stock tells torch, for all threads, to flatten as before 2.4 while it loads such names."""
    seen: list[str | None] = []

    class Name:
        def __str__(self) -> str:
            seen.append(_version._derived_version)
            return "name"

    assert list(flatten_before_2_4({"a": [{Name(): torch.ones(2)}]})[0]) == ["a.0.name"]
    assert seen and set(seen) == {None}


def test_names_of_a_save_are_todays_while_another_thread_loads_old_ones(tmp_path: Path) -> None:
    state = {"a": {"b": [1, 2], "c": {"d": 3}}, "t": {"u": torch.ones(2)}}
    target = {"a": {"b": [0, 0], "c": {"d": 0}}, "t": {"u": torch.zeros(2)}}
    with mock.patch.object(_version, "_derived_version", "2_3"):  # stock's load of another thread
        dcpx.save(state, tmp_path / "own", no_dist=True)
        dcp.save(
            state,
            storage_writer=dcpx.DcpxWriter(tmp_path / "dcp"),
            planner=dcpx.DcpxSavePlanner(),
            no_dist=True,
        )
        dcpx.load(target, tmp_path / "own", no_dist=True)
    assert_same(state, target)
    for name in ("own", "dcp"):
        found = dcpx.DcpxReader(tmp_path / name).read_metadata().state_dict_metadata
        assert sorted(found) == ["a.b", "a.c.d", "t.u"]


class GlobalReader(dcpx.DcpxReader):
    """Sees the plans of all ranks, as stock's subclasses do."""

    seen: Any = None

    def prepare_global_plan(self, plans: Any) -> Any:
        self.seen = [len(plan.items) for plan in plans]
        return super().prepare_global_plan(plans)


class GlobalPlanner(DefaultLoadPlanner):
    def create_global_plan(self, global_plan: Any) -> Any:
        assert [len(plan.items) for plan in global_plan] == [2]
        return [dataclasses.replace(plan, items=plan.items[:1]) for plan in global_plan]


def test_global_hooks_of_the_callers_see_and_change_whole_plans(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": 1}
    save(state, tmp_path)
    reader = GlobalReader(tmp_path)
    assert dcpx.load(blank_like(state), storage_reader=reader).items == 2
    assert reader.seen == [2]
    assert dcpx.load(blank_like(state), tmp_path, planner=GlobalPlanner()).items == 1
