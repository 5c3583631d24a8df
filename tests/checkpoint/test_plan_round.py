"""Rounds of planning of groups that share a process: each takes what it has offered itself."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plan_states import mesh_of, part_of
from support.rank_hooks import states_of
from torch.distributed.tensor import Replicate

from torch_dcpx import DcpxSavePlanner, DcpxWriter, PlanError
from torch_dcpx.checkpoint.save_plan import PlanRound, SaveAnswer
from torch_dcpx.planners.cache import PlanCache
from torch_dcpx.ranks.plan_wire import RankPlan

State = dict[str, Any]


class Rank:
    """A rank, and the plans that its process keeps."""

    def __init__(self, number: int, state: State, path: Path) -> None:
        self.number, self.state, self.path = number, state, path
        self.plans = PlanCache()

    def round(self, group: str) -> PlanRound:
        planner = DcpxSavePlanner()
        planner.dcpx_planning.plans = self.plans
        planner.set_up_planner(dict(self.state), is_coordinator=self.number == 0)
        writer = DcpxWriter(self.path)
        writer.set_up_storage_writer(self.number == 0, rank=self.number, use_collectives=True)
        return PlanRound(planner, writer, self.number, 2, group)


def sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def agree(offers: list[Any], first: PlanRound, second: PlanRound) -> list[Any]:
    """Returns the plan of each rank."""
    answers = first.answer("id", offers)
    if answers[0].is_again:
        answers = first.answer("id", [first.offer_again(), sent(second.offer_again())])
    return [first.finish(answers[0]), second.finish(sent(answers[1]))]


def plan_of(first: Rank, second: Rank, group: str) -> list[Any]:
    rounds = first.round(group), second.round(group)
    return agree([rounds[0].offer(), sent(rounds[1].offer())], *rounds)


def names(plans: list[Any]) -> list[list[str]]:
    return [sorted(item.index.fqn for item in plan.items) for plan in plans]


@pytest.fixture
def ranks(tmp_path: Path) -> tuple[Rank, Rank, Rank]:
    """Rank 0, and ranks 1 of two groups, of which one has other things."""
    shared = {f"t{n}": torch.zeros(1000) for n in range(6)}
    other = {"t0": torch.zeros(1000), "u": torch.zeros(100_000), "t2": torch.zeros(1000)}
    return (
        Rank(0, shared, tmp_path),
        Rank(1, dict(shared), tmp_path),
        Rank(1, other, tmp_path),
    )


def test_agreement_that_another_save_replaces_meanwhile_is_not_mixed_with_its(
    ranks: tuple[Rank, Rank, Rank],
) -> None:
    first, second, other = ranks
    wanted = names(plan_of(first, second, "group"))
    rounds = first.round("group"), second.round("group")
    offers = [rounds[0].offer(), sent(rounds[1].offer())]
    assert [offer.plan for offer in offers] == [None, None]
    replaced = names(plan_of(first, other, "group"))
    assert replaced[0] != wanted[0]
    assert names(agree(offers, *rounds)) == wanted
    assert rounds[0].metadata is not None
    assert sorted(rounds[0].metadata.state_dict_metadata) == sorted([*wanted[0], *wanted[1]])


def test_groups_of_a_process_neither_share_nor_void_their_agreements(
    ranks: tuple[Rank, Rank, Rank],
) -> None:
    first, second, other = ranks
    for _ in range(2):
        wanted = names(plan_of(first, second, "one"))
        assert names(plan_of(first, other, "another"))[0] != wanted[0]
    for group in ("one", "another"):
        assert first.round(group).offer().plan is None


def test_agreement_that_is_refused_is_offered_no_more(ranks: tuple[Rank, Rank, Rank]) -> None:
    first, second, _ = ranks
    plan_of(first, second, "group")
    second.plans = PlanCache()
    rounds = first.round("group"), second.round("group")
    offers = [rounds[0].offer(), sent(rounds[1].offer())]
    assert [offer.plan is None for offer in offers] == [True, False]
    assert rounds[0].answer("id", offers)[0].is_again
    rounds[0].offer_again()
    assert first.round("group").offer().plan is not None


def test_plan_that_is_offered_again_still_shares_rows(tmp_path: Path) -> None:
    def make(_: int) -> State:
        whole = torch.zeros(800, 64)
        return {"w": part_of(whole, mesh_of((2,)), [Replicate()]), "plain": whole}

    states = states_of(2, make)
    first, second = (Rank(number, state, tmp_path) for number, state in enumerate(states))
    plan_of(first, second, "group")
    second.plans = PlanCache()
    rounds = first.round("group"), second.round("group")
    assert rounds[0].offer().plan is None
    again, new = rounds[0].offer_again().plan, rounds[1].offer().plan
    assert isinstance(again, RankPlan) and isinstance(new, RankPlan)
    assert again.can_split and new.can_split
    assert (again.replicas, again.whole_names) == (new.replicas, new.whole_names)
    assert [item.index for item in sent(again).items] == [item.index for item in new.items]


def test_rank_that_offered_a_plan_takes_no_agreement(ranks: tuple[Rank, Rank, Rank]) -> None:
    first, second, _ = ranks
    started = first.round("group")
    started.offer()
    plan_of(first, second, "group")  # now there is one, which was not offered
    with pytest.raises(PlanError, match="agreement that this rank does not know"):
        started.finish(SaveAnswer("id"))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(1000, dtype=torch.float64), r"torch.float32 of .* has torch.float64 of"),
        (torch.zeros(10, 100), r"\[1000\].* has .*\[10, 100\]"),
        (None, "'t[0-9]'"),
    ],
    ids=["dtype", "shape", "gone"],
)
def test_kept_piece_that_does_not_fit_the_state_is_refused_by_name(
    ranks: tuple[Rank, Rank, Rank], value: Any, said: str
) -> None:
    first, second, _ = ranks
    mine = names(plan_of(first, second, "group"))[0][0]
    rounds = first.round("group"), second.round("group")
    answers = rounds[0].answer("id", [rounds[0].offer(), sent(rounds[1].offer())])
    state = rounds[0]._planner.state_dict
    if value is None:
        del state[mine]
    else:
        state[mine] = value
    with pytest.raises(PlanError, match=said) as caught:
        rounds[0].finish(answers[0])
    assert caught.value.fqn == mine
