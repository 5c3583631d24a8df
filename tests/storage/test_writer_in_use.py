"""One save at a time through a writer: a second is refused, and no failed one is in the way."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.saves import assert_whole, load
from support.states import assert_same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.checkpoint.utils import _DistWrapper

from torch_dcpx import ConcurrentSaveError, DcpxWriter


def state_of(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(100, generator=g), "b": torch.randn(9, generator=g), "step": seed}


class MeanwhilePlanner(dcp.DefaultSavePlanner):
    """Calls `work` once, in the middle of `write_data`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work: list[Callable[[], Any]] = [work]

    def resolve_data(self, write_item: Any) -> Any:
        while self._work:
            self._work.pop()()
        return super().resolve_data(write_item)


def save(state: dict[str, Any], writer: DcpxWriter, **kwargs: Any) -> None:
    dcp.save(state, storage_writer=writer, no_dist=True, **kwargs)


@pytest.fixture
def other_thread() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Runs work in one other thread, which lives on until the test ends."""
    with ThreadPoolExecutor(1) as pool:

        def run(work: Callable[[], Any]) -> Any:
            try:
                return pool.submit(work).result(seconds(60))
            except CheckpointException as failure:
                return failure.failures[0][0]
            except ConcurrentSaveError as error:
                return error

        yield run


def assert_in_use(error: Any, path: Path) -> None:
    assert type(error) is ConcurrentSaveError, repr(error)
    assert str(error).startswith("writer in use")
    assert error.path == str(path)
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.owner, copied.path, copied.errno) == (error.owner, error.path, error.errno)


# ---- Refused while a save is under way ----------------------------------------------------------


@pytest.mark.usefixtures("no_leaks")
def test_call_from_another_thread_meanwhile_is_refused_and_changes_nothing(
    tmp_path: Path, other_thread: Callable[..., Any]
) -> None:
    writer = DcpxWriter(tmp_path / "a")
    calls: list[Callable[[], Any]] = [
        lambda: save(state_of(9), writer),
        lambda: save(state_of(9), writer, checkpoint_id=tmp_path / "b"),
        writer.reset,
        lambda: writer.reset(tmp_path / "b"),
        lambda: writer.stage(state_of(9)),
    ]
    errors: list[Any] = []
    planner = MeanwhilePlanner(lambda: errors.extend(map(other_thread, calls)))
    save(state_of(1), writer, planner=planner)
    for error in errors:
        assert_in_use(error, tmp_path / "a")
    assert len(errors) == len(calls)
    assert_whole(state_of(1), tmp_path / "a")
    assert not (tmp_path / "b").exists()
    for call in calls:  # now it is free
        call()


def test_save_within_a_save_of_the_same_thread_is_refused(tmp_path: Path) -> None:
    writer, other = DcpxWriter(tmp_path / "a"), DcpxWriter(tmp_path / "a")
    errors: list[Any] = []

    def recurse() -> None:
        for again in (writer, other):
            with pytest.raises(CheckpointException) as caught:
                save(state_of(9), again)
            errors.append(caught.value.failures[0][0])

    save(state_of(1), writer, planner=MeanwhilePlanner(recurse))
    assert_in_use(errors[0], tmp_path / "a")
    assert type(errors[1]) is ConcurrentSaveError  # the directory's lock
    assert_whole(state_of(1), tmp_path / "a")
    save(state_of(2), other)
    assert_whole(state_of(2), tmp_path / "a")


def test_two_threads_that_aim_one_writer_at_two_ids_never_mix_them(
    tmp_path: Path, other_thread: Callable[..., Any]
) -> None:
    writer = DcpxWriter(tmp_path)

    class InterruptedPlanner(dcp.DefaultSavePlanner):
        """Is set up between `reset` and `set_up_storage_writer`."""

        def set_up_planner(
            self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
        ) -> None:
            assert other_thread(lambda: writer.reset(tmp_path / "b")) is None
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    with pytest.raises(CheckpointException) as caught:
        save(state_of(1), writer, checkpoint_id=tmp_path / "a", planner=InterruptedPlanner())
    assert_in_use(caught.value.failures[0][0], tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    assert other_thread(lambda: save(state_of(2), writer)) is None
    assert_whole(state_of(2), tmp_path / "b")
    save(state_of(3), writer, checkpoint_id=tmp_path / "a")
    assert_whole(state_of(3), tmp_path / "a")


# ---- Free after a failure -----------------------------------------------------------------------


@pytest.fixture
def failed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Saves and returns the error that DCP raises when another rank's write fails."""

    def fail(self: Any, step: str, map_fun: Callable[[], Any], reduce_fun: Any) -> Any:
        map_fun()
        raise CheckpointException(step, {1: (OSError(28, "No space left on device"), None)})  # type: ignore[dict-item]

    def run(state: dict[str, Any], writer: DcpxWriter) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(_DistWrapper, "all_reduce", fail)
            try:
                save(state, writer)
            except CheckpointException as failure:
                return failure  # with its traceback, which keeps the frames of the save
        return None

    return run


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("through", ["the same writer", "another writer"])
def test_save_that_failed_on_another_rank_is_not_in_the_way(
    tmp_path: Path,
    failed_elsewhere: Callable[..., Any],
    other_thread: Callable[..., Any],
    through: str,
) -> None:
    writer = DcpxWriter(tmp_path)
    following = writer if through == "the same writer" else DcpxWriter(tmp_path)
    for run in (other_thread, lambda call: call()):
        failure = other_thread(lambda: failed_elsewhere(state_of(1), writer))
        assert list(failure.failures) == [1]
        assert not (tmp_path / ".metadata").exists()
        assert run(lambda: save(state_of(2), following)) is None
        assert_whole(state_of(2), tmp_path)
        (tmp_path / ".metadata").unlink()


