"""The process that `dcp.async_save` saves in is killed: the trainer is told, the old or the new
checkpoint is there, and the next save works and cleans up."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from forks import assert_none_bad, counted
from support.call_shim import compiled, preloaded
from support.machine import EVERY_POINT, seconds

WORKER = Path(__file__).with_name("killed_process_worker.py")
# Calls of a save of one rank, and of the coordinator and the other of two (test_lost_at_calls.py).
CALLS = {(1, 0): 24, (2, 0): 26, (2, 1): 10}


def endings(ranks: int, chosen: random.Random) -> list[str]:
    points = [f"{victim}:{call}" for victim in range(ranks) for call in range(CALLS[ranks, victim])]
    if EVERY_POINT:
        return [*points, *(f"{victim}:exit" for victim in range(ranks))]
    if ranks == 1:
        return [chosen.choice(points), "0:exit"]
    return [chosen.choice(points)]


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_process_of_an_async_save_is_told_and_leaves_old_or_new(
    tmp_path: Path, seed: int, ranks: int
) -> None:
    library = compiled(tmp_path)
    cases = endings(ranks, random.Random(seed))
    trainers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(library), str(tmp_path), str(rank), str(ranks),
             *cases],
            env={**preloaded(library), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    limit_s = seconds(2900 if EVERY_POINT else 1150)
    try:
        outputs = [trainer.communicate(timeout=limit_s) for trainer in trainers]
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.wait()
    assert [trainer.returncode for trainer in trainers] == [0] * ranks, outputs
    for output, _ in outputs:
        assert_none_bad(counted(json.loads(output.splitlines()[-1])))
