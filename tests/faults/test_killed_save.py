"""A save that is killed before any of its system calls leaves the old checkpoint or the new one.

A shim in front of libc raises SIGKILL at the n-th call on the checkpoint's tree that changes the
file system: the save's, the commit's, the removal's of what was replaced. One driver process
imports torch once and forks a child for every n; see killed_saves.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import machine
from support.call_shim import compiled, preloaded
from support.machine import EVERY_POINT, seconds


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("shim"))


def points_of(
    library: Path, directory: Path, scenario: str, *, stride: int = 1, seed: int = 0,
    half: bool = False,
) -> list[Any]:  # fmt: skip
    """Runs the driver; returns [n, exit status, state found, data files left] for every point."""
    step = 1 if EVERY_POINT else machine.stride(stride)
    script = Path(__file__).with_name("killed_saves.py")
    arguments = [library, directory, step, seed % step, int(half), scenario]
    result = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env=preloaded(library), capture_output=True, text=True, timeout=seconds(1150), check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    points: list[Any] = json.loads(result.stdout.splitlines()[-1])
    return points


def check(scenario: str, points: list[Any], before: str) -> None:
    """Asserts `before` until some point and new from it on; all points but the last were kills."""
    states = [there for _, _, there, _ in points]
    kills = len(points) - 1
    print(f"{scenario}: {kills} kills, {states.count(before)} {before}, 0 bad; to {points[-1][0]}")
    assert states == [before] * states.count(before) + ["new"] * states.count("new")
    assert states[0] == before
    assert states[-1] == "new"
    assert [status for _, status, _, _ in points] == [9] * kills + [0]


def test_save_killed_at_any_system_call_leaves_old_or_new(
    tmp_path: Path, library: Path, seed: int
) -> None:
    points = points_of(library, tmp_path, "save over ours", seed=seed)
    check("save over ours", points, "old")
    if machine.stride(1) <= 4:  # many calls are made while files of both are there, not all
        assert len(points) > 15 // machine.stride(1)
        assert max(leftovers for *_, leftovers in points) > 1  # some were killed then


@pytest.mark.slow
def test_first_save_killed_at_any_system_call_leaves_nothing_or_new(
    tmp_path: Path, library: Path, seed: int
) -> None:
    check("first save", points_of(library, tmp_path, "first save", seed=seed), "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "before"),
    [
        ("save over stock's", "old"),
        ("a file each", "old"),
        ("buffered", "old"),
        ("dcp.async_save", "old"),
        ("torch_dcpx.async_save", "old"),
        ("first rank-local save", "none"),
        ("rank-local save", "old"),
        ("save over rank-local", "old"),
    ],
)
def test_every_kind_of_save_killed_at_any_system_call_leaves_old_or_new(
    tmp_path: Path, library: Path, seed: int, scenario: str, before: str
) -> None:
    check(scenario, points_of(library, tmp_path, scenario, stride=3, seed=seed), before)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["buffered", "save over stock's"])
def test_save_killed_in_the_middle_of_a_write_leaves_old_or_new(
    tmp_path: Path, library: Path, seed: int, scenario: str
) -> None:
    check(scenario, points_of(library, tmp_path, scenario, seed=seed, half=True), "old")
