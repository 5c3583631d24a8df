"""What the plans of many ranks hold, in any order: each chunk is kept once, numbered as found."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from torch_dcpx._plan_classes import MAKER

CASES = 40


def random_plans(rng: random.Random) -> list[list[Any]]:
    """Returns items of ranks that have chunks in common, behind one another or in any order."""
    ranks = rng.randint(1, 6)
    plans: list[list[Any]] = [[] for _ in range(ranks)]
    for number in range(rng.randint(1, 6)):
        ndim = rng.choice([0, 1, 2, 3, 7, 8, 9])
        offsets = [tuple(rng.randint(0, 2) for _ in range(ndim)) for _ in range(rng.randint(1, 8))]
        if rng.random() < 0.5:
            offsets.sort()
        local = torch.empty(()).expand((1,) * ndim)
        for offset in offsets:
            box = (torch.Size(offset), torch.Size((1,) * ndim), torch.Size((3,) * ndim))
            plans[rng.randrange(ranks)].append((f"tensor.{number}", local, False, *box))
    plans[0].append("object")
    plans[-1].append("object")
    for plan in plans:
        if rng.random() < 0.5:
            rng.shuffle(plan)
    return [MAKER.write_items(plan) for plan in plans]


def key_of(item: Any) -> tuple[str, Any]:
    return item.index.fqn, item.index.offset


@pytest.mark.parametrize("to_lowest_rank", [False, True])
def test_chunks_in_any_order_are_kept_by_one_of_their_ranks(
    seed: int, to_lowest_rank: bool
) -> None:
    rng = random.Random(seed)
    for _ in range(CASES):
        plans = random_plans(rng)
        holders: dict[Any, list[int]] = {}
        for rank, plan in enumerate(plans):
            for item in plan:
                holders.setdefault(key_of(item), []).append(rank)
        kept = MAKER.dedup_items(plans, [False] * len(plans), to_lowest_rank, set(), set())
        keepers: dict[Any, set[int]] = {}
        for rank, (items, before) in enumerate(zip(kept, plans, strict=True)):
            order = {id(item): place for place, item in enumerate(before)}
            places = [order[id(item)] for item in items]  # KeyError: an item of another rank
            assert places == sorted(set(places))
            for item in items:
                keepers.setdefault(key_of(item), set()).add(rank)
        assert keepers.keys() == holders.keys()
        for key, ranks in keepers.items():
            assert len(ranks) == 1
            assert ranks <= {min(holders[key])} if to_lowest_rank else ranks <= {*holders[key]}
        # What one rank alone has twice is its own matter: the coordinator's check names it.
        for key, ranks in holders.items():
            if len(set(ranks)) == 1:
                found = [item for plan in kept for item in plan if key_of(item) == key]
                assert len(found) == len(ranks)


def test_entries_list_chunks_by_rank_and_number_them(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(CASES):
        plans = [[item for item in plan if item.tensor_data] for plan in random_plans(rng)]
        planned, entries, _ = MAKER.global_plan(plans)
        wanted: dict[str, list[Any]] = {}
        for before, after in zip(plans, planned, strict=True):
            for item, made in zip(before, after, strict=True):
                chunks = wanted.setdefault(item.index.fqn, [])
                assert (made.index, made.index.index) == (item.index, len(chunks))
                assert made.tensor_data is item.tensor_data and made.type is item.type
                chunks.append(item.tensor_data.chunk)
        assert list(entries) == list(wanted)
        for name, chunks in wanted.items():
            assert [id(chunk) for chunk in entries[name].chunks] == [id(one) for one in chunks]


def test_hint_that_is_right_keeps_its_item_and_any_other_does_not() -> None:
    box = (torch.Size((0,)), torch.Size((1,)), torch.Size((1,)))
    local = torch.empty(1)
    for hint, is_same in ((0, True), (1, False), (-1, False), (1 << 70, False), (True, False)):
        (item,) = MAKER.write_items([("tensor", local, False, *box)])
        object.__setattr__(item.index, "index", hint)
        ((made,),), _, _ = MAKER.global_plan([[item]])
        assert (made is item) is is_same
        assert type(made.index.index) is int and made.index.index == 0


def test_plan_that_is_no_list_is_refused() -> None:
    bad: Any = [()]
    with pytest.raises(ValueError, match="list of items"):
        MAKER.dedup_items(bad, [False], False, set(), set())
