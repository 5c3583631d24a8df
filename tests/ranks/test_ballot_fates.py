"""A save of several ranks, any of which may fail, be killed or interrupted anywhere.

All ranks that are left see it committed, or all see an error. Only where the coordinator is lost
between its decision and its answer may the outcome be unknown.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.machine import points, seconds
from support.store_ranks import FULL, Killed, Ranks, Storage
from torch.distributed import HashStore

from torch_dcpx.errors import OutcomeUnknownError
from torch_dcpx.ranks.ballot import Ballot

FATES = ["lives", "lives", "lives", "fails", "killed", "interrupted", "cancels"]
PHASES = ["entry", "plan", "split", "staging", "writing", "voted", "commit", "committed"]


def run_with_fates(world_size: int, random_seed: int) -> None:
    chance = random.Random(random_seed)
    fates = [(chance.choice(FATES), chance.choice(PHASES)) for _ in range(world_size)]
    storage = Storage()
    ranks = Ranks(HashStore(), world_size)
    kept: dict[int, bool] = {}  # of ranks that got an error: whether they leave their files

    def one(rank: int) -> Any:
        fate, fatal_phase = fates[rank]
        exchange = ranks.exchange(rank, timeout_s=seconds(0.7))
        ballot = Ballot(exchange, exchange.deadline)

        def reach(phase: str) -> None:
            if phase != fatal_phase:
                return
            if fate == "killed":
                raise Killed
            if fate == "fails":
                raise FULL
            if fate == "interrupted":
                raise KeyboardInterrupt
            if fate == "cancels":
                ballot.cancel()

        def commit(payloads: list[Any]) -> str:
            reach("commit")
            result = storage.commit(payloads)
            reach("committed")
            return result

        def planned(phase: str) -> int:
            reach(phase)
            return rank

        def write() -> None:
            exchange.note_phase("writing")
            reach("writing")
            ballot.vote(rank)
            reach("voted")

        def save() -> Any:
            reach("entry")
            total = exchange.all_reduce("plan", lambda: planned("plan"), sum)
            assert total == sum(range(world_size))
            assert exchange.reduce_scatter("split", lambda: planned("split"), list) == rank
            exchange.note_phase("staging")
            reach("staging")
            try:
                write()
            except Exception as error:  # noqa: BLE001 - told to all ranks
                ballot.fail(error)
            return ballot.settle(commit, storage.was_committed)

        try:
            return save()
        except Killed:
            ranks.clients[rank].close()
            raise
        except BaseException as error:
            ballot.fail(error)
            kept[rank] = ballot.may_be_committed
            exchange.fail(error)
            exchange.close()
            raise

    got = ranks.run(one)
    ranks.close()
    survivors = [outcome for outcome in got if not isinstance(outcome, (Killed, KeyboardInterrupt))]
    described = f"seed {random_seed}: {list(zip(fates, got, strict=True))}"
    if any(isinstance(outcome, OutcomeUnknownError) for outcome in survivors):
        assert fates[0][0] == "killed" and fates[0][1] in ("commit", "committed"), described
        assert storage.committed == [], described
        return
    if storage.committed:
        assert all(kept.values()), described
    is_success = {not isinstance(outcome, BaseException) for outcome in survivors}
    assert len(is_success) <= 1, described
    if is_success == {True}:
        assert len(storage.committed) == 1, described
    elif is_success == {False} and storage.committed:  # the commit itself raised after its rename
        assert fates[0][1] == "committed", described


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_whatever_happens_to_ranks_the_others_agree(world_size: int, seed: int) -> None:
    with ThreadPoolExecutor(4) as pool:  # they mostly wait
        list(pool.map(lambda step: run_with_fates(world_size, seed + step), range(points(8))))
