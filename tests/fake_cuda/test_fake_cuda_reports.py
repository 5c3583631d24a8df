"""The fake CUDA driver: what programs do wrongly is reported; hung work, threads, captures."""

from __future__ import annotations

import ctypes
import signal
import threading

import torch
from conftest import RunPython
from fake_cuda import fake as codes
from fake_cuda.driver_calls import DriverCalls, error_of
from fake_cuda.fake import EAGER, HELD, HUNG, FakeCuda

LEGACY, PER_THREAD = 1, 2
N = 1024  # bytes


def data(value: int = 2) -> torch.Tensor:
    return torch.full((N,), value, dtype=torch.uint8)


def test_cpu_that_touches_device_memory_is_killed(fake_cuda: FakeCuda, run_warm: RunPython) -> None:
    code = """
import ctypes
from fake_cuda.fake import FakeCuda
address = FakeCuda().alloc(4)
print("made", flush=True)
ctypes.string_at(address, 1)
"""
    done = run_warm(code, env=fake_cuda.environment(), check=False)
    assert (done.stdout, done.returncode) == ("made\n", -signal.SIGSEGV)


def test_copy_outside_of_an_allocation_is_refused_and_reported(driver: DriverCalls) -> None:
    fake, own, host = driver.fake, driver.stream(), data()
    first, second = fake.alloc(512), fake.alloc(512, is_adjacent=True)
    driver.register(host)
    to = host.data_ptr()
    assert error_of(lambda: driver.to_host(to, first, 513, own)) == codes.INVALID_VALUE
    assert error_of(lambda: driver.to_host(to, second + 500, 13, own)) == codes.INVALID_VALUE
    assert error_of(lambda: driver.to_host(to, second + (1 << 20), 1, own)) == codes.INVALID_VALUE
    fake.free(second)
    assert error_of(lambda: driver.to_host(to, second, 1, own)) == codes.INVALID_VALUE
    assert fake.take_reports() == [
        "cuMemcpyDtoHAsync of 513 B: goes 1 B beyond its allocation",
        "cuMemcpyDtoHAsync of 13 B: goes 1 B beyond its allocation",
        "cuMemcpyDtoHAsync of 1 B: outside of allocations",
        "cuMemcpyDtoHAsync of 1 B: device memory that was freed",
    ]
    driver.unregister(host)
    driver.destroy_stream(own)


def test_copy_whose_device_memory_goes_before_it_runs_is_reported(driver: DriverCalls) -> None:
    fake, own, host = driver.fake, driver.stream(), data(0)
    fake.set_pace(HELD)
    driver.register(host)
    source = fake.device_tensor(data())
    driver.to_host(host.data_ptr(), source.data_ptr(), N, own)
    del source
    other = fake.device_tensor(data(9))  # gets the same memory
    fake.sync()
    assert fake.take_reports() == [
        f"cuMemcpyDtoHAsync of {N} B: runs after its device memory was freed"
    ]
    assert torch.equal(host, fake.read_back(other))
    driver.unregister(host)
    driver.destroy_stream(own)


def test_copy_whose_host_memory_was_unregistered_is_reported_and_does_not_run(
    driver: DriverCalls,
) -> None:
    fake, own, host = driver.fake, driver.stream(), data(0)
    fake.set_pace(HELD)
    source = fake.device_tensor(data())
    driver.register(host)
    driver.to_host(host.data_ptr(), source.data_ptr(), N, own)
    driver.unregister(host)
    fake.sync()
    assert not host.any()
    copy = f"cuMemcpyDtoHAsync of {N} B"
    assert fake.take_reports() == [
        f"cuMemHostUnregister: memory that {copy} is going to use",
        f"{copy}: would run after its host memory was unregistered",
    ]
    driver.destroy_stream(own)


def test_handles_that_were_destroyed_and_contexts_that_are_missing_are_reported(
    driver: DriverCalls,
) -> None:
    fake, own, event = driver.fake, driver.stream(), driver.event()
    with DriverCalls(fake, device=1) as other:
        theirs = other.stream()
        assert error_of(lambda: other.record(event, theirs)) == codes.INVALID_HANDLE
        other.destroy_stream(theirs)
    driver.destroy_stream(own)
    driver.destroy_event(event)
    assert error_of(lambda: driver.synchronize(own)) == codes.INVALID_HANDLE
    assert error_of(lambda: driver.is_done(event)) == codes.INVALID_HANDLE
    fake.library.cuCtxPopCurrent_v2(None)
    assert error_of(driver.event) == codes.INVALID_CONTEXT
    fake.library.cuCtxPushCurrent_v2(ctypes.c_void_p(driver.context))
    assert fake.take_reports() == [
        "cuEventRecord: an event of device 0 on a stream of device 1",
        "cuStreamSynchronize: a stream that was destroyed or never made",
        "cuEventQuery: an event that was destroyed or never made",
        "cuEventCreate: no context is current on this thread",
    ]


