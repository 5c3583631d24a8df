"""Any placement on n ranks saved, any other on m loaded: each shard is its part of the whole, bit
for bit, by every pair of planner and storage.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from reshard_cases import Case, fill_with_canaries, local_parts, place, worlds
from support import rank_hooks
from support.machine import points
from support.rank_hooks import LOAD_PLANNERS, READERS, SAVE_PLANNERS, WRITERS
from support.ranks import run_cases
from support.states import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")

sides = st.tuples(
    st.sampled_from(sorted(SAVE_PLANNERS)),
    st.sampled_from(sorted(WRITERS)),
    st.sampled_from(sorted(LOAD_PLANNERS)),
    st.sampled_from(sorted(READERS)),
)


def check_reshard(
    world: tuple[int, int, list[Case]], side: tuple[str, str, str, str], path: Path
) -> None:
    saving, loading, cases = world
    save_planner, writer, load_planner, reader = side
    saved = rank_hooks.states_of(
        saving,
        lambda rank: {f"t{n}": place(one.whole, one.saved, rank) for n, one in enumerate(cases)},
    )
    rank_hooks.save(saved, path, save_planner, writer)

    def wanted(rank: int) -> dict[str, Any]:
        return {f"t{n}": place(one.whole, one.loaded, rank) for n, one in enumerate(cases)}

    expected, targets = (rank_hooks.states_of(loading, wanted) for _ in range(2))
    for state in targets:
        for value in state.values():
            fill_with_canaries(value)
    assert rank_hooks.load(targets, path, load_planner, reader) == [None] * loading
    for rank, state in enumerate(targets):
        for fqn, value in state.items():
            assert_same(local_parts(expected[rank][fqn]), local_parts(value), f"rank {rank} {fqn}")


@pytest.mark.slow
@settings(max_examples=points(100), derandomize=True)
@given(worlds(), sides)
def test_each_shard_loads_as_its_part_of_the_whole(
    world: tuple[int, int, list[Case]], side: tuple[str, str, str, str]
) -> None:
    with tempfile.TemporaryDirectory() as path:
        check_reshard(world, side, Path(path) / "ckpt")


@pytest.mark.slow
@settings(max_examples=points(1000))
@given(worlds(), sides)
def test_each_shard_loads_as_its_part_of_the_whole_a_thousand_times(
    world: tuple[int, int, list[Case]], side: tuple[str, str, str, str]
) -> None:
    with tempfile.TemporaryDirectory() as path:
        check_reshard(world, side, Path(path) / "ckpt")


@pytest.mark.slow
def test_mesh_of_four_ranks_is_loaded_by_three(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("reshard_worker.py")
    run_cases(worker, 4, "save", tmp_path)
    run_cases(worker, 3, "load", tmp_path)
