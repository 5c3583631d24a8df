"""What a program does to the collector while a pause is on stays; and nobody pauses behind it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import torch_dcpx
from torch_dcpx import DcpxWriter, _gc
from torch_dcpx._gc import PlanningPause, bounded_pause, paused_gc, paused_gc_of_many
from torch_dcpx.writer import files

pytestmark = pytest.mark.usefixtures("thawed")

OWN = (701, 11, 12)  # thresholds of the program
PAUSES: list[Callable[[], Any]] = [paused_gc, paused_gc_of_many, lambda: bounded_pause(100_000)]


@pytest.fixture(autouse=True)
def own_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*OWN)
    yield
    gc.enable()
    gc.set_threshold(*before)


def collects() -> bool:
    return gc.isenabled() and gc.get_threshold() == OWN


class OwnPlanner(DefaultSavePlanner):
    """Calls something while it plans."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = call

    def create_local_plan(self) -> SavePlan:
        self.call()
        return super().create_local_plan()


@pytest.mark.parametrize("pause", PAUSES)
def test_thresholds_of_the_program_come_back(pause: Callable[[], Any]) -> None:
    with pause():
        assert not collects()
        with pause():
            assert not collects()
        assert not collects()
    assert collects()


@pytest.mark.parametrize("pause", PAUSES)
def test_program_that_switches_collections_off_in_a_pause_has_them_off(
    pause: Callable[[], Any],
) -> None:
    with pause():
        gc.disable()
    assert not gc.isenabled() and gc.get_threshold() == OWN
    with pause():
        gc.enable()
    assert collects()


@pytest.mark.parametrize("pause", PAUSES)
def test_thresholds_that_the_program_sets_in_a_pause_stay(pause: Callable[[], Any]) -> None:
    for own in ((5000, 3, 4), (0, 11, 12)):
        with pause():
            gc.set_threshold(*own)
            with pause():
                assert gc.get_threshold() == own
        assert gc.get_threshold() == own


def test_pause_of_a_plan_leaves_what_the_program_does_meanwhile() -> None:
    plan, pause = SavePlan([]), PlanningPause()
    pause.begin(100_000)
    pause.end_with(plan)
    gc.disable()
    del plan
    assert not gc.isenabled() and gc.get_threshold() == OWN


@pytest.mark.parametrize("save", [torch_dcpx.save, torch_dcpx.async_save, dcp.save])
def test_switch_that_a_planner_sets_is_as_it_set_it(
    save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gc, "_MANY_ITEMS", 1)
    writer = DcpxWriter(tmp_path)
    planner = OwnPlanner(gc.disable)
    saved = save({"w": torch.zeros(3)}, storage_writer=writer, planner=planner, no_dist=True)
    if save is torch_dcpx.async_save:
        saved.result(seconds(60))
    del planner, saved
    assert not gc.isenabled() and gc.get_threshold() == OWN


def test_thread_of_async_save_pauses_nothing_and_undoes_no_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, goes_on, seen = threading.Event(), threading.Event(), []
    results = files.write_results

    def held(*args: Any) -> Any:  # called within a pause
        seen.append((threading.current_thread().name, collects()))
        inside.set()
        assert goes_on.wait(seconds(60))
        return results(*args)

    monkeypatch.setattr(files, "write_results", held)
    handle = torch_dcpx.async_save({"w": torch.zeros(3)}, tmp_path, no_dist=True)
    assert inside.wait(seconds(60))
    gc.disable()
    goes_on.set()
    handle.result(seconds(60))
    assert seen == [("dcpx-save", True)]
    assert not gc.isenabled() and gc.get_threshold() == OWN


def test_thread_of_stocks_async_save_pauses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gc, "_MANY_ITEMS", 1)
    seen: list[bool] = []
    saved: Any = dcp.async_save(
        {"w": torch.zeros(3)},
        storage_writer=DcpxWriter(tmp_path),
        planner=OwnPlanner(lambda: seen.append(collects())),
        no_dist=True,
    )
    saved.result(seconds(60))
    assert seen == [True] and collects()


# ---- Garbage that others have made just before ---------------------------------------------------


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