def test_hung_work_runs_for_nobody_before_it_is_released(driver: DriverCalls) -> None:
    fake = driver.fake
    tensor = fake.device_tensor(torch.zeros(8))
    own, done = driver.stream(), driver.event()
    fake.set_pace(HUNG, stream := fake.make_stream())
    fake.stream_write(tensor, torch.ones(8), stream)
    driver.record(done, stream)
    driver.stream_wait(own, done)
    driver.record(done, own)
    for _ in range(100):
        assert not driver.is_done(done)
    assert fake.read_back(tensor).tolist() == [0.0] * 8
    fake.release_hung()
    driver.event_wait(done)
    assert fake.read_back(tensor).tolist() == [1.0] * 8
    driver.destroy_event(done)
    driver.destroy_stream(own)


def written_by(fake: FakeCuda, stream: int, value: float) -> torch.Tensor:
    tensor = fake.device_tensor(torch.zeros(4))
    fake.stream_write(tensor, torch.full((4,), value), stream)
    return tensor


def test_default_stream_of_a_thread_is_its_own_and_keeps_step_with_the_legacy_one(
    driver: DriverCalls,
) -> None:
    fake = driver.fake
    fake.set_pace(HUNG, PER_THREAD)
    mine = written_by(fake, PER_THREAD, 1.0)
    seen: list[list[float]] = []

    def of_another_thread() -> None:
        fake.set_pace(EAGER, PER_THREAD)
        tensor = written_by(fake, PER_THREAD, 2.0)
        fake.stream_sync(PER_THREAD)
        seen.append(fake.read_back(tensor).tolist())

    thread = threading.Thread(target=of_another_thread)
    thread.start()
    thread.join()
    assert seen == [[2.0] * 4]
    assert fake.read_back(mine).tolist() == [0.0] * 4
    behind = written_by(fake, LEGACY, 3.0)
    done = driver.event()
    driver.record(done, LEGACY)
    assert not driver.is_done(done)
    fake.release_hung()
    driver.event_wait(done)
    assert fake.read_back(mine).tolist() == [1.0] * 4
    assert fake.read_back(behind).tolist() == [3.0] * 4
    driver.destroy_event(done)


def test_kernel_that_touches_what_it_cannot_loses_the_device(driver: DriverCalls) -> None:
    fake, own, host = driver.fake, driver.stream(), torch.full((N,), 2, dtype=torch.uint8)
    _, fill = driver.kernel("fake_fill_kernel")
    driver.launch(
        fill, [ctypes.c_uint64(host.data_ptr()), ctypes.c_uint64(N), ctypes.c_uint8(7)], own
    )
    assert error_of(lambda: driver.synchronize(own)) == codes.ILLEGAL_ADDRESS
    assert error_of(driver.event) == codes.ILLEGAL_ADDRESS
    assert torch.equal(host, torch.full((N,), 2, dtype=torch.uint8))
    assert fake.take_reports() == ["a kernel: host memory that is not registered"]
    error_of(lambda: driver.destroy_stream(own))


def test_capturing_stream_says_so_and_takes_no_work(driver: DriverCalls) -> None:
    fake, event = driver.fake, driver.event()
    caller = fake.make_stream(is_non_blocking=False)
    status = ctypes.c_int(-1)

    def ask(stream: int) -> int:
        return fake.library.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))

    assert (ask(caller), status.value) == (0, 0)
    fake.set_capturing(caller)
    assert (ask(caller), status.value) == (0, 1)
    assert ask(0) == 906  # CAPTURE_IMPLICIT: the default stream keeps step
    assert error_of(lambda: driver.record(event, caller)) == codes.CAPTURE_UNSUPPORTED
    assert (ask(caller), status.value) == (0, 2)
    assert fake.is_capture_broken(caller)
    assert len(fake.take_reports()) == 1
    fake.set_capturing(caller, is_capturing=False)
    driver.destroy_event(event)
