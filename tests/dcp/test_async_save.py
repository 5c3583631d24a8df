"""`async_save` in one process: what was there at the call is saved, and no error is lost."""

from __future__ import annotations

import copy
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

import torch_dcpx
from torch_dcpx import (
    ConcurrentSaveError,
    DcpxWriter,
    OptionError,
    StorageError,
    UnsupportedError,
    WriteOptions,
    async_save,
    close,
    pending_saves,
    prewarm,
    save,
)
from torch_dcpx.arena import process_pool

pytestmark = pytest.mark.usefixtures("no_save_is_left")


@pytest.fixture
def no_save_is_left() -> Iterator[None]:
    yield
    pending_saves.wait()


class Gate:
    """Holds every write of a save until it is opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, _done: int, _total: int) -> None:
        self.reached.set()
        assert self._opened.wait(60)

    def open(self) -> None:
        self._opened.set()


def gated(**options: Any) -> tuple[Gate, WriteOptions]:
    gate = Gate()
    return gate, WriteOptions(progress=gate, **options)


def stock_load(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    """Returns what stock's reader finds."""
    target = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for key, value in like.items()
    }
    dcp.load(target, storage_reader=FileSystemReader(path), no_dist=True)
    return target


def assert_saved(path: Path, expected: dict[str, Any]) -> None:
    found = stock_load(path, expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


def state_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.rand(600_000, generator=generator),
        "small": torch.rand(3, 5, generator=generator),
        "view": torch.rand(64, 64, generator=generator).t(),
        "strided": torch.rand(64, 64, generator=generator)[::2, 1::3],
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 3),
        "step": seed,
        "name": f"run {seed}",
        "tags": {seed},
    }


def copy_of(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for key, value in state.items()
    }


def fill(state: dict[str, Any]) -> None:
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.fill_(7)
    state["tags"].add("later")
    state["step"] = -1


def set_other_views(state: dict[str, Any]) -> None:
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.numel():
            storage = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
            storage.fill_(255)


def free_and_reallocate(state: dict[str, Any]) -> None:
    sizes = [v.numel() for v in state.values() if isinstance(v, torch.Tensor)]
    state.clear()
    state["others"] = [torch.full((size,), 3.0) for size in sizes]


def resize_storages(state: dict[str, Any]) -> None:
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.untyped_storage().resize_(0)


MUTATIONS = [fill, set_other_views, free_and_reallocate, resize_storages]


def test_save_is_committed_when_it_returns(tmp_path: Path) -> None:
    state = state_of(1)
    report = save(state, tmp_path)
    assert_saved(tmp_path, state)
    assert (report.checkpoint_id, report.ranks, report.files) == (str(tmp_path), 1, 1)
    assert report.file_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert report.write is not None
    assert report.write.items == len(state)
    assert report.blocked_s == pytest.approx(report.total_s, abs=0.1)


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_what_changes_after_the_call_is_not_saved(
    tmp_path: Path, mutate: Callable[[dict[str, Any]], None]
) -> None:
    state = state_of(2)
    expected = copy_of(state)
    gate, options = gated()
    handle = async_save(state, tmp_path, options=options)
    assert handle.staged.done()
    assert gate.reached.wait(60)
    mutate(state)
    gate.open()
    assert handle.result(60) is not None
    assert_saved(tmp_path, expected)


@pytest.mark.parametrize("budget", [1 << 20, 4 << 20])
def test_state_that_exceeds_the_budget_is_copied_in_waves(
    tmp_path: Path, budget: int, caplog: pytest.LogCaptureFixture
) -> None:
    state = {f"w{i}": torch.rand(100_000) for i in range(30)}
    expected = copy_of(state)
    options = WriteOptions(host_memory_bytes=budget, workers=1, slot_bytes=1 << 18)
    handle = async_save(state, tmp_path, options=options)
    for tensor in state.values():
        tensor.fill_(-1)
    handle.result(60)
    assert_saved(tmp_path, expected)
    assert caplog.text.count("in waves") == 1


