"""Snapshots while the driver fails: a typed error, nothing left behind, and the next one works."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import pytest
import torch
from fake_cuda.fake import HELD, INVALID_VALUE, LAUNCH_FAILED, FakeCuda
from support.device_snapshots import assert_bits, device_copy, has_grown, left
from support.staged import stage_tensors

from torch_dcpx import StagingError
from torch_dcpx.staging.arena import process_pool
from torch_dcpx.staging.snapshot import stage_guarded

Stage = Callable[[list[torch.Tensor]], list[torch.Tensor]]

# What a snapshot calls, and what of it may fail without anybody's notice.
CALLS = [
    "cuCtxGetStreamPriorityRange", "cuCtxPopCurrent", "cuCtxPushCurrent", "cuEventCreate",
    "cuEventDestroy", "cuEventQuery", "cuEventRecord", "cuLaunchKernel", "cuMemHostRegister",
    "cuMemHostUnregister", "cuMemcpy2DAsync", "cuMemcpyBatchAsync_v2", "cuMemcpyDtoHAsync",
    "cuModuleGetFunction", "cuModuleLoadData", "cuPointerGetAttributes",
    "cuStreamCreateWithPriority", "cuStreamDestroy", "cuStreamIsCapturing", "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
]  # fmt: skip


def state_of(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    small = {f"small{i}": torch.randn(33 + i, generator=random) for i in range(20)}
    return {
        "large": torch.randn(200_000, generator=random),
        "other": torch.randn(150_001, generator=random),
        "columns": torch.randn(64, 4096, generator=random)[:, :2048],
        **small,
    }


def overlapped(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    staged, guard = stage_guarded(tensors)
    guard.wait()
    guard.finish()
    return staged


def check_or_error(
    stage: Stage, tensors: list[torch.Tensor], wanted: list[torch.Tensor]
) -> str | None:
    """Returns the text of a StagingError; None where what was staged is what was wanted."""
    try:
        staged = stage(tensors)
    except StagingError as error:
        return str(error)
    for found, source in zip(staged, wanted, strict=True):
        assert_bits(found, source)
    return None


def check_works(device: FakeCuda, seed: int, ordinals: tuple[int, ...] = (0, 1)) -> None:
    host = state_of(seed)
    for ordinal in ordinals:
        tensors = list(device_copy(device, host, ordinal).values())
        for found, wanted in zip(stage_tensors(tensors), host.values(), strict=True):
            assert_bits(found, wanted)


@pytest.mark.parametrize("entry", CALLS)
def test_failing_call_is_a_typed_error_or_nothing_and_the_next_snapshot_works(
    fake_device_memory: FakeCuda, entry: str, seed: int
) -> None:
    device = fake_device_memory  # what the driver refuses to take back is left there
    host, before = state_of(seed), left(device)
    for nth, stage in itertools.product((1, 2, 5), (stage_tensors, overlapped)):
        tensors = list(device_copy(device, host).values())
        device.fail(entry, nth, INVALID_VALUE)
        said = check_or_error(stage, tensors, list(host.values()))
        assert said is None or f"{entry.removesuffix('_v2')}: CUDA_ERROR_INVALID_VALUE (1)" in said
        device.clear_failures()
        check_works(device, seed + nth, (nth % 2,))
    gc.collect()
    process_pool().close()
    # What could not be given back stays: nobody can do more.
    if entry not in ("cuCtxPushCurrent", "cuEventDestroy", "cuStreamDestroy"):
        assert has_grown(before, left(device)) == []


@pytest.mark.parametrize("works", [0, 1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_lost_device_fails_its_snapshot_and_no_other_devices(
    device: FakeCuda, works: int, overlap: bool, seed: int
) -> None:
    host = state_of(seed)
    lost = list(device_copy(device, host, 0).values())
    device.set_pace(HELD)
    device.limit_pinned(0)  # a lost device gives no registration back
    device.lose_device(0, LAUNCH_FAILED, works)
    with pytest.raises(StagingError, match=r"CUDA_ERROR_LAUNCH_FAILED \(719\)"):
        (overlapped if overlap else stage_tensors)(lost)
    tensors = list(device_copy(device, host, 1).values())
    for found, wanted in zip(stage_tensors(tensors), host.values(), strict=True):
        assert_bits(found, wanted)


def test_device_that_is_lost_beside_another_waits_for_the_others_copies(
    device: FakeCuda, seed: int
) -> None:
    host = state_of(seed)
    tensors = [t for ordinal in (0, 1) for t in device_copy(device, host, ordinal).values()]
    device.set_pace(HELD)
    device.limit_pinned(0)
    device.lose_device(0, LAUNCH_FAILED, 1)
    with pytest.raises(StagingError, match="LAUNCH_FAILED"):
        stage_tensors(tensors)
    del tensors  # a copy that had not run would be reported
    gc.collect()
    assert process_pool().count == 1


def test_snapshot_that_nobody_waits_for_later_says_that_its_copies_failed(
    device: FakeCuda,
) -> None:
    device.set_pace(HELD)  # so that no call but the wait for the copies can fail
    device.fail("cuEventQuery", 1, INVALID_VALUE)
    with pytest.raises(StagingError, match="cuEventQuery: CUDA_ERROR_INVALID_VALUE"):
        stage_tensors([device.device_tensor(torch.randn(200_000))])


def test_error_of_a_device_names_no_loss_of_another_one(device: FakeCuda) -> None:
    tensors = [device.device_tensor(torch.randn(200_000), ordinal) for ordinal in (0, 1)]
    device.limit_pinned(0)
    stage_tensors(tensors)
    device.lose_device(0, LAUNCH_FAILED)
    for _ in range(2):
        with pytest.raises(StagingError, match=r"LAUNCH_FAILED \(719\)") as lost:
            stage_tensors([tensors[0]])
    assert "an earlier error had lost the device" in str(lost.value)
    device.fail("cuMemcpyDtoHAsync", 1, INVALID_VALUE)
    with pytest.raises(StagingError, match="INVALID_VALUE") as failed:
        stage_tensors([tensors[1]])
    assert "an earlier error" not in str(failed.value)
