"""One name that is another thing on another rank: refused while the ranks plan."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plan_states import MakeState, as_rank, mesh_of, plan_all
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor, Shard

from torch_dcpx import DcpxSavePlanner, DcpxWriter, PlanError
from torch_dcpx.checkpoint.save_plan import PlanRound, SaveOffer


def shard(rows: int, dtype: torch.dtype = torch.float32) -> DTensor:
    whole = (rows, 3)
    local = torch.ones(rows // 3, 3, dtype=dtype)
    return DTensor.from_local(
        local, mesh_of((3,)), [Shard(0)], run_check=False, shape=whole, stride=(3, 1)
    )


def offered(planner: Any, state: MakeState, path: Path) -> tuple[PlanRound, list[SaveOffer]]:
    """Returns the coordinator's part of `dcpx.save` of three ranks, and what all offer."""
    rounds, offers = [], []
    for rank in range(3):
        with as_rank(rank, 3):
            own = planner()
            own.set_up_planner(state(rank), None, rank == 0)
            writer = DcpxWriter(path)
            writer.set_up_storage_writer(rank == 0)
            rounds.append(PlanRound(own, writer, rank, 3))
            offers.append(pickle.loads(pickle.dumps(rounds[-1].offer())))
    return rounds[0], offers


CASES: dict[str, tuple[Any, Any, str]] = {
    "dtype": (lambda: torch.ones(4), lambda: torch.ones(4).half(), "torch.float16 of shape [4]"),
    "shape": (lambda: torch.ones(4), lambda: torch.ones(6), "torch.float32 of shape [6]"),
    "dimensions": (lambda: torch.ones(4), lambda: torch.ones(4, 1), "of shape [4, 1]"),
    "value first": (lambda: 3, lambda: torch.ones(4), "a Python value on rank 0"),
    "tensor first": (lambda: torch.ones(4), lambda: None, "a Python value on rank 2"),
    "shard's dtype": (lambda: shard(6), lambda: shard(6, torch.float64), "torch.float64 of shape"),
    "shard's tensor": (lambda: shard(6), lambda: shard(9), "of shape [9, 3]"),
    "shard and value": (lambda: shard(6), lambda: 3, "a Python value on rank 2"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("planner", [DcpxSavePlanner, DefaultSavePlanner])
def test_name_that_is_another_thing_on_a_rank_is_refused_with_both(
    planner: Any, case: str, tmp_path: Path
) -> None:
    one, other, text = CASES[case]

    def state(rank: int) -> dict[str, Any]:
        return {"same": torch.ones(2), "x": (other if rank == 2 else one)(), f"own{rank}": rank}

    coordinator, offers = offered(planner, state, tmp_path)
    with pytest.raises(PlanError, match=r"'x' is .* on rank 0 and .* on rank 2") as caught:
        coordinator.answer("id", offers)
    assert text in str(caught.value) and caught.value.fqn == "x"
    assert "'same'" not in str(caught.value) and "'own" not in str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_name_that_is_another_thing_on_a_rank_is_refused_under_dcp_save(case: str) -> None:
    one, other, text = CASES[case]
    with pytest.raises(PlanError, match="'x' is ") as caught:
        plan_all(
            [DcpxSavePlanner() for _ in range(3)],
            lambda rank: {"x": (other if rank == 2 else one)()},
        )
    assert text in str(caught.value)


def test_ranks_may_have_names_that_others_lack_and_more_strides(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        tensor = torch.ones(3, 4) if rank else torch.ones(4, 3).t()
        return {"x": tensor, "grad": torch.ones(2, requires_grad=rank > 0), f"own{rank}": rank}

    _, metadata, _ = plan_all([DcpxSavePlanner() for _ in range(3)], state)
    assert len(metadata.state_dict_metadata) == 5


@pytest.mark.parametrize("planner", [DcpxSavePlanner, DefaultSavePlanner])
def test_values_that_differ_are_one_warning_with_any_planner(
    planner: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"lr of {planner.__name__}"

    def state(rank: int) -> dict[str, Any]:
        return {name: 0.1 if rank < 2 else 0.2, "step": 7, "w": torch.ones(2)}

    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        coordinator, offers = offered(planner, state, tmp_path)
        coordinator.answer("id", offers)
    assert len(caplog.records) == 1
    assert f"'{name}' (ranks 0, 2 of the group)" in caplog.text and "step" not in caplog.text
