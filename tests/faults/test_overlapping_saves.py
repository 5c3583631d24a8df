"""A second save begins while a first one of the process plans, writes, commits, or is about to
fail: it waits, is skipped, or is refused, as asked for; what each of them saves is whole."""

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

WORKER = Path(__file__).with_name("overlaps_worker.py")


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("ranks", [1, 2])
def test_second_save_waits_is_skipped_or_refused_and_both_are_whole(
    tmp_path: Path, seed: int, ranks: int
) -> None:
    root = Path(torch_dcpx.__file__).parents[1]
    path = os.pathsep.join(map(str, (TESTS, TESTS / "faults", root)))
    sample = [str(0 if EVERY_POINT else points(16)), str(seed)]
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(tmp_path), str(rank), str(ranks), *sample],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        outputs = [worker.communicate(timeout=seconds(1150)) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0] * ranks, outputs
    for output, _ in outputs:
        assert_none_bad(counted(json.loads(output.splitlines()[-1])))
