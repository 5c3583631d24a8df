"""Collections are paused for the block that asked for it, and for nobody else."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from torch_dcpx import DcpxReader, DcpxWriter, _gc
from torch_dcpx._gc import PlanningPause, bounded_pause, paused_gc, paused_gc_of_many

pytestmark = pytest.mark.usefixtures("thawed")


def collects() -> bool:
    return gc.isenabled() and gc.get_threshold()[0] != _gc._PAUSED


@contextlib.contextmanager
def paused_by_another_thread() -> Iterator[None]:
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        with paused_gc():
            entered.set()
            leave.wait(seconds(60))

    thread = threading.Thread(target=block)
    thread.start()
    assert entered.wait(seconds(60))
    yield
    leave.set()
    thread.join(seconds(60))


def child_collects(end: Callable[[], object] = lambda: None) -> bool:
    """Forks; returns whether the child collects, pauses for a block, and collects again."""
    child = os.fork()
    if child == 0:
        is_enabled = collects()
        end()
        with paused_gc():
            is_paused = not collects()
        os._exit(3 if is_enabled and is_paused and collects() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_collections_come_back_after_the_last_block_of_all_threads() -> None:
    with paused_by_another_thread():
        with paused_gc():
            pass
        assert not collects()
    assert collects()


def test_child_forked_while_another_thread_pauses_collects() -> None:
    with paused_by_another_thread():
        assert child_collects()
    assert collects()


def test_child_forked_within_a_block_goes_on_with_it() -> None:
    with paused_gc():
        child = os.fork()
        if child == 0:
            before = collects()
    if child == 0:
        os._exit(3 if not before and collects() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def timers() -> list[threading.Thread]:
    """Returns those that are running. One that was called off takes a moment to end."""
    return [
        thread
        for thread in threading.enumerate()
        if isinstance(thread, threading.Timer)
        and thread.name == "dcpx-gc-pause"
        and not thread.finished.is_set()
    ]


def test_planning_pause_lasts_until_its_end_and_leaves_no_thread() -> None:
    pause = PlanningPause()
    pause.begin(_gc._MANY_ITEMS)
    assert not collects()
    (timer,) = timers()
    pause.begin(_gc._MANY_ITEMS)  # as a second save does when the first one was not heard of again
    pause.end()
    pause.end()
    assert collects()
    timer.join(seconds(60))
    for thread in timers():
        thread.join(seconds(60))
    assert not timers()


def test_pause_ends_at_once_with_a_plan_that_cannot_say_when_it_is_gone() -> None:
    pause = PlanningPause()
    pause.begin(_gc._MANY_ITEMS)
    pause.end_with(("a", "plan"))
    assert collects()
    assert not timers()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_was_made_in_a_pause_is_not_walked_when_it_ends_with_its_plan(is_frozen: bool) -> None:
    walked: list[int] = []  # young objects at the start of each collection

    def note(phase: str, _about: object) -> None:
        if phase == "start":
            walked.append(len(gc.get_objects(generation=0)))

    gc.collect()
    if is_frozen:
        gc.freeze()
    try:
        before = gc.get_freeze_count()
        plan, pause = SavePlan([]), PlanningPause()
        pause.begin(100_000)
        made: list[list[int]] = [[] for _ in range(5000)]
        pause.end_with(plan)
        gc.callbacks.append(note)
        del plan
        made += [[] for _ in range(5000)]
        assert collects()
        few = _gc._FEW_FROZEN
        assert (gc.get_freeze_count() > few) == (before > few) == is_frozen
        # Where others froze something nothing is thawed, so what was made is still young.
        assert (max(walked) >= 5000) == is_frozen
    finally:
        gc.callbacks.remove(note)
        gc.unfreeze()


def test_what_was_made_in_a_bounded_pause_is_not_walked_when_it_ends() -> None:
    gc.collect()
    with bounded_pause(_gc._MANY_ITEMS):
        made: list[list[int]] = [[] for _ in range(5000)]
    young = {id(each) for generation in (0, 1) for each in gc.get_objects(generation=generation)}
    assert young.isdisjoint(map(id, made))


def test_bounded_pause_ends_with_its_block_or_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with bounded_pause(_gc._MANY_ITEMS):
        assert not collects()
    assert collects()
    assert not timers()
    monkeypatch.setattr(_gc, "_MAX_PAUSE_S", 0.01)
    with bounded_pause(_gc._MANY_ITEMS):
        for thread in timers():
            thread.join(seconds(60))
        assert collects()
    assert collects()


def test_few_items_are_planned_without_a_pause_or_a_thread() -> None:
    PlanningPause().begin(_gc._MANY_ITEMS - 1)
    assert collects()
    assert not timers()


def test_without_threads_there_is_no_planning_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", no_thread)
    PlanningPause().begin(_gc._MANY_ITEMS)
    assert collects()


def test_child_forked_in_a_planning_pause_collects() -> None:
    pause = PlanningPause()
    pause.begin(_gc._MANY_ITEMS)
    assert child_collects(pause.end)
    pause.end()
    assert collects()


FAILING = {"write_data": "write_files", "finish": "commit"}


class GcPlanner(DefaultSavePlanner):
    """Notes whether collections are on while DCP plans."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.seen: list[bool] = []
        self.fails = fails

    def create_local_plan(self) -> SavePlan:
        self.seen.append(collects())
        if self.fails:
            raise ValueError("no plan")
        return super().create_local_plan()

    def create_global_plan(self, plans: list[SavePlan]) -> Any:
        self.seen.append(collects())
        return super().create_global_plan(plans)

    def finish_plan(self, plan: SavePlan) -> SavePlan:
        self.seen.append(collects())
        return super().finish_plan(plan)


