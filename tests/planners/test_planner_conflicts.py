"""Python values that differ over the ranks under one name: found by `DcpxSavePlanner`, and said."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.plan_states import plan_all

from torch_dcpx import DcpxSavePlanner, OptionError, PlanError


@dataclasses.dataclass
class Rates:
    first: float


class Drained:
    """Gives away what it holds when it is stored."""

    def __init__(self) -> None:
        self.queue = [1, 2, 3]

    def __getstate__(self) -> dict[str, Any]:
        queue, self.queue = self.queue, []
        return {"queue": queue}


def values(rank: int) -> dict[str, Any]:
    names = [f"name{i}" for i in range(50)]
    shuffled = random.Random(rank).sample(names, 50)
    return {
        "set": set(shuffled),
        "dict": dict.fromkeys(shuffled, 1.5),
        "text": "".join(["a", "b"]),
        "nested": [{"x": (1, None, b"y", float("nan"))}, {2: 3j}],
        "rates": Rates(0.5),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
    }


def test_equal_values_of_all_ranks_are_no_conflict() -> None:
    planners = [DcpxSavePlanner(on_conflict="error") for _ in range(4)]
    plans, metadata, _ = plan_all(planners, values)
    assert sum(len(plan.items) for plan in plans) == len(metadata.state_dict_metadata) > 50


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        ("a", b"a"),
        ([1, 2], (1, 2)),
        ([1, 2], [2, 1]),
        ({1, 2}, {1, 3}),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ([[1], 2], [[1, 2]]),
        (torch.float32, torch.float16),
        (Path("a"), Path("b")),
        (Rates(0.1), Rates(0.2)),
        (argparse.Namespace(a=1), argparse.Namespace(a=2)),
        (np.arange(3), np.arange(4)),
    ],
)
def test_values_that_differ_are_reported(
    one: Any, other: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def state(rank: int) -> dict[str, Any]:
        value = copy.deepcopy(one if rank < 2 else other)
        return {"seed": (value,), "same": 1, "t": torch.ones(3)}

    with pytest.raises(PlanError, match=r"'seed' \(ranks 0, 2 of the group\)") as caught:
        plan_all([DcpxSavePlanner(on_conflict="error") for _ in range(4)], state)
    assert caught.value.fqn == "seed"
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        plans, _, _ = plan_all([DcpxSavePlanner() for _ in range(4)], state)
    assert "'seed' (ranks 0, 2 of the group)" in caplog.text and "lowest rank" in caplog.text
    assert "seed" in {item.index.fqn for item in plans[0].items}


@dataclasses.dataclass
class Timed:
    """Stores what all ranks have alike."""

    values: list[int]
    took_s: float

    def __getstate__(self) -> dict[str, Any]:
        return {"values": self.values}


def test_what_an_object_does_not_store_is_no_conflict() -> None:
    planners = [DcpxSavePlanner(on_conflict="error") for _ in range(2)]
    plans, _, _ = plan_all(planners, lambda rank: {"timed": Timed([1, 2], float(rank))})
    assert [item.index.fqn for plan in plans for item in plan.items] == ["timed"]


F4 = r"torch.float32 of shape \[4\] on rank 0"


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (torch.ones(5), rf"{F4} and torch.float32 of shape \[5\] on rank 2"),
        (torch.ones(4, 1), rf"{F4} and torch.float32 of shape \[4, 1\] on rank 2"),
        (torch.ones(4).double(), rf"{F4} and torch.float64 of shape \[4\] on rank 2"),
        (1, f"{F4} and a Python value on rank 2"),
    ],
)
@pytest.mark.parametrize("split", [True, False])
def test_name_that_is_not_one_tensor_on_all_ranks_is_refused(
    other: Any, text: str, split: bool
) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {"w": torch.ones(4) if rank < 2 else other, "same": torch.ones(3)}

    with pytest.raises(PlanError, match=f"'w' is {text}") as caught:
        plan_all([DcpxSavePlanner(split_replicas=split) for _ in range(4)], state)
    assert caught.value.fqn == "w"


def test_conflict_is_logged_once_a_planner(caplog: pytest.LogCaptureFixture) -> None:
    planners = [DcpxSavePlanner() for _ in range(2)]
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        for _ in range(3):
            plan_all(planners, lambda rank: {"seed": rank, "t": torch.ones(3)})
        assert len(caplog.records) == 1
        plan_all(planners, lambda rank: {"seed": rank, "other": rank})
    assert len(caplog.records) == 2 and "'other'" in caplog.text


def test_unknown_reaction_to_conflicts_is_refused() -> None:
    with pytest.raises(OptionError) as caught:
        DcpxSavePlanner(on_conflict="ignore")  # type: ignore[arg-type]
    assert caught.value.option == "on_conflict"


def test_plan_does_not_store_an_object_that_storing_changes() -> None:
    states = [{"a": Drained(), "b": [Drained()]} for _ in range(2)]
    plan_all([DcpxSavePlanner(on_conflict="error") for _ in states], lambda rank: states[rank])
    assert all(state["a"].queue == state["b"][0].queue == [1, 2, 3] for state in states)
