"""Random programs of saves, loads and manager calls on real ranks, in which any rank may skip a
call, raise in it, come late or call something else: no checkpoint of two saves, no other call's
answer, a typed error in time, and the next common call works.

`DCPX_SEED=N` plays the same programs again, and `DCPX_PROGRAMS=17,203` only these of them.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
from call_programs import program_of, ranks_of
from program_player import Player
from support.machine import points, seconds
from support.rank_fixture import StartRanks

AT_ONCE = 6  # sets of ranks: they wait for each other more than for a core
PER_SET = 13


def played(root: Path, seed: int, numbers: list[int]) -> str:
    """Plays programs, one after the other in one group; returns what is wrong with the first bad
    one."""
    warnings.simplefilter("ignore")  # stock's, of checkpoints that are overwritten
    for number in numbers:
        wrong = Player(program_of(seed, number), root).play_all()
        if wrong:
            return wrong
    return ""


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(3600)
def test_two_hundred_programs_of_calls_end_in_typed_errors_and_whole_checkpoints(
    tmp_path: Path, seed: int, ranks: StartRanks
) -> None:
    chosen = os.environ.get("DCPX_PROGRAMS")
    numbers = [int(n) for n in chosen.split(",")] if chosen else range(points(200))
    sets: list[tuple[int, list[int]]] = []
    for count in (4, 3, 2):
        own = [number for number in numbers if ranks_of(number) == count]
        sets += [(count, own[at : at + PER_SET]) for at in range(0, len(own), PER_SET)]
    for begin in range(0, len(sets), AT_ONCE):
        calls = []
        for at, (count, some) in enumerate(sets[begin : begin + AT_ONCE], begin):
            root = tmp_path / f"set{at}"
            root.mkdir()
            calls.append(ranks(count, anew=True).start(played, root, seed, some))
        for call in calls:
            assert call.wait(seconds(3500))[0] == ""
