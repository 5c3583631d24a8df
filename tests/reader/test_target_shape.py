"""Targets whose shards are not what a load plans for: an error before any tensor is touched."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.plan_states import as_rank, mesh_of, part_of
from support.rank_hooks import load, states_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_dcpx as dcpx
from torch_dcpx import DcpxLoadPlanner, DcpxReader, PlanError, UnsupportedError
from torch_dcpx.checkpoint.load_checks import LoadRules
from torch_dcpx.checkpoint.load_plan import RankLoad
from torch_dcpx.tensors.memory import is_expanded

WHOLE = torch.arange(11 * 3, dtype=torch.float32).reshape(11, 3)


LOADS: dict[str, Callable[[dict[str, Any], Path, Any], object]] = {
    "dcpx.load": lambda state, path, planner: dcpx.load(state, path, planner=planner, no_dist=True),
    "dcp.load": lambda state, path, planner: dcp.load(
        state, storage_reader=DcpxReader(path), planner=planner, no_dist=True
    ),
}


def test_dimension_of_one_element_may_have_any_stride(tmp_path: Path) -> None:
    dcpx.save({"w": torch.ones(1, 3)}, tmp_path, no_dist=True)
    target = {"w": torch.zeros(6).as_strided((1, 3), (0, 2))}
    assert not is_expanded(target["w"])
    dcpx.load(target, tmp_path, no_dist=True)
    assert target["w"].tolist() == [[1.0] * 3]
    with pytest.raises(UnsupportedError, match=r"'w' .* one memory for several elements"):
        dcpx.load({"w": torch.zeros(1).as_strided((1, 3), (0, 0))}, tmp_path, no_dist=True)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcpx.save({"a": torch.ones(4), "w": WHOLE}, tmp_path, no_dist=True)
    return tmp_path


def shard_of(rows: int, ranks: int, placement: Any = None) -> DTensor:
    return DTensor.from_local(
        torch.full((rows, 3), -1.0), mesh_of((ranks,)), [placement or Shard(0)],
        run_check=False, shape=(11, 3), stride=(3, 1),
    )  # fmt: skip


@pytest.mark.parametrize("planner", [DcpxLoadPlanner, DefaultLoadPlanner])
@pytest.mark.parametrize("way", LOADS)
def test_shard_of_another_shape_is_refused_before_anything_is_touched(
    saved: Path, way: str, planner: type[DefaultLoadPlanner]
) -> None:
    with as_rank(0, 1):
        for rows, placement in itertools.product((10, 12, 0), (Shard(0), Replicate())):
            state = {"a": torch.zeros(4), "w": shard_of(rows, 1, placement)}
            with pytest.raises((PlanError, CheckpointException)) as caught:
                LOADS[way](state, saved, planner())
            error = caught.value
            if isinstance(error, CheckpointException):
                ((error, _),) = error.failures.values()
            assert isinstance(error, PlanError) and error.fqn == "w"
            assert f"[11, 3] at offsets [0, 0] into this rank's shard, which has shape [{rows}" in (
                str(error)
            )
            assert torch.equal(state["a"], torch.zeros(4))
            assert (state["w"].to_local() == -1).all()


@pytest.mark.parametrize("reader", ["ours", "stock"])
def test_shards_cut_unlike_torch_are_refused_on_each_rank_while_it_plans(
    saved: Path, reader: str
) -> None:
    states = states_of(2, lambda rank: {"w": shard_of((5, 6)[rank], 2)})
    errors = load(states, saved, reader=reader)
    assert [type(error) for error in errors] == [PlanError] * 2
    assert all((state["w"].to_local() == -1).all() for state in states)


@pytest.mark.parametrize("planner", [DcpxLoadPlanner, DefaultLoadPlanner])
def test_odd_shard_is_refused_while_the_ranks_of_a_load_agree(
    saved: Path, planner: type[DefaultLoadPlanner]
) -> None:
    with as_rank(1, 2):
        own = RankLoad(DcpxReader(saved), planner(), LoadRules.of(True, (), "error"))
        with pytest.raises(PlanError, match=r"\[5, 3\] at offsets \[6, 0\] into .* shape \[6, 3\]"):
            own.prepare({"w": shard_of(6, 2)}, 1, is_coordinator=False)


def test_planner_that_fills_other_tensors_takes_any_shard(saved: Path) -> None:
    class Elsewhere(DcpxLoadPlanner):
        def lookup_tensor(self, index: Any) -> torch.Tensor:
            return found

    found = torch.zeros(11, 3)
    with as_rank(0, 1):
        dcpx.load({"w": shard_of(10, 1)}, saved, planner=Elsewhere(), no_dist=True)
    assert torch.equal(found, WHOLE)


def test_shards_as_torch_cuts_them_are_filled(saved: Path) -> None:
    states = states_of(2, lambda _: {"w": part_of(torch.zeros(11, 3), mesh_of((2,)), [Shard(0)])})
    assert load(states, saved) == [None, None]
    assert torch.equal(torch.cat([state["w"].to_local() for state in states]), WHOLE)
