"""The fake CUDA driver: a missing wait shows, for some seeds, and a wait that is there helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from fake_cuda.driver_calls import DriverCalls
from fake_cuda.fake import HELD, FakeCuda

SEEDS = range(24)
N = 1024  # bytes
TORN = -1
OLD = torch.full((N,), 1, dtype=torch.uint8)
NEW = torch.full((N,), 2, dtype=torch.uint8)


@pytest.fixture
def pinned(driver: DriverCalls) -> Iterator[torch.Tensor]:
    """Registered host memory, full of zeros."""
    memory = torch.zeros(N, dtype=torch.uint8)
    driver.register(memory)
    yield memory
    driver.fake.sync()
    driver.unregister(memory)


def outcomes(fake: FakeCuda, once: Callable[[], torch.Tensor]) -> list[int]:
    """Returns the byte that `once` sees under each seed; TORN where it sees several.

    What nobody waits for may be under way while it is looked at.
    """
    seen = []
    for seed in SEEDS:
        fake.reset(seed)
        result = once()
        seen.append(int(result[0]) if bool((result == result[0]).all()) else TORN)
        fake.sync()
    return seen


@pytest.mark.parametrize("has_wait", [False, True])
def test_copy_sees_what_the_callers_stream_writes_only_behind_its_event(
    driver: DriverCalls, pinned: torch.Tensor, has_wait: bool
) -> None:
    fake = driver.fake
    own, source_event, done = driver.stream(), driver.event(), driver.event()

    def copy_once() -> torch.Tensor:
        source = fake.device_tensor(OLD)
        caller = fake.make_stream()
        fake.stream_write(source, NEW, caller)
        driver.record(source_event, caller)
        if has_wait:
            driver.stream_wait(own, source_event)
        driver.to_host(pinned.data_ptr(), source.data_ptr(), N, own)
        driver.record(done, own)
        driver.event_wait(done)
        seen = pinned.clone()
        fake.sync()
        return seen

    seen = outcomes(fake, copy_once)
    early = seen.count(1) + seen.count(TORN)
    assert set(seen) == {2} if has_wait else early >= len(SEEDS) // 3
    driver.destroy_stream(own)
    driver.destroy_event(source_event)
    driver.destroy_event(done)


@pytest.mark.parametrize("wait", ["none", "event", "query", "stream"])
def test_host_sees_what_was_copied_only_after_it_has_waited(
    driver: DriverCalls, pinned: torch.Tensor, wait: str
) -> None:
    own, done = driver.stream(), driver.event()

    def copy_once() -> torch.Tensor:
        pinned.fill_(0)
        source = driver.fake.device_tensor(NEW)
        driver.to_host(pinned.data_ptr(), source.data_ptr(), N, own)
        driver.record(done, own)
        if wait == "event":
            driver.event_wait(done)
        elif wait == "stream":
            driver.synchronize(own)
        elif wait == "query":
            while not driver.is_done(done):
                pass
        seen = pinned.clone()
        driver.fake.sync()
        return seen

    seen = outcomes(driver.fake, copy_once)
    early = seen.count(0) + seen.count(TORN)
    assert set(seen) == {2} if wait != "none" else early >= len(SEEDS) // 3
    driver.destroy_stream(own)
    driver.destroy_event(done)


@pytest.mark.parametrize("has_wait", [False, True])
def test_pinned_source_may_be_overwritten_only_after_its_copy_has_run(
    driver: DriverCalls, pinned: torch.Tensor, has_wait: bool
) -> None:
    own = driver.stream()

    def copy_once() -> torch.Tensor:
        target = driver.fake.device_tensor(OLD)
        pinned.fill_(3)
        driver.to_device(target.data_ptr(), pinned.data_ptr(), N, own)
        if has_wait:
            driver.synchronize(own)
        pinned.fill_(4)
        driver.fake.sync()
        return driver.fake.read_back(target)

    seen = outcomes(driver.fake, copy_once)
    assert set(seen) == {3} if has_wait else 4 in seen
    driver.destroy_stream(own)


def test_wait_is_for_what_was_recorded_when_it_was_asked_for(
    driver: DriverCalls, pinned: torch.Tensor
) -> None:
    fake = driver.fake
    source, caller, own = fake.device_tensor(OLD), fake.make_stream(), driver.stream()
    event = driver.event()
    driver.record(event, caller)
    driver.stream_wait(own, event)
    fake.set_pace(HELD, caller)
    fake.stream_write(source, NEW, caller)
    driver.record(event, caller)  # later than the wait: does not hold the copy back
    driver.to_host(pinned.data_ptr(), source.data_ptr(), N, own)
    driver.synchronize(own)
    assert torch.equal(pinned, OLD)
    driver.destroy_stream(own)
    driver.destroy_event(event)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_blocking_streams_alone_run_behind_the_default_stream(
    driver: DriverCalls, pinned: torch.Tensor, is_blocking: bool
) -> None:
    driver.fake.set_pace(HELD)
    source, own = driver.fake.device_tensor(OLD), driver.stream(is_blocking)
    driver.fake.stream_write(source, NEW, stream=0)
    driver.to_host(pinned.data_ptr(), source.data_ptr(), N, own)
    driver.synchronize(own)
    assert torch.equal(pinned, NEW if is_blocking else OLD)
    driver.destroy_stream(own)


def test_copy_to_pageable_memory_has_run_when_it_returns(driver: DriverCalls) -> None:
    driver.fake.set_pace(HELD)
    source, host, own = driver.fake.device_tensor(NEW), torch.zeros_like(NEW), driver.stream()
    driver.to_host(host.data_ptr(), source.data_ptr(), N, own)
    assert torch.equal(host, NEW)
    assert driver.fake.notes() == [
        f"cuMemcpyDtoHAsync of {N} B: host memory that is not registered"
    ]
    assert driver.fake.count("unpinned_copies") == 1
    driver.destroy_stream(own)
