"""A save that is killed before any of its system calls leaves the old checkpoint or the new one.

A shim in front of libc raises SIGKILL at the n-th call on the checkpoint's tree that changes the
file system: the save's, the commit's, the removal's of what was replaced. One process imports torch
once and forks a child for every n.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from call_sweep import (
    KINDS,
    MOST_CALLS,
    assert_next_save_works,
    new_arena,
    state_of,
    state_there,
)
from forks import in_child, run_alone
from support import machine
from support.call_shim import Action, Kind, Shim, compiled
from support.machine import EVERY_POINT
from support.saves import data_files, save

OLD, NEW, NEXT = (state_of(seed) for seed in range(3))


class Point(NamedTuple):
    nth: int
    code: int
    there: str
    leftovers: int  # data files


def points_of(
    library: Path, tree: Path, name: str, stride: int, offset: int, is_half: bool
) -> list[Point]:
    """Kills a child at each call, looks at what it left, and saves again; the last is not killed.

    Args:
        is_half: in the middle of writes.
    """
    kind, shim = KINDS[name], Shim(library)
    shim.watch(tree)
    save(OLD, tree / "warm")  # imports what is imported late, before the first child
    action, counted = (Action.HALF_KILL, Kind.WRITES) if is_half else (Action.KILL, Kind.CHANGES)
    points: list[Point] = []
    for nth in (0, *range(offset or stride, MOST_CALLS, stride)):
        directory = tree / str(nth)
        if kind.before is not None:
            kind.before(OLD, directory)

        def body(nth: int = nth, directory: Path = directory) -> None:
            new_arena()
            shim.arm(nth, action, 0, counted)
            kind.save(NEW, directory)

        ended = in_child(body)
        assert ended.code or "value" in ended.said, ended
        states = {"old": OLD, "new": NEW}
        is_local = not (directory / ".metadata").exists() and "rank-local" in name
        there = state_there(directory, states, is_local=is_local)
        leftovers = len(data_files(directory)) if directory.exists() else 0
        assert_next_save_works(NEXT, directory, is_local=kind.is_local)
        shutil.rmtree(directory)
        points.append(Point(nth, ended.code, there, leftovers))
        if ended.code == 0:
            break
    return points


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("shim"))


def checked(
    library: Path, tmp_path: Path, name: str, before: str, seed: int,
    *, stride: int = 1, is_half: bool = False,
) -> list[Point]:  # fmt: skip
    """Asserts `before` until some point and new from it on; all points but the last were kills."""
    step = 1 if EVERY_POINT else machine.stride(stride)
    arguments = library, tmp_path.resolve(), name, step, seed % step, is_half
    points: list[Point] = run_alone(points_of, *arguments, library=library)
    states = [point.there for point in points]
    print(f"{name}: {len(points) - 1} kills, {states.count(before)} {before}; to {points[-1].nth}")
    assert states == [before] * states.count(before) + ["new"] * states.count("new")
    assert states[0] == before
    assert states[-1] == "new"
    assert [point.code for point in points] == [-signal.SIGKILL] * (len(points) - 1) + [0]
    return points


def test_save_killed_at_any_system_call_leaves_old_or_new(
    tmp_path: Path, library: Path, seed: int
) -> None:
    points = checked(library, tmp_path, "save over ours", "old", seed, stride=3)
    if machine.stride(3) <= 6:  # many calls are made while files of both are there, not all
        assert max(point.leftovers for point in points) > 1  # some were killed then


@pytest.mark.slow
def test_first_save_killed_at_any_system_call_leaves_nothing_or_new(
    tmp_path: Path, library: Path, seed: int
) -> None:
    checked(library, tmp_path, "first save", "none", seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "before"),
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
    tmp_path: Path, library: Path, seed: int, name: str, before: str
) -> None:
    checked(library, tmp_path, name, before, seed, stride=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["buffered", "save over stock's"])
def test_save_killed_in_the_middle_of_a_write_leaves_old_or_new(
    tmp_path: Path, library: Path, seed: int, name: str
) -> None:
    checked(library, tmp_path, name, "old", seed, is_half=True)
