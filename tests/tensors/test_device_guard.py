"""Snapshots of device memory that go on after the call: what waits for them. On the fake driver."""

from __future__ import annotations

import gc

import pytest
import torch
from fake_cuda.fake import HELD, HUNG, INVALID_VALUE, FakeCuda
from support.device_snapshots import assert_bits
from support.machine import points
from support.staged import stage_tensors

from torch_dcpx import StagingError
from torch_dcpx.staging.arena import process_pool
from torch_dcpx.staging.snapshot import stage_guarded
from torch_dcpx.tensors.copy_guard import wait_for_copies

MIB = 1 << 20


def check_guard(device: FakeCuda) -> None:
    """Overwrites, behind the guard, what is still being copied."""
    stream = device.make_stream()
    device.current_streams[0] = stream
    source = [torch.randn(50_000), torch.randn(7)]
    tensors = [device.device_tensor(tensor) for tensor in source]
    staged, guard = stage_guarded(tensors)
    guard.wait()
    for tensor in tensors:
        device.stream_write(tensor, torch.zeros(tensor.shape), stream)
    device.stream_sync(stream)
    guard.finish()
    for found, wanted in zip(staged, source, strict=True):
        assert_bits(found, wanted)


def test_what_follows_the_guard_does_not_show(device: FakeCuda, seed: int) -> None:
    for number in range(20):
        device.reset(seed + number)
        check_guard(device)
    device.set_pace(HELD)
    check_guard(device)


@pytest.mark.slow
def test_guard_holds_over_a_thousand_seeds(device: FakeCuda) -> None:
    for number in range(points(1000)):
        device.reset(number)
        check_guard(device)


def test_overlapped_snapshot_returns_before_its_copies_but_for_those_of_host_tensors(
    device: FakeCuda,
) -> None:
    device.set_pace(HELD)
    source, host = torch.randn(MIB), torch.ones(100_000)
    (staged, first), guard = stage_guarded([device.device_tensor(source), host])
    host.zero_()
    guard.wait()
    assert staged.count_nonzero() == 0  # a new arena: nothing was copied yet
    assert_bits(first, torch.ones(100_000))
    guard.finish()
    assert guard.is_done
    assert_bits(staged, source)


def test_sources_live_until_their_copies_are_done_and_no_longer(device: FakeCuda) -> None:
    device.set_pace(HELD)
    source = torch.randn(100_000)
    tensor = device.device_tensor(source)
    (staged,), guard = stage_guarded([tensor])
    del tensor
    assert device.count("live_allocations") == 1  # else the fake reports it, too
    guard.finish()
    assert device.count("live_allocations") == 0
    assert_bits(staged, source)


def check_arena_reuse(device: FakeCuda) -> None:
    """Stages anew while the copies of an abandoned snapshot are under way."""
    first, second = torch.randn(50_000), torch.randn(50_000)
    guard = stage_guarded([device.device_tensor(first)])[1]  # nobody keeps what was staged
    (staged,), other = stage_guarded([device.device_tensor(second)])
    other.finish()
    guard.finish()
    assert_bits(staged, second)


def test_arena_is_not_reused_while_it_is_copied_to(device: FakeCuda, seed: int) -> None:
    for number in range(20):
        device.reset(seed + number)
        check_arena_reuse(device)
    assert process_pool().count == 2


@pytest.mark.slow
def test_arena_reuse_holds_over_a_thousand_seeds(device: FakeCuda) -> None:
    for number in range(points(1000)):
        device.reset(number)
        check_arena_reuse(device)


def test_dropped_guard_waits_before_the_arena_is_free(device: FakeCuda) -> None:
    device.set_pace(HELD)
    guard = stage_guarded([device.device_tensor(torch.randn(50_000))])[1]
    del guard
    second = torch.randn(50_000)
    assert_bits(stage_tensors([device.device_tensor(second)])[0], second)
    assert process_pool().count == 1


def test_guard_refuses_a_capturing_stream_and_leaves_its_capture_whole(device: FakeCuda) -> None:
    stream = device.make_stream()
    device.current_streams[0] = stream
    device.set_pace(HUNG)
    _, guard = stage_guarded([device.device_tensor(torch.randn(1000))])
    device.set_capturing(stream)
    with pytest.raises(StagingError, match="captur"):
        guard.wait()
    assert not device.is_capture_broken(stream)
    device.set_capturing(stream, False)
    device.release_hung()
    guard.finish()


def test_guard_refuses_the_default_stream_beside_a_capture_that_keeps_step_with_it(
    device: FakeCuda,
) -> None:
    device.set_pace(HUNG)
    _, guard = stage_guarded([device.device_tensor(torch.randn(1000))])
    blocking = device.make_stream(is_non_blocking=False)
    device.set_capturing(blocking)
    with pytest.raises(StagingError, match="captur"):
        guard.wait()
    device.set_capturing(blocking, False)
    device.release_hung()
    guard.finish()


def test_guard_of_copies_that_are_done_lets_a_capture_be(device: FakeCuda) -> None:
    stream = device.make_stream()
    device.current_streams[0] = stream
    guard = stage_guarded([device.device_tensor(torch.randn(1000))])[1]
    while not guard.is_done:
        device.sync()
    device.set_capturing(stream)
    guard.wait()
    assert not device.is_capture_broken(stream)
    device.set_capturing(stream, False)
    guard.finish()


def test_guard_of_copies_that_failed_says_so_each_time_and_holds_nothing(device: FakeCuda) -> None:
    device.set_pace(HELD)
    guard = stage_guarded([device.device_tensor(torch.randn(1000))])[1]
    device.fail("cuEventQuery", 1, INVALID_VALUE)
    for _ in range(2):
        with pytest.raises(StagingError, match="cuEventQuery: CUDA_ERROR_INVALID_VALUE"):
            guard.finish()
    assert not guard.is_finished
    assert guard.is_done
    gc.collect()
    assert device.count("live_allocations") == 0
    wait_for_copies()  # of nothing