def test_bytes_that_a_planner_keeps_are_copied(tmp_path: Path) -> None:
    kept = io.BytesIO()
    torch.save({"epoch": 3}, kept)

    class KeepingPlanner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            return kept

    gate, options = gated()
    handle = async_save({"x": {"no", "plain"}}, tmp_path, planner=KeepingPlanner(), options=options)
    assert gate.reached.wait(60)
    kept.seek(0)
    kept.truncate()
    gate.open()
    handle.result(60)
    found = {"x": None}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert found == {"x": {"epoch": 3}}


def test_handle_tells_how_a_save_ends(tmp_path: Path) -> None:
    gate, options = gated()
    handle = async_save(state_of(1), tmp_path, options=options)
    assert (handle.done(), handle.report(), handle.checkpoint_id) == (False, None, str(tmp_path))
    with pytest.raises(TimeoutError):
        handle.result(0)
    gate.open()
    report = handle.result(60)
    assert report is not None
    assert handle.report() == report
    assert 0 < report.blocked_s < report.total_s


def failing_options(number: int = errno.ENOSPC) -> WriteOptions:
    def fail(_done: int, _total: int) -> None:
        raise StorageError("no room", errno=number, path="here")

    return WriteOptions(progress=fail)


def test_failed_save_leaves_the_previous_checkpoint_and_raises_what_failed(tmp_path: Path) -> None:
    before = state_of(1)
    save(before, tmp_path)
    files = sorted(tmp_path.iterdir())
    handle = async_save(state_of(2), tmp_path, options=failing_options())
    with pytest.raises(StorageError) as caught:
        handle.result(60)
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
    handle = async_save(state_of(1), tmp_path / "a", options=failing_options())
    assert isinstance(handle.durable.exception(60), StorageError)
    saves(state_of(1), tmp_path / "b")
    pending_saves.wait()


def test_wait_raises_what_nobody_asked_for(tmp_path: Path) -> None:
    async_save(state_of(1), tmp_path, options=failing_options())
    with pytest.raises(StorageError, match="no room"):
        pending_saves.wait()
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
    assert isinstance(handle.durable.exception(60), StorageError)


def test_next_save_waits_for_the_one_under_way(tmp_path: Path) -> None:
    gate, options = gated()
    first = async_save(state_of(1), tmp_path, options=options)
    assert gate.reached.wait(60)
    threading.Timer(0.05, gate.open).start()
    second = async_save(state_of(2), tmp_path)
    assert first.done()
    second.result(60)
    assert_saved(tmp_path, state_of(2))


def test_busy_save_is_skipped_where_that_is_asked_for(tmp_path: Path) -> None:
    gate, options = gated()
    first = async_save(state_of(1), tmp_path / "a", options=options)
    second = async_save(state_of(2), tmp_path / "b", options=WriteOptions(on_busy="skip"))
    assert (second.result(0), second.report(), second.done()) == (None, None, True)
    assert not (tmp_path / "b").exists()
    gate.open()
    assert first.result(60) is not None
    assert async_save(state_of(2), tmp_path / "b", options=WriteOptions(on_busy="skip")).result(60)


def test_busy_save_is_refused_where_that_is_asked_for(tmp_path: Path) -> None:
    gate, options = gated()
    async_save(state_of(1), tmp_path / "a", options=options)
    with pytest.raises(ConcurrentSaveError, match="max_in_flight=1"):
        async_save(state_of(2), tmp_path / "b", options=WriteOptions(on_busy="error"))
    gate.open()


def test_several_saves_may_be_in_flight(tmp_path: Path) -> None:
    gates = []
    for number in range(3):
        gate, options = gated(max_in_flight=3)
        gates.append(gate)
        async_save(state_of(number), tmp_path / str(number), options=options)
        assert gate.reached.wait(60)
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
    assert async_save(state_of(1), tmp_path / "b", storage_writer=writer).result(60)


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
    assert gate.reached.wait(60)
    assert handle.cancel()
    gate.open()
    with pytest.raises(torch_dcpx.DcpxError, match="cancel"):
        handle.result(60)
    assert sorted(tmp_path.iterdir()) == files
    assert_saved(tmp_path, before)
    assert not handle.cancel()


