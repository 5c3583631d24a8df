"""Saves in the background of one process: no error is lost, and no more than asked for at once."""

from __future__ import annotations

import errno
import operator
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.async_saves import assert_saved, failing_options, gated, no_save_is_left, state_of
from support.machine import seconds
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torch_dcpx import (
    ConcurrentSaveError,
    DcpxError,
    DcpxWriter,
    StagingError,
    StorageError,
    WriteOptions,
    async_save,
    save,
)
from torch_dcpx.checkpoint import pending as pending_saves
from torch_dcpx.checkpoint.background import BackgroundSave
from torch_dcpx.checkpoint.handle import SaveHandle, WatchedFuture

__all__ = ["no_save_is_left"]
pytestmark = pytest.mark.usefixtures("no_save_is_left")


def test_failed_save_leaves_the_previous_checkpoint_and_raises_what_failed(tmp_path: Path) -> None:
    before = state_of(1)
    save(before, tmp_path)
    files = sorted(tmp_path.iterdir())
    handle = async_save(state_of(2), tmp_path, options=failing_options())
    with pytest.raises(StorageError) as caught:
        handle.result(seconds(60))
    assert (caught.value.errno, caught.value.path) == (errno.ENOSPC, "here")
    assert handle.report() is None
    assert sorted(tmp_path.iterdir()) == files
    assert_saved(tmp_path, before)
    save(before, tmp_path)  # writer, directory and lock are free


def test_error_that_nobody_asked_for_is_raised_once_by_the_next_save(tmp_path: Path) -> None:
    handle = async_save(state_of(1), tmp_path / "a", options=failing_options())
    with pytest.raises(StorageError, match="no room"):
        save(state_of(1), tmp_path / "b")
    assert handle.done()
    assert not (tmp_path / "b").exists()
    save(state_of(1), tmp_path / "b")


@pytest.mark.parametrize("saves", [save, async_save])
def test_error_that_was_asked_for_is_not_raised_again(tmp_path: Path, saves: Any) -> None:
    for name in ("exception", "durable.exception"):
        handle = async_save(state_of(1), tmp_path / "a", options=failing_options())
        assert isinstance(operator.attrgetter(name)(handle)(seconds(60)), StorageError)
        saves(state_of(1), tmp_path / "b")
        pending_saves.wait()


def test_wait_that_ends_too_early_names_what_is_under_way(tmp_path: Path) -> None:
    gate, options = gated()
    async_save(state_of(1), tmp_path, options=options)
    with pytest.raises(TimeoutError, match=str(tmp_path)):
        pending_saves.wait(0)
    gate.open()


def test_end_of_a_with_block_waits_and_raises(tmp_path: Path) -> None:
    with async_save(state_of(1), tmp_path) as handle:
        pass
    assert handle.done()
    with (
        pytest.raises(StorageError, match="no room"),
        async_save(state_of(1), tmp_path, options=failing_options()),
    ):
        pass


def test_error_of_a_with_block_comes_before_that_of_its_save(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError),
        async_save(state_of(1), tmp_path, options=failing_options()) as handle,
    ):
        raise KeyError
    assert isinstance(handle.durable.exception(seconds(60)), StorageError)


def test_next_save_waits_for_the_one_under_way(tmp_path: Path) -> None:
    gate, options = gated()
    first = async_save(state_of(1), tmp_path, options=options)
    assert gate.reached.wait(seconds(60))
    threading.Timer(0.05, gate.open).start()
    second = async_save(state_of(2), tmp_path)
    assert first.done()
    second.result(seconds(60))
    assert_saved(tmp_path, state_of(2))


def test_busy_save_is_skipped_or_refused_where_that_is_asked_for(tmp_path: Path) -> None:
    gate, options = gated()
    first = async_save(state_of(1), tmp_path / "a", options=options)
    second = async_save(state_of(2), tmp_path / "b", options=WriteOptions(on_busy="skip"))
    assert (second.result(0), second.report(), second.done()) == (None, None, True)
    with pytest.raises(ConcurrentSaveError, match="max_in_flight=1"):
        async_save(state_of(2), tmp_path / "b", options=WriteOptions(on_busy="error"))
    assert not (tmp_path / "b").exists()
    gate.open()
    assert first.result(seconds(60)) is not None
    assert async_save(state_of(2), tmp_path / "b", options=WriteOptions(on_busy="skip")).result(
        seconds(60)
    )


def test_several_saves_may_be_in_flight(tmp_path: Path) -> None:
    gates = []
    for number in range(3):
        gate, options = gated(max_in_flight=3)
        gates.append(gate)
        async_save(state_of(number), tmp_path / str(number), options=options)
        assert gate.reached.wait(seconds(60))
    assert pending_saves.count() == 3
    for gate in gates:
        gate.open()
    pending_saves.wait()
    for number in range(3):
        assert_saved(tmp_path / str(number), state_of(number))


def test_writer_of_a_save_under_way_is_in_use(tmp_path: Path) -> None:
    gate, options = gated(max_in_flight=2)
    writer = DcpxWriter(tmp_path / "a", options=options)
    async_save(state_of(1), storage_writer=writer)
    with pytest.raises(ConcurrentSaveError, match="in use"):
        async_save(state_of(1), tmp_path / "b", storage_writer=writer)
    with pytest.raises(ConcurrentSaveError, match="another save is writing"):
        async_save(state_of(1), tmp_path / "a", options=WriteOptions(max_in_flight=2))
    gate.open()
    pending_saves.wait()
    assert async_save(state_of(1), tmp_path / "b", storage_writer=writer).result(seconds(60))


