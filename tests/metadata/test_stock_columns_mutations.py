"""Mutations of stock's `.metadata`, by the seed: what Python makes of each, or declined.

DCPX_FUZZ_ROUNDS=N tries ten times as many (2,000) where slow tests run.
"""

from __future__ import annotations

import collections
import os
import pickle
import pickletools
import random

import pytest
from support.machine import points
from support.metadata_samples import PATH, canonical, small
from support.mutations import mutate

from torch_dcpx.metadata.stock import load_stock_metadata
from torch_dcpx.metadata.stock_columns import open_stock_metadata

ROUNDS = int(os.environ.get("DCPX_FUZZ_ROUNDS") or points(2000))


def outcome_of(mutant: bytes) -> str:
    found = open_stock_metadata(mutant)
    if found is None:
        return "declined"
    assert canonical(found) == canonical(load_stock_metadata(mutant, PATH))
    return "taken"


def check_mutants(rounds: int, seed: int) -> None:
    random_ = random.Random(seed)
    bodies = [pickle.dumps(small(), protocol) for protocol in (2, 3, 4, 5)]
    bodies += [pickletools.optimize(data) for data in bodies]
    outcomes = collections.Counter(
        outcome_of(mutate(random_.choice(bodies), random_)) for _ in range(rounds)
    )
    assert min(outcomes["taken"], outcomes["declined"]) > rounds // 300, outcomes


def test_mutation_is_what_python_makes_of_it_or_declined(seed: int) -> None:
    check_mutants(points(1500), seed)


@pytest.mark.slow
def test_more_mutations_are_what_python_makes_of_them_or_declined(seed: int) -> None:
    check_mutants(10 * ROUNDS, seed)
