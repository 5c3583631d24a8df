"""Load plans that leave their items on their rank."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

from torch_dcpx import DcpxLoadPlanner, DcpxReader, PlanError
from torch_dcpx._plan_classes import MAKER
from torch_dcpx.planners.kept_load_plan import KeptPlan, is_kept


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
    twice = pickle.loads(pickle.dumps(sent))
    assert twice.whole(plan).items is plan.items


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


LOOKS: list[Callable[[Any], Any]] = [
    list, len, bool, tuple, sorted, [1].extend, partial(operator.add, [1]),
    lambda items: items[0],
    lambda items: "a" in items,
    lambda items: operator.add(items, [1]),
    lambda items: items == [],
    lambda items: items.append(1),
    lambda items: next(reversed(items)),
]  # fmt: skip


def test_items_that_are_away_are_not_taken_for_none() -> None:
    sent = pickle.loads(pickle.dumps(kept_plan()))
    for plan in (sent, copy.copy(sent), copy.deepcopy(sent), pickle.loads(pickle.dumps(sent))):
        for look in LOOKS:
            with pytest.raises(PlanError, match="stay on their rank"):
                look(plan.items)


@pytest.mark.parametrize("hook", ["prepare_local_plan", "prepare_global_plan"])
def test_items_stay_only_where_the_readers_hooks_are_stocks_or_ours(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    replaced = DcpxReader(tmp_path)
    setattr(replaced, hook, getattr(replaced, hook))
    subclass: Any = type("Looks", (DcpxReader,), {hook: lambda _, plan: plan})
    planner = DcpxLoadPlanner()
    assert is_kept(planner, DcpxReader(tmp_path)) and is_kept(planner, FileSystemReader(tmp_path))
    assert not is_kept(planner, replaced) and not is_kept(planner, subclass(tmp_path))
    monkeypatch.setattr(FileSystemReader, hook, lambda _, plan: plan)
    assert is_kept(planner, DcpxReader(tmp_path)) and not is_kept(
        planner, FileSystemReader(tmp_path)
    )
