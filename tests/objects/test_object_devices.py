"""Tensors on devices, on the fake driver: to a store and back."""

from __future__ import annotations

import pytest
import torch.distributed.checkpoint as dcp
from fake_cuda.fake import FakeCuda
from support.device_states import DRIVERS, everywhere, moved, odd_state, on_host, use_driver
from support.states import assert_same, blank_like

import torch_dcpx as dcpx
from torch_dcpx import _C, DcpxReader, DcpxWriter, ReadOptions, WriteOptions

MIB = 1 << 20


@pytest.fixture(autouse=True)
def driver_of_the_test(fake_device_memory: FakeCuda) -> None:
    """The fake's memory is device memory, and its driver is asked for anew."""
    _C.forget_device_driver()


@pytest.mark.parametrize("memory_mib", [24, 64])
@pytest.mark.parametrize(("version", "has_kernel"), DRIVERS)
def test_state_on_devices_is_saved_bit_for_bit(
    fake_cuda: FakeCuda,
    object_prefix: str,
    seed: int,
    version: int,
    has_kernel: bool,
    memory_mib: int,
) -> None:
    use_driver(fake_cuda, version, has_kernel)
    expected = odd_state(seed)
    options = WriteOptions(workers=3, slot_bytes=256 << 10, host_memory_bytes=memory_mib * MIB)
    state = moved(fake_cuda, expected, everywhere)
    writer = DcpxWriter(object_prefix, options=options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert writer.last_report is not None
    assert writer.last_report.slot_bytes <= memory_mib * MIB // 4 * 3
    target = blank_like(expected)
    dcpx.load(target, object_prefix)
    assert_same(expected, target)


def test_loads_fill_devices(fake_cuda: FakeCuda, object_prefix: str, seed: int) -> None:
    expected = odd_state(seed)
    del expected["expanded"], expected["repeated"]  # no memory to load them into
    dcpx.save(expected, object_prefix)
    state = moved(fake_cuda, blank_like(expected), everywhere)
    reader = DcpxReader(object_prefix, options=ReadOptions(host_memory_bytes=4 * MIB))
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert_same(expected, on_host(fake_cuda, state))
