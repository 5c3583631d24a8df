"""Two jobs of two ranks each save to one directory at the same time: the old checkpoint or one of
the new ones, whole; a job that is refused is told on every rank who has the lock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forks import TESTS, assert_none_bad, counted
from support.machine import EVERY_POINT, points, seconds

import torch_dcpx

WORKER = Path(__file__).with_name("two_jobs_worker.py")


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(3000)
def test_two_jobs_on_one_directory_leave_one_whole_checkpoint(tmp_path: Path, seed: int) -> None:
    (tmp_path / "flags").mkdir()
    root = Path(torch_dcpx.__file__).parents[1]
    path = f"{TESTS}{os.pathsep}{TESTS / 'faults'}{os.pathsep}{root}"
    # 36 rounds of pairs that save alike, or all 192
    rounds = ["all", "5", "192"] if EVERY_POINT else ["same", "2", str(points(36))]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(tmp_path), job, str(rank), *rounds, str(seed)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for job in "ab" for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [
            rank.communicate(timeout=seconds(2900 if EVERY_POINT else 1150)) for rank in ranks
        ]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * 4, outputs
    rows = counted(json.loads(outputs[0][0].splitlines()[-1]))
    assert_none_bad(rows)
