"""Load plans that leave their items on their rank."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

from torch_dcpx import DcpxLoadPlanner, PlanError
from torch_dcpx._plan_classes import MAKER
from torch_dcpx.planners.kept_load_plan import KeptPlan


def kept_plan() -> KeptPlan:
    items, _ = MAKER.read_items(["a", "b"], lambda _: [], True)
    assert items[0].dest_index == MetadataIndex("a")
    return KeptPlan(items, "of the reader", "of the planner")


def test_pickle_has_no_items_and_the_rank_puts_back_its_own() -> None:
    plan = kept_plan()
    sent = pickle.loads(pickle.dumps(plan))
    assert len(pickle.dumps(plan)) < 300
    found = sent.whole(plan)
    assert found == LoadPlan(plan.items, "of the reader", "of the planner")
    assert found.items is plan.items


def test_plan_that_was_sent_twice_is_still_the_ranks_own() -> None:
    plan = kept_plan()
    sent = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(plan))))
    assert sent.whole(plan).items is plan.items


def test_plan_that_was_not_sent_keeps_its_items() -> None:
    plan = kept_plan()
    assert plan.whole(None).items is plan.items
    assert copy.copy(plan).items is plan.items
    assert copy.deepcopy(plan) == plan


@pytest.mark.parametrize("kept", [None, KeptPlan([])], ids=["no plan", "another plan"])
def test_plan_of_another_rank_is_refused(kept: KeptPlan | None) -> None:
    planner = DcpxLoadPlanner()
    planner._kept = kept
    sent = pickle.loads(pickle.dumps(kept_plan()))
    with pytest.raises(PlanError, match="another plan"):
        planner.finish_plan(sent)


@pytest.mark.parametrize(
    "look",
    [
        list,
        len,
        bool,
        lambda items: items[0],
        tuple,
        lambda items: "a" in items,
        partial(operator.add, [1]),
        lambda items: operator.add(items, [1]),
        lambda items: items == [],
        lambda items: items.append(1),
        sorted,
        [1].extend,
        lambda items: next(reversed(items)),
    ],
)
def test_items_that_are_away_are_not_taken_for_none(look: Callable[[Any], Any]) -> None:
    sent = pickle.loads(pickle.dumps(kept_plan()))
    for plan in (sent, copy.copy(sent), copy.deepcopy(sent), pickle.loads(pickle.dumps(sent))):
        with pytest.raises(PlanError, match="stay on their rank"):
            look(plan.items)
