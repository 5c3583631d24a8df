"""Saves of device memory in the background: what was there at the call is what is saved."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fake_cuda.fake import HELD, INVALID_VALUE, FakeCuda
from support.async_saves import assert_saved, gated, no_save_is_left
from support.device_snapshots import assert_bits, device_copy
from support.machine import seconds

from torch_dcpx import (
    DcpxStager,
    DcpxWriter,
    StagingError,
    UnsupportedError,
    WriteOptions,
    async_save,
    guard_optimizer,
    prewarm,
)
from torch_dcpx.staging.arena import process_pool
from torch_dcpx.staging.snapshot import stage_guarded
from torch_dcpx.tensors import device as device_memory

__all__ = ["no_save_is_left"]

pytestmark = pytest.mark.usefixtures("no_save_is_left")


def state_of(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(300_000, generator=random),
        "small": torch.randn(3, 5, generator=random),
        "transposed": torch.randn(64, 64, generator=random).t(),
        "strided": torch.randn(64, 64, generator=random)[::2, 1::3],
        "empty": torch.empty(0, 3),
    }


def mixed(device: FakeCuda, host: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the state on device 0, on device 1 and on the host, and what is no tensor."""
    state: dict[str, Any] = {f"{k}.0": t for k, t in device_copy(device, host, 0).items()}
    state.update({f"{k}.1": t for k, t in device_copy(device, host, 1).items()})
    state.update({f"{k}.host": t.clone() for k, t in host.items()})
    return {**state, "step": 7, "name": "run"}


def expected(host: dict[str, torch.Tensor]) -> dict[str, Any]:
    state: dict[str, Any] = {f"{k}.{w}": t for w in ("0", "1", "host") for k, t in host.items()}
    return {**state, "step": 7, "name": "run"}


def overwrite(device: FakeCuda, state: dict[str, Any]) -> None:
    """Changes every tensor at once, ordered behind nothing."""
    for value in state.values():
        if not isinstance(value, torch.Tensor) or value.numel() == 0:
            continue
        if device.ordinal_of(value) < 0:
            value.zero_()
        elif value.is_contiguous():
            device.write(value.data_ptr(), bytes(value.nbytes))


def save_through_dcp(state: dict[str, Any], path: Path, stager: DcpxStager) -> Future[Any]:
    response: Any = dcp.async_save(
        state, storage_writer=DcpxWriter(path), async_stager=stager, no_dist=True
    )
    return response.upload_completion if stager.overlap else response


@pytest.fixture
def host(seed: int) -> dict[str, torch.Tensor]:
    return state_of(seed)


