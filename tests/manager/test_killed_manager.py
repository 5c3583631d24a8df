"""A training killed anywhere resumes from the newest whole checkpoint, and what is kept stays so.

DCPX_MANAGER_KILLS=all kills before every call of saves and retention, and 200 times in a loop;
else every 17th call and 20 times.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.call_shim import compiled, preloaded
from support.machine import points, stride

DRIVER = Path(__file__).with_name("kill_driver.py")
IS_WHOLE = os.environ.get("DCPX_MANAGER_KILLS") == "all"
TIMEOUT_S = 3000 if IS_WHOLE else 1150
pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A root in memory where there is one: a killed process needs no disk, and fsync takes long."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 64 << 20:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="dcpx-test-") as path:
        yield Path(path)


def rows_of(shim: Path, root: Path, *args: object) -> list[Any]:
    result = subprocess.run(
        [sys.executable, str(DRIVER), str(shim), str(root), *map(str, args)],
        env=preloaded(shim), capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    rows: list[Any] = json.loads(result.stdout.splitlines()[-1])
    return rows


@pytest.mark.slow
def test_killed_at_any_call_of_saves_and_retention_resumes_the_newest_whole(
    root: Path, shim: Path, seed: int
) -> None:
    step = 1 if IS_WHOLE else stride(17) | 1  # odd: saves of both kinds are killed
    begin = random.Random(seed).randrange(step)
    rows = rows_of(shim, root, "sweep", begin, step, 0)
    assert rows[-1][1] == 0 and len(rows) > 200 // step
    steps = [row[2] for row in rows]
    assert (steps[0], steps[-1]) == (3, 6)
    counts = [len(row[3]) for row in rows]
    print(f"{len(rows) - 1} kills to call {rows[-1][0]}; whole: {min(counts)} to {max(counts)}")


@pytest.mark.slow
def test_killed_again_and_again_loses_nothing(root: Path, shim: Path, seed: int) -> None:
    count = 200 if IS_WHOLE else max(4, points(20))
    rows = rows_of(shim, root, "loop", seed, 1, count)
    kills = sum(row[1] != 0 for row in rows)
    counts = [len(row[3]) for row in rows]
    print(f"{kills} kills of {len(rows)} runs, to step {rows[-1][2]}; whole: up to {max(counts)}")
    assert kills >= count // 2
