"""Every call of the driver that a save, a load and an asynchronous save make, in numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fake_cuda.fake import EAGER, FakeCuda
from support.device_states import on_host
from support.saves import assert_loads, save
from support.states import assert_same

from torch_dcpx import DcpxReader, ReadOptions, WriteOptions, async_save

KIB = 1 << 10

# Polls, and the pairs around each use of a context, whose number nobody promises.
UNCOUNTED = {
    "cuEventQuery",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuThreadExchangeStreamCaptureMode",
}
# Asked once a process, or once a driver.
ONCE = {
    "cuDevicePrimaryCtxRetain",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetPCIBusId",
    "cuDriverGetVersion",
    "cuGetProcAddress",
    "cuInit",
    "cuModuleGetFunction",
    "cuModuleLoadData",
}


def calls_of(fake: FakeCuda, work: Callable[[], object]) -> dict[str, int]:
    """Returns how often `work` calls what."""
    fake.clear_counts()
    work()
    counts = fake.counts()
    assert counts.get("cuCtxPushCurrent") == counts.get("cuCtxPopCurrent")
    told = {name.removesuffix("_v2"): n for name, n in counts.items() if n}
    return {
        name: n
        for name, n in told.items()
        if name.startswith("cu") and name not in UNCOUNTED | ONCE
    }


def merged_run(fake: FakeCuda) -> dict[str, torch.Tensor]:
    """Returns 64 tensors of 4 KiB that fill one run of device memory."""
    flat = fake.device_tensor(torch.arange(64 * KIB, dtype=torch.int32))
    return {f"t{i:02}": flat[i * KIB : (i + 1) * KIB] for i in range(64)}


def small_ones(fake: FakeCuda) -> dict[str, torch.Tensor]:
    host = [torch.arange(100.0 + i) + i for i in range(500)]
    return {f"t{i:03}": tensor for i, tensor in enumerate(fake.segment(host))}


def large_ones(fake: FakeCuda) -> dict[str, torch.Tensor]:
    return {f"t{i}": fake.device_tensor(torch.arange(50_000.0) + i) for i in range(4)}


A_STREAM = {
    "cuStreamIsCapturing": 1,  # the caller's
    "cuCtxGetStreamPriorityRange": 1,
    "cuStreamCreateWithPriority": 1,
    "cuStreamWaitEvent": 1,
    "cuStreamDestroy": 1,
    "cuEventCreate": 2,  # what the caller had queued, and the end of the copies
    "cuEventRecord": 2,
    "cuEventDestroy": 2,
    "cuMemHostRegister": 1,  # the slot, or the arena
}
SLOT = {"cuMemHostUnregister": 1}  # an arena is kept
LAUNCH = {"cuLaunchKernel": 1, "cuMemHostRegister": 2}  # with its table
LAUNCH_FROM_SLOT = {**LAUNCH, "cuMemHostUnregister": 2}
# Allocations are asked for where two copies touch.
MERGED = {"cuPointerGetAttributes": 1}
BATCH = {"cuMemcpyBatchAsync": 1}

EXPECTED: Any = pytest.mark.parametrize(
    ("state", "of_save", "of_load", "of_async_save"),
    [
        # Rows of the file have heads between them; in an arena they lie as on the device.
        (merged_run, LAUNCH_FROM_SLOT, LAUNCH_FROM_SLOT, {**MERGED, "cuMemcpyDtoHAsync": 1}),
        (
            small_ones,  # in two segments: the first ends with a page
            {**LAUNCH_FROM_SLOT, "cuLaunchKernel": 2, "cuEventRecord": 3},
            {
                **LAUNCH_FROM_SLOT,
                "cuLaunchKernel": 2,
                "cuCtxGetStreamPriorityRange": 2,  # two slots, a stream and a table each
                "cuStreamCreateWithPriority": 2,
                "cuStreamWaitEvent": 2,
                "cuStreamDestroy": 2,
                "cuEventCreate": 3,
                "cuEventRecord": 3,
                "cuEventDestroy": 3,
                "cuMemHostRegister": 3,
                "cuMemHostUnregister": 3,
            },
            {**LAUNCH, **MERGED, "cuMemHostUnregister": 1},
        ),
        (large_ones, {**SLOT, **BATCH}, {**SLOT, **BATCH}, BATCH),
    ],
)


@EXPECTED
def test_calls_of_a_save_a_load_and_an_asynchronous_save_are_these(
    device: FakeCuda,
    tmp_path: Path,
    state: Callable[[FakeCuda], dict[str, torch.Tensor]],
    of_save: dict[str, int],
    of_load: dict[str, int],
    of_async_save: dict[str, int],
) -> None:
    device.set_pace(EAGER)
    values = state(device)
    expected = on_host(device, values)
    saving = WriteOptions(workers=1, slot_bytes=1 << 20, durability="none")
    loading = ReadOptions(workers=1, slot_bytes=1 << 20)
    reader = DcpxReader(tmp_path / "a", options=loading)
    save(values, tmp_path / "warm", options=saving)  # loads the kernel
    found = [
        calls_of(device, lambda: save(values, tmp_path / "a", options=saving)),
        calls_of(device, lambda: dcp.load(values, storage_reader=reader, no_dist=True)),
        calls_of(
            device,
            lambda: async_save(values, tmp_path / "b", no_dist=True, options=saving).result(),
        ),
    ]
    assert_loads(expected, tmp_path / "b")
    assert_same(expected, on_host(device, values))
    assert found == [
        {**A_STREAM, **of_save},
        {**A_STREAM, **of_load},
        {**A_STREAM, **of_async_save},
    ]