@pytest.mark.parametrize("on_busy", ["wait", "skip"])
def test_writer_serves_one_save_after_the_other(tmp_path: Path, on_busy: Any) -> None:
    gate, options = gated(on_busy=on_busy)
    writer = DcpxWriter(tmp_path / "first", options=options)
    async_save(state_of(1), storage_writer=writer)
    if on_busy == "skip":
        assert async_save(state_of(2), tmp_path / "2", storage_writer=writer).result(0) is None
    gate.open()
    if on_busy == "skip":
        pending_saves.wait()
    async_save(state_of(3), tmp_path / "3", storage_writer=writer)
    pending_saves.wait()
    assert_saved(tmp_path / "first", state_of(1))
    assert_saved(tmp_path / "3", state_of(3))


def test_cancelled_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    before = {"w": torch.rand(1000)}
    save(before, tmp_path)
    files = sorted(tmp_path.iterdir())
    gate, options = gated()
    handle = async_save({"w": torch.rand(1000)}, tmp_path, options=options)
    assert gate.reached.wait(seconds(60))
    assert handle.cancel()
    gate.open()
    with pytest.raises(DcpxError, match="cancel"):
        handle.result(seconds(60))
    assert sorted(tmp_path.iterdir()) == files
    assert_saved(tmp_path, before)
    assert not handle.cancel()


class NoPlan(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        raise ValueError("planner")


class NoData(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        raise ValueError("planner")


@pytest.mark.parametrize(
    ("saves", "planner"), [(save, NoPlan), (async_save, NoPlan), (async_save, NoData)]
)
def test_error_while_planning_or_staging_is_raised_at_the_call(
    tmp_path: Path, saves: Any, planner: type
) -> None:
    with pytest.raises(ValueError, match="planner"):
        saves(state_of(1), tmp_path, planner=planner())
    assert_saved_nothing(tmp_path)
    save(state_of(1), tmp_path)


def assert_saved_nothing(path: Path) -> None:
    names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    assert names <= {".dcpx.lock"}


def test_hook_that_saves_in_the_background_does_not_wait_for_its_own_save(tmp_path: Path) -> None:
    class SavingWriter(DcpxWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            save(state_of(2), tmp_path / "side")
            pending_saves.wait()
            super().finish(metadata, results)

    async_save(state_of(1), storage_writer=SavingWriter(tmp_path / "main")).result(seconds(30))
    assert_saved(tmp_path / "side", state_of(2))


def test_handler_that_drains_while_a_save_copies_waves_sees_its_end(tmp_path: Path) -> None:
    late: list[str] = []

    def drain(_number: int, _frame: object) -> None:
        try:
            pending_saves.wait(seconds(20))
        except TimeoutError as error:
            late.append(str(error))

    def interrupt(done: int, _total: int) -> None:
        if done == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, drain)
    try:
        state = {f"w{i}": torch.rand(100_000) for i in range(30)}
        options = WriteOptions(
            host_memory_bytes=1 << 19, workers=1, slot_bytes=1 << 18, progress=interrupt
        )
        async_save(state, tmp_path, options=options).result(seconds(60))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert late == []


def test_error_of_a_save_that_ends_as_a_wait_for_it_is_interrupted_is_not_lost() -> None:
    future: WatchedFuture[None] = WatchedFuture("/there")

    class InterruptError(Exception):
        pass

    def interrupt(_timeout: float | None = None) -> None:
        future._condition.wait = wait  # type: ignore[method-assign]
        future.set_exception(StorageError("no room"))
        raise InterruptError

    wait = future._condition.wait
    future._condition.wait = interrupt  # type: ignore[method-assign, assignment]
    with pytest.raises(InterruptError):
        future.result(seconds(60))
    assert not future.is_collected
    with pytest.raises(StorageError):
        future.result(0)
    assert future.is_collected


def test_interrupt_while_the_thread_starts_ends_the_save_and_frees_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    writer = DcpxWriter(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            async_save(state_of(1), storage_writer=writer)
    assert pending_saves.count() == 0
    async_save(state_of(2), storage_writer=writer).result(seconds(60))
    assert_saved(tmp_path, state_of(2))


def test_interrupt_once_the_thread_writes_cancels_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, options = gated()

    def interrupted(_background: BackgroundSave) -> None:
        assert gate.reached.wait(seconds(60))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(BackgroundSave, "wait_until_staged", interrupted)
        with pytest.raises(KeyboardInterrupt):
            async_save(state_of(1), tmp_path, options=options)
    gate.open()
    with pytest.raises(DcpxError, match="cancel"):
        pending_saves.wait()
    assert not list(tmp_path.glob("*.distcp"))
    save(state_of(2), tmp_path)


def test_thread_that_cannot_be_had_is_a_staging_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(StagingError, match="can't start new thread"):
            async_save(state_of(1), tmp_path)
    save(state_of(2), tmp_path)
    assert_saved(tmp_path, state_of(2))


@pytest.mark.parametrize("memory_bytes", [None, 1 << 19])  # the second: in waves
def test_error_before_the_thread_has_the_save_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int | None
) -> None:
    def refused(_handle: SaveHandle) -> None:
        raise MemoryError("not one byte")

    state = {f"w{i}": torch.rand(100_000) for i in range(3)}
    options = WriteOptions(host_memory_bytes=memory_bytes, workers=1, slot_bytes=1 << 18)
    with monkeypatch.context() as patched:
        patched.setattr(pending_saves, "set_own", refused)
        handle = async_save(state, tmp_path, options=options)
        with pytest.raises(MemoryError, match="not one byte"):
            handle.result(seconds(60))
    assert pending_saves.count() == 0
    assert_saved_nothing(tmp_path)
    save(state, tmp_path)
    assert_saved(tmp_path, state)
