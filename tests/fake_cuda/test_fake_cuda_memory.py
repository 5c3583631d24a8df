"""The fake CUDA driver: memory of devices and of the host, and programs that use it wrongly."""

from __future__ import annotations

import ctypes
import mmap
import signal

import torch
from conftest import RunPython
from fake_cuda import fake as codes
from fake_cuda.driver_calls import DriverCalls, error_of
from fake_cuda.fake import HELD, FakeCuda

N = 1024  # bytes


def data(value: int = 2) -> torch.Tensor:
    return torch.full((N,), value, dtype=torch.uint8)


# ---- Device memory ------------------------------------------------------------------------------


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


# ---- Copies that go wrong -----------------------------------------------------------------------


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


def test_host_memory_that_goes_before_its_copy_runs_is_reported(driver: DriverCalls) -> None:
    fake, own = driver.fake, driver.stream()
    fake.set_pace(HELD)
    source = fake.device_tensor(data())
    memory = mmap.mmap(-1, 1 << 16)
    view = torch.frombuffer(memory, dtype=torch.uint8)
    driver.register(view)
    driver.to_host(view.data_ptr(), source.data_ptr(), N, own)
    driver.unregister(view)
    driver.register(view)
    driver.to_host(view.data_ptr(), source.data_ptr(), N, own)
    libc = ctypes.CDLL(None)
    libc.munmap(ctypes.c_void_p(view.data_ptr()), ctypes.c_size_t(1 << 16))
    fake.sync()
    driver.unregister(view)
    used = f"cuMemHostUnregister: memory that cuMemcpyDtoHAsync of {N} B is going to use"
    unmapped = f"cuMemcpyDtoHAsync of {N} B: would run after its host memory was unmapped"
    assert fake.take_reports() == [
        used,
        unmapped,
        unmapped,
        "cuMemHostUnregister: memory that was unmapped while it was registered",
    ]
    replacement = libc.mmap
    replacement.restype, replacement.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p] + [ctypes.c_size_t] * 5,
    )
    assert replacement(view.data_ptr(), 1 << 16, 3, 0x32, (1 << 64) - 1, 0) == view.data_ptr()
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