def test_save_that_has_ended_cannot_be_cancelled(tmp_path: Path) -> None:
    handle = async_save(state_of(1), tmp_path)
    handle.result(60)
    assert not handle.cancel()
    assert not handle.durable.cancel()


def test_error_while_planning_is_raised_at_the_call(tmp_path: Path) -> None:
    class BadPlanner(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            raise ValueError("no plan")

    for saves in (save, async_save):
        with pytest.raises(ValueError, match="no plan"):
            saves(state_of(1), tmp_path, planner=BadPlanner())
    assert_saved_nothing(tmp_path)
    save(state_of(1), tmp_path)


def test_error_while_staging_is_raised_at_the_call(tmp_path: Path) -> None:
    class BadPlanner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        async_save(state_of(1), tmp_path, planner=BadPlanner())
    assert_saved_nothing(tmp_path)
    save(state_of(1), tmp_path)


def assert_saved_nothing(path: Path) -> None:
    names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    assert names <= {".dcpx.lock"}


def test_arguments_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="checkpoint_id"):
        save({})
    with pytest.raises(UnsupportedError, match="FileSystemWriter"):
        save({}, storage_writer=dcp.FileSystemWriter(tmp_path))
    with pytest.raises(OptionError, match="options"):
        async_save({}, storage_writer=DcpxWriter(tmp_path), options=WriteOptions())


def test_stateful_objects_are_asked(tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return {"n": torch.tensor(5), "asked": self.asked}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

    counter = Counter()
    async_save({"counter": counter}, tmp_path).result(60)
    assert counter.asked == 1
    other = Counter()
    dcp.load({"counter": other}, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert other.loaded == {"n": torch.tensor(5), "asked": 1}


def test_child_of_a_fork_refuses_the_parents_save(tmp_path: Path) -> None:
    gate, options = gated()
    handle = async_save(state_of(1), tmp_path, options=options)
    assert gate.reached.wait(60)
    pid = os.fork()
    if pid == 0:
        refused = 0
        for ask in (handle.result, handle.report, handle.cancel, handle.durable.exception):
            try:
                ask()
            except UnsupportedError:
                refused += 1
        os._exit(refused if pending_saves.count() == 0 else 99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    gate.open()
    handle.result(60)


def test_arena_is_used_again_and_given_back(tmp_path: Path) -> None:
    pool = process_pool()
    close()
    assert pool.count == 0
    state = state_of(1)
    prewarm(state)
    nbytes = pool.nbytes
    assert nbytes >= sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor))
    for number in range(5):
        async_save(state_of(number), tmp_path).result(60)  # new objects each time
        assert (pool.count, pool.nbytes) == (1, nbytes)
    handle = async_save(state_of(1), tmp_path, options=failing_options())
    error = handle.durable.exception(60)
    async_save(state_of(2), tmp_path).result(60)
    assert (pool.count, pool.nbytes) == (1, nbytes), "a kept error holds what was copied"
    assert isinstance(error, StorageError)
    close()
    assert (pool.count, pool.nbytes) == (0, 0)


def test_prewarm_of_what_goes_in_waves_takes_nothing() -> None:
    close()
    options = WriteOptions(host_memory_bytes=1 << 20, workers=1, slot_bytes=1 << 18)
    prewarm({"w": torch.zeros(1 << 20)}, options=options)
    assert process_pool().count == 0


def test_threads_and_descriptors_are_as_before(tmp_path: Path) -> None:
    def now() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    async_save(state_of(0), tmp_path).result(60)
    before = now()
    for number in range(20):
        handle = async_save(state_of(number), tmp_path)
        handle.result(60)
    pending_saves.wait()
    for thread in threading.enumerate():
        if thread.name == "dcpx-save":
            thread.join(60)
    assert now() == before
