"""What pauses of the collector do to garbage that others have made just before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.machine import seconds
from torch.distributed.checkpoint.planner import SavePlan

import torch_dcpx
from torch_dcpx._gc import PlanningPause, bounded_pause, paused_gc_of_many

pytestmark = pytest.mark.usefixtures("thawed")


class _Cyclic:
    """Garbage that only a collection finds."""


def garbage() -> list[weakref.ref[_Cyclic]]:
    refs = []
    for _ in range(50):
        one = _Cyclic()
        one.itself = one  # type: ignore[attr-defined]
        refs.append(weakref.ref(one))
    return refs


def alive(refs: list[weakref.ref[_Cyclic]]) -> int:
    return sum(ref() is not None for ref in refs)


@pytest.fixture
def collects_itself() -> Iterator[None]:
    """A program that turns collections off, and collects the young when it likes."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("collects_itself")
def test_garbage_of_a_program_that_collects_itself_stays_young_when_it_saves(
    tmp_path: Path,
) -> None:
    state = {"w": torch.zeros(4)}
    for begin in (torch_dcpx.save, torch_dcpx.async_save):
        refs = garbage()
        others = [[] for _ in range(3000)]  # type: ignore[var-annotated]
        done: Any = begin(state, tmp_path, no_dist=True)
        if begin is torch_dcpx.async_save:
            done.result(seconds(60))
        gc.collect(1)
        assert len(others) == 3000
        assert alive(refs) == 0


def _plan_pause() -> None:
    plan, pause = SavePlan([]), PlanningPause()
    pause.begin(100_000)
    made: list[list[int]] = [[] for _ in range(5000)]
    pause.end_with(plan)
    del plan, made


def _many() -> None:
    with paused_gc_of_many():
        assert [[] for _ in range(5000)]


def _bounded() -> None:
    with bounded_pause(100_000):
        assert [[] for _ in range(5000)]


@pytest.mark.usefixtures("collects_itself")
@pytest.mark.parametrize("pause", [_plan_pause, _many, _bounded])
def test_pauses_make_nothing_old_where_the_program_collects_itself(
    pause: Callable[[], None],
) -> None:
    refs = garbage()
    kept = [[] for _ in range(5000)]  # type: ignore[var-annotated]
    pause()
    gc.collect(1)
    assert len(kept) == 5000
    assert alive(refs) == 0
    assert not gc.isenabled()


def test_block_that_makes_little_makes_nothing_old_whatever_was_made_before() -> None:
    gc.collect()
    before = gc.get_threshold()
    gc.set_threshold(100_000)
    try:
        refs = garbage()
        kept = [[] for _ in range(5000)]  # type: ignore[var-annotated]
        with paused_gc_of_many():
            kept.append([])
        gc.collect(1)
        assert alive(refs) == 0
    finally:
        gc.set_threshold(*before)