class Delegating(StorageWriter):
    """What logs or times a writer's calls looks like this."""

    def __init__(self, writer: DcpxWriter) -> None:
        self._writer = writer
        for name in ("reset", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan",
                     "write_data", "finish", "storage_meta"):  # fmt: skip
            setattr(self, name, getattr(writer, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


Delegating.__abstractmethods__ = frozenset()


def test_failed_save_through_a_delegating_writer_is_not_in_the_way(
    tmp_path: Path, failed_elsewhere: Callable[..., Any], other_thread: Callable[..., Any]
) -> None:
    writer = DcpxWriter(tmp_path)
    failure = other_thread(lambda: failed_elsewhere(state_of(1), Delegating(writer)))
    assert list(failure.failures) == [1]
    save(state_of(2), writer)
    assert_whole(state_of(2), tmp_path)
    errors: list[Any] = []
    planner = MeanwhilePlanner(
        lambda: errors.append(other_thread(lambda: save(state_of(9), writer)))
    )
    dcp.save(state_of(3), storage_writer=Delegating(writer), planner=planner, no_dist=True)
    assert_in_use(errors[0], tmp_path)
    assert_whole(state_of(3), tmp_path)


def test_reset_lets_no_save_begin_while_it_gives_back_the_last_ones_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_thread: Callable[..., Any]
) -> None:
    """Else it would give back the locks of a save that began in between."""
    writer = DcpxWriter(tmp_path)
    is_free: list[bool] = []
    release = DcpxWriter._DcpxWriter__release

    def look(self: DcpxWriter, **kwargs: Any) -> None:
        is_free.append(
            other_thread(lambda: self._DcpxWriter__use._guard._lock.acquire(blocking=False))
        )
        release(self, **kwargs)

    monkeypatch.setattr(DcpxWriter, "_DcpxWriter__release", look)
    writer.reset(tmp_path / "b")
    writer.reset()
    writer.set_up_storage_writer(True)
    assert is_free == [False] * 3


def test_save_whose_hooks_are_called_by_hand_is_over_when_its_thread_goes_on(
    tmp_path: Path, other_thread: Callable[..., Any]
) -> None:
    writer = DcpxWriter(tmp_path)

    def begin() -> None:
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
        writer.prepare_local_plan(SavePlan([]))

    assert other_thread(begin) is None
    with pytest.raises(ConcurrentSaveError) as caught:
        writer.reset()
    assert_in_use(caught.value, tmp_path)
    assert other_thread(begin) is None
    assert other_thread(lambda: save(state_of(3), writer)) is None
    writer.reset()
    assert_same(state_of(3), load(state_of(3), tmp_path))


# ---- What belongs to whom -----------------------------------------------------------------------


def test_copies_made_in_the_middle_of_a_save_are_free(tmp_path: Path) -> None:
    writer = DcpxWriter(tmp_path / "a")
    copies: list[DcpxWriter] = []

    def copy_it() -> None:
        copies.extend([copy.deepcopy(writer), pickle.loads(pickle.dumps(writer))])

    save(state_of(1), writer, planner=MeanwhilePlanner(copy_it))
    for number, copied in enumerate(copies):
        save(state_of(2), copied, checkpoint_id=tmp_path / f"copy{number}")
        assert_whole(state_of(2), tmp_path / f"copy{number}")


def test_forked_child_is_not_in_its_parents_save(tmp_path: Path) -> None:
    writer = DcpxWriter(tmp_path)
    seen: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            try:
                writer.reset(tmp_path / "b")
                os._exit(7)
            finally:
                os._exit(1)
        seen.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    save(state_of(1), writer, planner=MeanwhilePlanner(fork))
    assert seen == [7]
    assert_whole(state_of(1), tmp_path)


def test_half_a_stack_is_no_sign_that_a_save_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator that is left while the stack is looked at shows no caller any more."""
    writer = DcpxWriter(tmp_path)
    left = (number for number in range(3))
    next(left)
    halves = [{threading.get_ident(): left.gi_frame}] * 5
    real = sys._current_frames
    seen: list[bool] = []
    running: list[Any] = []

    def look() -> None:
        running.append(writer._DcpxWriter__save)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "_current_frames", lambda: halves.pop() if halves else real())
            seen.append(running[0].is_under_way())

    save(state_of(1), writer, planner=MeanwhilePlanner(look))
    assert seen == [True]
    assert halves == []
    assert not running[0].is_under_way()


# ---- Staging ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_cached", [False, True])
def test_staging_never_overwrites_what_a_save_still_reads(tmp_path: Path, is_cached: bool) -> None:
    writer = DcpxWriter(tmp_path, cache_staged_state_dict=is_cached)
    first = writer.stage(state_of(1))
    second = writer.stage(state_of(2))
    assert_same(state_of(1), dict(first))
    assert_same(state_of(2), dict(second))
    addresses = {first["a"].data_ptr(), second["a"].data_ptr()}
    del first, second
    assert DcpxWriter(tmp_path).stage(state_of(3))["a"].data_ptr() in addresses
