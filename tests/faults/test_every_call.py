"""Every system call of a save and of a load fails once: Python's and C++'s, from outside.

A shim in front of libc fails the n-th call on the checkpoint's tree, for each n and each of nine
errors. Afterwards: a typed error on every rank, or the right result; the previous checkpoint bit
for bit by our reader and stock's; nothing half visible, nothing left, and the next save works.

A run tries a sample by its seed; DCPX_EVERY_POINT=1 tries every point.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import call_sweep_driver
import call_sweep_ranks
import pytest
from call_sweep import Point, table
from support import machine
from support.call_shim import compiled, preloaded
from support.machine import EVERY_POINT, seconds

TIMEOUT_S = seconds(3000 if EVERY_POINT else 1150)
SAVES = list(call_sweep_driver.SAVES)
BACKGROUND = [name for name in SAVES if "async" in name]
RANK_LOCAL = [name for name in SAVES if "rank-local" in name]
FOREGROUND = [name for name in SAVES if name not in (*BACKGROUND, *RANK_LOCAL)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("shim"))


def arguments(script: str, library: Path, root: Path, stride: int, seed: int) -> list[str]:
    path = Path(__file__).with_name(script)
    step = 1 if EVERY_POINT else machine.stride(stride)
    return [sys.executable, str(path), str(library), str(root), str(step), str(seed % step)]


def check(output: str, names: list[str]) -> None:
    """Prints a line for each scenario, and fails if a point is bad or a scenario is missing."""
    found = {}
    for line in output.splitlines():
        name, points = json.loads(line)
        found[name] = [Point(*point) for point in points]
        print(table(name, found[name]))
    bad = [(name, p) for name in found for p in found[name] if p.outcome.startswith("bad")]
    assert not bad, "\n\n".join(f"{name}: {p.code} at {p.call} ({p.nth}): {p.outcome}"
                                for name, p in bad[:5])  # fmt: skip
    assert list(found) == names
    for name in names:
        assert {point.outcome for point in found[name]} & {"old", "none", "raised"}, name
        assert {point.outcome for point in found[name]} & {"new", "right"}, name


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize(
    ("names", "stride"),
    [
        pytest.param(FOREGROUND, 32, id="saves"),
        pytest.param(BACKGROUND, 32, id="background saves"),
        pytest.param(RANK_LOCAL, 32, id="rank-local saves"),
        pytest.param(list(call_sweep_driver.LOADS), 8, id="loads"),
    ],
)
def test_every_call_failing_leaves_a_typed_error_or_the_right_result(
    tmp_path: Path, library: Path, seed: int, names: list[str], stride: int
) -> None:
    result = subprocess.run(
        [*arguments("call_sweep_driver.py", library, tmp_path, stride, seed), *names],
        env=preloaded(library), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr}"
    check(result.stdout, names)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("names", "stride"),
    [
        pytest.param(list(call_sweep_ranks.SAVES), 24, id="saves"),
        pytest.param(list(call_sweep_ranks.LOADS), 16, id="loads"),
    ],
)
def test_every_call_failing_on_either_of_two_ranks_raises_on_both(
    tmp_path: Path, library: Path, seed: int, names: list[str], stride: int
) -> None:
    command = [*arguments("call_sweep_ranks.py", library, tmp_path, stride, seed), *names]
    ranks = [
        subprocess.Popen(
            command, env={**preloaded(library), "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(call_sweep_ranks.RANKS)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs
    check(outputs[0][0], names)
