"""Every system call of a save and of a load fails once: Python's and C++'s, from outside.

A shim in front of libc fails the n-th call on the checkpoint's tree, for each n and each of nine
errors. Afterwards: a typed error on every rank, or the right result; the previous checkpoint bit
for bit by our reader and stock's; nothing half visible, nothing left, and the next save works.

A run tries a sample by its seed; DCPX_EVERY_POINT=1 tries every point.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from call_sweep import KINDS
from failed_calls import LOADS, RANK_LOADS, RANK_SAVES, Point, Sweep
from forks import run_alone
from support import machine
from support.call_shim import Shim, compiled
from support.machine import EVERY_POINT, seconds
from support.rank_fixture import StartRanks

TIMEOUT_S = 3000 if EVERY_POINT else 1150
BACKGROUND = [name for name in KINDS if "async" in name]
RANK_LOCAL = ["rank-local save", "first rank-local save"]
FOREGROUND = [name for name in KINDS if name not in (*BACKGROUND, *RANK_LOCAL)]
Found = dict[str, list[Point]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("shim"))


def sweeps(library: Path, root: Path, names: list[str], stride: int, seed: int) -> Found:
    """Returns what each of the sweeps found."""
    step = 1 if EVERY_POINT else machine.stride(stride)
    found = {}
    for name in names:
        tree = root.resolve() / name.replace(" ", "_")
        found[name] = Sweep(Shim(library), tree, name).run(step, seed % step)
    return found


def check(found: Found) -> None:
    """Prints a line for each scenario, and fails if a point is bad, or none was met."""
    for name, points in found.items():
        print(name, len(points), Counter(point.outcome[:5] for point in points))
        assert [point for point in points if point.outcome.startswith("bad")] == [], name
        assert {point.outcome for point in points} & {"old", "none", "raised"}, name
        assert {point.outcome for point in points} & {"new", "right"}, name


@pytest.mark.slow
@pytest.mark.timeout(seconds(TIMEOUT_S) + 20)
@pytest.mark.parametrize(
    ("names", "stride"),
    [
        pytest.param(FOREGROUND, 48, id="saves"),
        pytest.param(BACKGROUND, 48, id="background saves"),
        pytest.param(RANK_LOCAL, 48, id="rank-local saves"),
        pytest.param(list(LOADS), 16, id="loads"),
    ],
)
def test_every_call_failing_leaves_a_typed_error_or_the_right_result(
    tmp_path: Path, library: Path, seed: int, names: list[str], stride: int
) -> None:
    arguments = library, tmp_path, names, stride, seed
    check(run_alone(sweeps, *arguments, library=library, deadline_s=TIMEOUT_S))


@pytest.mark.slow
@pytest.mark.timeout(seconds(TIMEOUT_S) + 20)
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("names", "stride"),
    [
        pytest.param(list(RANK_SAVES), 40, id="saves"),
        pytest.param(list(RANK_LOADS), 24, id="loads"),
    ],
)
def test_every_call_failing_on_either_of_two_ranks_raises_on_both(
    tmp_path: Path, library: Path, seed: int, ranks: StartRanks, names: list[str], stride: int
) -> None:
    call = ranks(2, library=library).start(sweeps, library, tmp_path, names, stride, seed)
    check(call.wait(seconds(TIMEOUT_S))[0])
