"""Random programs of saves, loads and manager calls on real ranks, in which any rank may skip a
call, raise in it, come late or call something else: no checkpoint of two saves, no other call's
answer, a typed error in time, and the next common call works.

`DCPX_SEED=N` plays the same programs again, and `DCPX_PROGRAMS=17,203` only these of them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from call_programs import program_of, ranks_of
from support.machine import points, seconds
from support.ranks import run_rank_sets

WORKER = Path(__file__).with_name("program_worker.py")
AT_ONCE = 6  # sets of ranks: they wait for each other more than for a core


def play(root: Path, seed: int, programs: int, per_set: int, deadline_s: float) -> None:
    """Plays programs; the first bad one ends all of them, unless DCPX_PROGRAMS_GO_ON=1."""
    chosen = os.environ.get("DCPX_PROGRAMS")
    numbers = [int(n) for n in chosen.split(",")] if chosen else range(programs)
    sets: list[tuple[int, list[str]]] = []
    for ranks in (4, 3, 2):
        own = [number for number in numbers if ranks_of(number) == ranks]
        for at in range(0, len(own), per_set):
            directory = root / f"set{len(sets)}"
            directory.mkdir()
            played = ",".join(map(str, own[at : at + per_set]))
            sets.append((ranks, [str(directory), str(seed), played]))
    printed = run_rank_sets(WORKER, sets, AT_ONCE, deadline_s)
    print(printed)
    assert "BAD\n" not in printed


@pytest.mark.slow
@pytest.mark.multirank
def test_ten_programs_of_calls_end_in_typed_errors_and_whole_checkpoints(
    tmp_path: Path, seed: int
) -> None:
    play(tmp_path, seed, points(10), per_set=2, deadline_s=seconds(1150))


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(3600)
def test_three_hundred_programs_of_calls_end_in_typed_errors_and_whole_checkpoints(
    tmp_path: Path, seed: int
) -> None:
    play(tmp_path, seed, points(300), per_set=13, deadline_s=seconds(3500))


def test_program_of_a_seed_and_a_number_is_always_the_same(seed: int) -> None:
    assert str(program_of(seed, 7)) == str(program_of(seed, 7)) != str(program_of(seed + 1, 7))
    hows = "".join(str(program_of(seed, number)) for number in range(300))
    for said in ("skip", "bad argument", "interrupt in write", "calls manager.", "late"):
        assert said in hows