@pytest.mark.parametrize("items", [10, 10_000])
def test_many_items_are_planned_without_collections(
    items: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gc, "_MANY_ITEMS", 100)
    for name in ("_MAX_PAUSE_S", "_KEPT_PLAN_S"):  # a stalled machine must not end the pause here
        monkeypatch.setattr(_gc, name, 600.0)
    planner = GcPlanner()
    state = {"model": {f"w{i}": torch.zeros(1) for i in range(items)}}
    dcp.save(state, storage_writer=DcpxWriter(tmp_path), planner=planner, no_dist=True)
    assert planner.seen == [items < 100] * 3
    assert collects() == (items < 100), "the planner has the plan, which a collection would walk"
    del planner
    assert collects()


def test_plan_that_is_kept_leaves_collections_on_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gc, "_MANY_ITEMS", 1)
    monkeypatch.setattr(_gc, "_KEPT_PLAN_S", 0.01)
    planner = GcPlanner()
    writer = DcpxWriter(tmp_path)
    dcp.save({"w": torch.zeros(1)}, storage_writer=writer, planner=planner, no_dist=True)
    for thread in timers():
        thread.join(seconds(60))
    assert collects()
    assert planner.seen == [False] * 3


@pytest.mark.parametrize("failing", ["write_data", "finish"])
def test_save_that_fails_leaves_collections_on_at_once(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gc, "_MANY_ITEMS", 1)
    planner, seen = GcPlanner(), []

    def fail(*args: Any, **kwargs: Any) -> None:
        seen.append(collects())
        raise ValueError("no save")

    monkeypatch.setattr(f"torch_dcpx.writer.writer.{FAILING[failing]}", fail)
    with pytest.raises(CheckpointException):
        dcp.save(
            {"w": torch.zeros(1)},
            storage_writer=DcpxWriter(tmp_path / "checkpoint"),
            planner=planner,
            no_dist=True,
        )
    assert seen == [False]
    assert collects()


class GcLoadPlanner(DefaultLoadPlanner):
    """Notes whether collections are on while DCP plans, and while a hook of its own runs."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.seen: dict[str, bool] = {}
        self.fails = fails

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self.seen["set_up_planner"] = collects()
        super().set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> LoadPlan:
        self.seen["create_local_plan"] = collects()
        if self.fails:
            raise ValueError("no plan")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self.seen["create_global_plan"] = collects()
        return super().create_global_plan(global_plan)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.seen["commit_tensor"] = collects()


@pytest.mark.parametrize("items", [10, 1000])
def test_many_items_are_planned_for_a_load_without_collections(
    items: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gc, "_MANY_ITEMS", 100)
    state = {"model": {f"w{i}": torch.zeros(1) for i in range(items)}}
    dcp.save(state, storage_writer=DcpxWriter(tmp_path), no_dist=True)
    planner = GcLoadPlanner()
    dcp.load(state, storage_reader=DcpxReader(tmp_path), planner=planner, no_dist=True)
    paused = ("set_up_planner", "create_local_plan")
    assert planner.seen == {
        **dict.fromkeys(paused, items < 100), "create_global_plan": True, "commit_tensor": True
    }  # fmt: skip
    assert collects()
    assert timers() == []


def test_metadata_read_by_anyone_but_dcp_pauses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gc, "_MANY_ITEMS", 1)
    dcp.save({"w": torch.zeros(1)}, storage_writer=DcpxWriter(tmp_path), no_dist=True)
    DcpxReader(tmp_path).read_metadata()
    assert collects()
    assert timers() == []


def test_plan_that_fails_leaves_collections_on_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, writer = {"w": torch.zeros(1)}, DcpxWriter(tmp_path)
    dcp.save(state, storage_writer=writer, no_dist=True)
    monkeypatch.setattr(_gc, "_MANY_ITEMS", 1)
    monkeypatch.setattr(_gc, "_MAX_PAUSE_S", 0.01)
    for fail in (
        lambda: dcp.save(state, storage_writer=writer, planner=GcPlanner(True), no_dist=True),
        lambda: dcp.load(state, storage_reader=DcpxReader(tmp_path), planner=GcLoadPlanner(True),
                         no_dist=True),
    ):  # fmt: skip
        with pytest.raises(CheckpointException):
            fail()
        for thread in timers():
            thread.join(seconds(60))
        assert collects()


def test_objects_of_a_pause_of_many_are_old_when_it_ends() -> None:
    seen: list[str] = []

    def note(phase: str, _: object) -> None:
        seen.append(phase)

    assert collects()
    gc.callbacks.append(note)
    try:
        with paused_gc_of_many():
            kept = [[] for _ in range(50_000)]  # type: ignore[var-annotated]
        kept += [[] for _ in range(100)]
        assert seen == []
    finally:
        gc.callbacks.remove(note)
