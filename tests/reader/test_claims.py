"""Reads that run together share no memory; the oracle compares all pairs."""

from __future__ import annotations

import random

from torch_dcpx.reader.claims import Claim, disjoint_groups


def meet(a: Claim | None, b: Claim | None) -> bool:
    return (
        a is not None
        and b is not None
        and a.owner != b.owner
        and a.begin < b.end
        and b.begin < a.end
    )


def greedy(claims: list[Claim | None]) -> list[int]:
    """As many in a run as will go, in their order."""
    ends, begin = [], 0
    for i, claim in enumerate(claims):
        if any(meet(claim, other) for other in claims[begin:i]):
            ends.append(i)
            begin = i
    return [*ends, len(claims)]


def test_groups_are_those_of_a_comparison_of_all_pairs() -> None:
    for seed in range(200):
        pick = random.Random(seed)
        reach = pick.choice([40, 400, 4000])
        claims: list[Claim | None] = []
        for i in range(pick.randrange(30)):
            begin = pick.randrange(reach)
            owner = pick.choice([f"w{i}", "shared"])
            made = Claim(begin, begin + pick.randrange(1, 30), owner)
            claims.append(None if pick.random() < 0.1 else made)
        assert disjoint_groups(claims) == greedy(claims), seed


def test_neighbours_and_parts_of_one_target_stay_together() -> None:
    claims = [Claim(0, 10, "a"), Claim(10, 20, "b"), Claim(5, 8, "a"), None, Claim(20, 21, "c")]
    assert disjoint_groups(claims) == [5]
    assert disjoint_groups([]) == [0]


def test_a_tied_target_is_read_after_the_one_that_it_is_tied_to() -> None:
    claims = [Claim(0, 10, "a"), Claim(50, 60, "c"), Claim(0, 10, "b"), Claim(0, 10, "a")]
    assert disjoint_groups(claims) == [2, 3, 4]