def test_async_save_of_devices_and_host_is_what_stock_loads(
    device: FakeCuda, host: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    state = mixed(device, host)
    handle = async_save(state, tmp_path / "a", no_dist=True)
    assert handle.staged.done()
    assert handle.guard.is_finished
    overwrite(device, state)
    handle.result()
    assert_saved(tmp_path / "a", expected(host))
    assert device.notes() == []


def test_overlapped_save_shows_no_change_behind_its_guard(
    device: FakeCuda, host: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    streams = {ordinal: device.make_stream(ordinal) for ordinal in (0, 1)}
    device.current_streams.update(streams)
    state = mixed(device, host)
    handle = async_save(state, tmp_path / "a", no_dist=True, options=WriteOptions(overlap=True))
    handle.guard.wait()
    for value in state.values():
        if isinstance(value, torch.Tensor) and (ordinal := device.ordinal_of(value)) >= 0:
            zeros = torch.empty_strided(value.size(), value.stride()).zero_()
            device.stream_write(value, zeros, streams[ordinal])
        elif isinstance(value, torch.Tensor):
            value.zero_()
    handle.result()
    assert handle.staged.result() is None
    assert handle.guard.is_done
    assert_saved(tmp_path / "a", expected(host))


def test_overlapped_save_frees_its_sources_when_they_are_copied_not_when_they_are_written(
    device: FakeCuda, host: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    gate, options = gated(overlap=True)
    state = device_copy(device, host)
    handle = async_save(state, tmp_path / "a", no_dist=True, options=options)
    state.clear()
    assert not handle.staged.cancel()  # it is the save's to end
    handle.staged.result(seconds(60))
    gc.collect()
    assert device.count("live_allocations") == 0
    assert not handle.done()
    gate.open()
    handle.result()
    assert_saved(tmp_path / "a", host)


def test_overlapped_save_whose_copy_fails_raises_from_the_handle_and_commits_nothing(
    device: FakeCuda, host: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    async_save({"w": torch.ones(3)}, tmp_path / "a", no_dist=True).result()
    device.set_pace(HELD)
    state = device_copy(device, host)
    device.fail("cuEventQuery", 1, INVALID_VALUE)
    handle = async_save(state, tmp_path / "a", no_dist=True, options=WriteOptions(overlap=True))
    with pytest.raises(StagingError, match="cuEventQuery: CUDA_ERROR_INVALID_VALUE"):
        handle.result()
    with pytest.raises(StagingError):
        handle.staged.result()
    handle.guard.wait()  # nothing is copied any more; the handle has said what failed
    assert_saved(tmp_path / "a", {"w": torch.ones(3)})


def test_overlap_of_a_state_in_host_memory_is_a_save_as_always(
    device: FakeCuda, host: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    state = {name: tensor.clone() for name, tensor in host.items()}
    handle = async_save(state, tmp_path / "a", no_dist=True, options=WriteOptions(overlap=True))
    assert handle.staged.done()
    overwrite(device, state)
    handle.result()
    assert_saved(tmp_path / "a", host)


def test_prewarm_of_a_device_state_registers_what_async_save_uses(
    device: FakeCuda, host: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    host = {"large": host["large"]}
    state = device_copy(device, host)
    prewarm(state)
    async_save(state, tmp_path / "a", no_dist=True).result()
    assert device.count("cuMemHostRegister") == 1
    assert process_pool().count == 1
    assert_saved(tmp_path / "a", host)


def test_capture_fails_the_call_and_leaves_the_checkpoint_and_the_next_save(
    device: FakeCuda, host: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    state = device_copy(device, host)
    async_save(state, tmp_path / "a", no_dist=True).result()
    stream = device.make_stream()
    device.current_streams[0] = stream
    device.set_capturing(stream)
    with pytest.raises(StagingError, match="captur"):
        async_save(state, tmp_path / "a", no_dist=True)
    assert_saved(tmp_path / "a", host)
    device.set_capturing(stream, False)
    async_save(state, tmp_path / "a", no_dist=True).result()
    assert_saved(tmp_path / "a", host)


def test_state_beyond_the_budget_goes_in_waves_from_the_callers_stream(
    device: FakeCuda, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = device.make_stream()  # no other thread's
    monkeypatch.setattr(device_memory, "streams_in_use", lambda: {0: stream})
    device.set_pace(HELD)
    random = torch.Generator().manual_seed(seed)
    host = {f"w{i}": torch.randn(200_000, generator=random) for i in range(12)}
    state = device_copy(device, {name: torch.zeros_like(t) for name, t in host.items()})
    for name, tensor in state.items():
        device.stream_write(tensor, host[name], stream)
    options = WriteOptions(host_memory_bytes=4 << 20, workers=1, slot_bytes=1 << 20)
    handle = async_save(state, tmp_path / "a", no_dist=True, options=options)
    overwrite(device, state)
    handle.result()
    assert_saved(tmp_path / "a", host)
    assert device.count("pinned_peak_bytes") <= 4 << 20


@pytest.mark.parametrize("files", [1, 3])
def test_waves_cost_a_stream_and_its_events_for_a_wave_and_not_for_an_item(
    device: FakeCuda, tmp_path: Path, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "streams_in_use", lambda: {0: 0})
    host = {f"small{i:03}": torch.arange(1000.0) + i for i in range(600)}
    host |= {f"t{i}.large": torch.arange(700_000.0) + i for i in range(3)}
    state = device_copy(device, host)
    options = WriteOptions(
        host_memory_bytes=4 << 20, workers=1, slot_bytes=1 << 20, files_per_rank=files
    )
    device.clear_counts()
    async_save(state, tmp_path / "a", no_dist=True, options=options).result()
    assert_saved(tmp_path / "a", host)
    waves = 2 + 3 if files == 1 else device.count("cuStreamIsCapturing")
    assert waves <= 2 + 3 + 2 * (files - 1)
    for entry, a_wave in (
        ("cuStreamIsCapturing", 1),
        ("cuStreamCreateWithPriority", 1),
        ("cuStreamDestroy", 1),
        ("cuStreamWaitEvent", 1),
        ("cuEventCreate", 2),
        ("cuEventRecord", 2),
        ("cuEventDestroy", 2),
    ):
        assert device.count(entry) == a_wave * waves, entry
    assert device.count("cuLaunchKernel") == waves - 3
    assert device.count("cuMemcpyDtoHAsync") == 3
    # The arena of the small ones, those of the large ones, and the tables of launches.
    assert device.count("cuMemHostRegister") <= 1 + 3 + waves - 3
    assert device.count("cuMemHostUnregister") <= device.count("cuMemHostRegister")


# ---- Through DCP's own async_save ---------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_stager_of_stocks_async_save_takes_devices(
    device: FakeCuda, host: dict[str, torch.Tensor], tmp_path: Path, overlap: bool
) -> None:
    stream = device.make_stream()
    device.current_streams[0] = stream
    stager = DcpxStager(overlap=overlap)
    state = device_copy(device, host)
    future = save_through_dcp(state, tmp_path / "a", stager)
    stager.guard.wait()
    for value in state.values():
        zeros = torch.empty_strided(value.size(), value.stride()).zero_()
        device.stream_write(value, zeros, stream) if value.numel() else None
    future.result()
    assert_saved(tmp_path / "a", host)
    assert stager.guard.is_finished


def test_future_of_a_stager_is_done_with_the_last_copy(device: FakeCuda) -> None:
    source = torch.randn(100_000)
    stager = DcpxStager(overlap=True)
    staged = stager.stage({"w": device.device_tensor(source)})
    assert_bits(staged.result(seconds(60))["w"], source)
    assert stager.guard.is_done
    of_host = stager.stage({"w": source})
    assert of_host.done()
    assert_bits(of_host.result()["w"], source)


def test_future_of_a_stager_raises_what_a_copy_raised(device: FakeCuda) -> None:
    device.set_pace(HELD)
    device.fail("cuEventQuery", 1, INVALID_VALUE)
    staged = DcpxStager(overlap=True).stage({"w": device.device_tensor(torch.randn(100_000))})
    with pytest.raises(StagingError, match="cuEventQuery"):
        staged.result(seconds(60))


# ---- The optimizer ------------------------------------------------------------------------------


class QueuedStep(torch.optim.Optimizer):
    """Zeroes tensors of the fake's in the current stream."""

    def __init__(self, device: FakeCuda, tensors: list[torch.Tensor], stream: int) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(1))], {})
        self._device, self._tensors, self._stream = device, tensors, stream

    def step(self, closure: Any = None) -> None:
        for tensor in self._tensors:
            self._device.stream_write(tensor, torch.zeros(tensor.shape), self._stream)


@pytest.fixture
def step(device: FakeCuda) -> tuple[QueuedStep, dict[str, torch.Tensor]]:
    stream = device.make_stream()
    device.current_streams[0] = stream
    state = {"w": device.device_tensor(torch.arange(200_000.0))}
    return QueuedStep(device, list(state.values()), stream), state


def test_guarded_optimizer_steps_behind_the_copies_of_every_snapshot(
    device: FakeCuda, step: tuple[QueuedStep, dict[str, torch.Tensor]]
) -> None:
    optimizer, state = step
    hook = guard_optimizer(optimizer)
    device.set_pace(HELD)  # nobody but the step asks for the copies
    wanted = device.read_back(state["w"])
    staged = [stage_guarded([state["w"]]) for _ in range(2)]
    optimizer.step()
    device.stream_sync(device.current_streams[0])
    for (tensor,), guard in staged:
        guard.finish()
        assert_bits(tensor, wanted)
    before = device.count("cuStreamWaitEvent")
    optimizer.step()
    assert device.count("cuStreamWaitEvent") == before  # no copy is under way
    hook.remove()


def test_guarded_optimizer_steps_behind_the_copies_of_saves(
    device: FakeCuda, step: tuple[QueuedStep, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    optimizer, state = step
    guard_optimizer(optimizer)
    for number in range(3):
        wanted = {name: device.read_back(tensor) for name, tensor in state.items()}
        path = tmp_path / str(number)
        handle = async_save(state, path, no_dist=True, options=WriteOptions(overlap=True))
        optimizer.step()
        handle.result()
        assert_saved(path, wanted)
        device.stream_sync(device.current_streams[0])


def test_optimizer_without_hooks_is_refused_with_the_way_out() -> None:
    class Steps:
        def step(self) -> None: ...

    with pytest.raises(UnsupportedError, match=r"handle\.guard\.wait"):
        guard_optimizer(Steps())
