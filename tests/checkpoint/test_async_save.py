"""`async_save` in one process: what was there at the call is saved, whatever happens to it."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.async_saves import (
    assert_saved,
    copy_of,
    failing_options,
    gated,
    no_save_is_left,
    state_of,
)
from support.machine import seconds
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from torch_dcpx import (
    DcpxWriter,
    OptionError,
    SaveHandle,
    StorageError,
    UnsupportedError,
    WriteOptions,
    async_save,
    close,
    prewarm,
    save,
)
from torch_dcpx.checkpoint import pending as pending_saves
from torch_dcpx.checkpoint import save as save_checkpoint
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.staging.arena import process_pool

__all__ = ["no_save_is_left"]
pytestmark = pytest.mark.usefixtures("no_save_is_left")


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
    with save(state, tmp_path) as handle:
        assert_saved(tmp_path, state)
        assert type(handle) is SaveHandle
        assert handle.done() and handle.staged.done() and handle.guard.is_finished
    assert (handle.cancel(), handle.durable.cancel(), handle.exception(0)) == (False, False, None)
    handle.guard.wait()
    report = handle.result(0)
    assert report is not None and handle.report() is report
    assert report.checkpoint_id == handle.checkpoint_id
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
    assert gate.reached.wait(seconds(60))
    mutate(state)
    gate.open()
    assert handle.result(seconds(60)) is not None
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
    handle.result(seconds(60))
    assert_saved(tmp_path, expected)
    assert caplog.text.count("in waves") == 1


def test_copies_have_the_signs_that_bits_of_a_view_give(tmp_path: Path) -> None:
    numbers = torch.tensor([1 + 2j, -3j])
    state = {"conj": numbers.conj(), "neg": numbers.conj().imag, "both": numbers.conj().imag.neg()}
    assert state["neg"].is_neg() and state["conj"].is_conj()
    async_save(dict(state), tmp_path, no_dist=True).result(seconds(60))
    target = {"conj": torch.zeros(2, dtype=torch.complex64), "neg": torch.ones(2)}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert target["conj"].tolist() == [1 - 2j, 3j]
    assert target["neg"].tolist() == [-2.0, 3.0]


def test_bytes_that_a_planner_keeps_are_copied(tmp_path: Path) -> None:
    kept = io.BytesIO()
    torch.save({"epoch": 3}, kept)

    class KeepingPlanner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            return kept

    gate, options = gated()
    handle = async_save({"x": {"no", "plain"}}, tmp_path, planner=KeepingPlanner(), options=options)
    assert gate.reached.wait(seconds(60))
    kept.seek(0)
    kept.truncate()
    gate.open()
    handle.result(seconds(60))
    found = {"x": None}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert found == {"x": {"epoch": 3}}


def test_handle_tells_how_a_save_ends(tmp_path: Path) -> None:
    gate, options = gated()
    handle = async_save(state_of(1), tmp_path, options=options)
    assert (handle.done(), handle.report(), handle.checkpoint_id) == (False, None, str(tmp_path))
    for ask in (handle.result, handle.exception):
        with pytest.raises(TimeoutError):
            ask(0)
    gate.open()
    report = handle.result(seconds(60))
    assert report is not None
    assert handle.report() == report
    assert 0 < report.blocked_s < report.total_s


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
    async_save({"counter": counter}, tmp_path).result(seconds(60))
    assert counter.asked == 1
    other = Counter()
    dcp.load({"counter": other}, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert other.loaded == {"n": torch.tensor(5), "asked": 1}


def test_child_of_a_fork_refuses_the_parents_save(tmp_path: Path) -> None:
    gate, options = gated()
    handle = async_save(state_of(1), tmp_path, options=options)
    assert gate.reached.wait(seconds(60))

    async def ended() -> Any:
        return await handle

    pid = os.fork()
    if pid == 0:
        refused = 0
        asks: list[Callable[[], Any]] = [
            handle.result, handle.report, handle.cancel, handle.durable.exception,
            handle.exception, lambda: handle.add_done_callback(print), lambda: asyncio.run(ended()),
        ]  # fmt: skip
        for ask in asks:
            try:
                ask()
            except UnsupportedError:
                refused += 1
        os._exit(refused if pending_saves.count() == 0 else 99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    gate.open()
    handle.result(seconds(60))


def test_arena_is_used_again_and_given_back(tmp_path: Path) -> None:
    pool = process_pool()
    close()
    assert pool.count == 0
    state = state_of(1)
    prewarm(state)
    nbytes = pool.nbytes
    assert nbytes >= sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor))
    for number in range(5):
        async_save(state_of(number), tmp_path).result(seconds(60))  # new objects each time
        assert (pool.count, pool.nbytes) == (1, nbytes)
    handle = async_save(state_of(1), tmp_path, options=failing_options())
    error = handle.durable.exception(seconds(60))
    async_save(state_of(2), tmp_path).result(seconds(60))
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

    async_save(state_of(0), tmp_path).result(seconds(60))
    before = now()
    for number in range(8):
        handle = async_save(state_of(number), tmp_path)
        handle.result(seconds(60))
    pending_saves.wait()
    for thread in threading.enumerate():
        if thread.name == "dcpx-save":
            thread.join(seconds(60))
    assert now() == before


@pytest.mark.slow
def test_small_tensors_that_an_arena_pads_beyond_the_budget_go_in_waves(tmp_path: Path) -> None:
    state = {f"w{i}": torch.tensor([float(i)]) for i in range(10_000)}
    options = WriteOptions(host_memory_bytes=1 << 19, workers=1, slot_bytes=1 << 18)
    prewarm(state, options=options)
    async_save(state, tmp_path, options=options).result(seconds(60))
    assert_saved(tmp_path, state)


def test_scalars_go_through_the_writers_extensions(tmp_path: Path) -> None:
    writer = DcpxWriter(tmp_path, _extensions=[ZStandard()])
    state = {"w": torch.rand(10), "step": 5, "name": "run"}
    async_save(state, storage_writer=writer).result(seconds(60))
    assert_saved(tmp_path, state)


def test_bytes_item_that_is_none_is_refused(tmp_path: Path) -> None:
    class BadPlanner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            return 5

    with pytest.raises(AssertionError, match="BytesIO"):
        async_save({"x": {"no", "plain"}}, tmp_path, planner=BadPlanner())


def test_subclass_with_the_signature_of_before_saves(tmp_path: Path) -> None:
    class OldWriter(DcpxWriter):
        def set_up_storage_writer(self, is_coordinator: bool) -> None:  # type: ignore[override]
            super().set_up_storage_writer(is_coordinator)

    save(state_of(1), storage_writer=OldWriter(tmp_path))
    assert_saved(tmp_path, state_of(1))


def test_path_that_is_none_is_told_to_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Noting(Exchange):
        def fail(self, error: BaseException) -> None:
            told.append(type(error).__name__)

        def close(self) -> None:
            told.append("closed")

    monkeypatch.setattr(save_checkpoint, "exchange_for", lambda *_, **__: Noting(60))
    for begin in (save, async_save):
        with pytest.raises(OptionError, match=r"checkpoint_id must be a path, got 1\.5"):
            begin({}, 1.5, storage_writer=DcpxWriter(tmp_path))  # type: ignore[arg-type]
    assert told == ["OptionError", "closed"] * 2
