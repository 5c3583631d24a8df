"""The fake CUDA driver: what fails on demand, old drivers, kernels, captures, processes."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch
from conftest import RunPython
from fake_cuda import fake as codes
from fake_cuda.driver_calls import DriverCalls, error_of
from fake_cuda.every_call import call_everything
from fake_cuda.fake import EAGER, HELD, FakeCuda

N = 1024  # bytes


def data(value: int = 2) -> torch.Tensor:
    return torch.full((N,), value, dtype=torch.uint8)


# ---- Failures on demand -------------------------------------------------------------------------


def test_every_entry_point_is_called_and_works(driver: DriverCalls) -> None:
    held = driver.fake.live()
    results = call_everything(driver)
    assert set(results) == set(driver.fake.entry_points())
    assert set(results.values()) == {0}
    assert driver.fake.live() == held


@pytest.mark.parametrize("nth", [1, 2])
def test_every_entry_point_fails_at_the_call_that_was_asked_for(
    driver: DriverCalls, nth: int
) -> None:
    fake = driver.fake
    held = fake.live()
    for entry in fake.entry_points():
        fake.fail(entry, nth=nth, code=codes.OUT_OF_MEMORY)
        found = [call_everything(driver)[entry] for _ in range(nth + 1)]
        assert found == [0] * (nth - 1) + [codes.OUT_OF_MEMORY, 0], entry
        assert fake.live() == held, entry


def test_unknown_entry_point_cannot_be_made_to_fail(fake_cuda: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match="500"):
        fake_cuda.fail("cuMemcpyDtoH")


def test_sticky_failure_loses_the_device_of_the_context_alone(driver: DriverCalls) -> None:
    fake, held = driver.fake, driver.fake.live()
    own = driver.stream()
    fake.fail("cuEventCreate", nth=2, code=codes.ECC_UNCORRECTABLE, sticky=True)
    driver.destroy_event(driver.event())
    for _ in range(2):
        assert error_of(driver.event) == codes.ECC_UNCORRECTABLE
    assert error_of(lambda: driver.synchronize(own)) == codes.ECC_UNCORRECTABLE
    with DriverCalls(fake, device=1) as other:
        other.destroy_event(other.event())
    assert error_of(lambda: driver.destroy_stream(own)) == codes.ECC_UNCORRECTABLE
    assert fake.live() == held  # an earlier error, and destroyed all the same


def test_lost_device_never_runs_what_is_queued(driver: DriverCalls) -> None:
    fake, held = driver.fake, driver.fake.live()
    own, event, host = driver.stream(), driver.event(), data(0)
    fake.set_pace(HELD)
    driver.register(host)
    source = fake.device_tensor(data())
    driver.to_host(host.data_ptr(), source.data_ptr(), N, own)
    driver.record(event, own)
    fake.lose_device(0, codes.LAUNCH_FAILED)
    assert error_of(lambda: driver.is_done(event)) == codes.LAUNCH_FAILED
    assert error_of(lambda: driver.event_wait(event)) == codes.LAUNCH_FAILED
    assert not host.any()
    assert error_of(lambda: driver.unregister(host)) == codes.LAUNCH_FAILED
    assert error_of(lambda: driver.destroy_stream(own)) == codes.LAUNCH_FAILED
    assert error_of(lambda: driver.destroy_event(event)) == codes.LAUNCH_FAILED
    assert fake.live() == held


def test_device_is_lost_after_as_many_works_as_were_asked_for(driver: DriverCalls) -> None:
    fake, own, host = driver.fake, driver.stream(), data(0)
    fake.set_pace(EAGER)
    driver.register(host)
    source = fake.device_tensor(data())
    fake.lose_device(0, codes.ECC_UNCORRECTABLE, after_works=2)
    found = []
    for at in range(0, 4 * 100, 100):
        copy = functools.partial(driver.to_host, host.data_ptr() + at, source.data_ptr(), 100, own)
        found.append(error_of(copy))
        error_of(lambda: driver.synchronize(own))
    assert found == [0, 0, codes.ECC_UNCORRECTABLE, codes.ECC_UNCORRECTABLE]
    assert torch.equal(host[:200], data()[:200])
    assert not host[200:].any()
    error_of(lambda: driver.unregister(host))
    error_of(lambda: driver.destroy_stream(own))
    fake.reset()


# ---- Old and new drivers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver_version", "asked", "form"),
    [
        (12040, 12040, None),
        (12080, 12080, "cuMemcpyBatchAsync"),
        (12090, 12040, None),
        (13000, 12080, "cuMemcpyBatchAsync"),
        (13000, 13000, "cuMemcpyBatchAsync_v2"),
    ],
)
def test_form_of_an_entry_point_is_that_of_the_version_asked_for(
    driver: DriverCalls, driver_version: int, asked: int, form: str | None
) -> None:
    driver.fake.set_driver_version(driver_version)
    try:
        function, status = driver.entry("cuMemcpyBatchAsync", asked)
    finally:
        driver.fake.set_driver_version(13000)
    if form is None:
        assert (function, status) == (None, 1 if driver_version < 12080 else 2)
    else:
        symbol = getattr(driver.fake.library, form)
        assert (function, status) == (ctypes.cast(symbol, ctypes.c_void_p).value, 0)


def test_version_beyond_the_drivers_and_unknown_names_are_told_apart(driver: DriverCalls) -> None:
    assert driver.entry("cuNoSuchCall", 12000) == (None, 1)
    assert driver.entry("cuMemHostRegister", 4000) == (None, 2)  # only _v1, which nobody has
    assert error_of(lambda: driver.entry("cuInit", 13010)) == codes.INVALID_VALUE


# ---- Kernels ------------------------------------------------------------------------------------


def test_fatbin_is_refused_where_the_test_says_so_or_it_is_none(driver: DriverCalls) -> None:
    assert error_of(lambda: driver.kernel("dcpx_pack", b"none")) == 200  # INVALID_IMAGE
    assert error_of(lambda: driver.kernel("no_twin")) == codes.NOT_FOUND
    driver.fake.refuse_fatbin()
    assert error_of(lambda: driver.kernel("dcpx_pack")) == codes.NO_BINARY_FOR_GPU


def test_kernel_reads_its_arguments_at_the_launch_and_its_memory_when_it_runs(
    driver: DriverCalls,
) -> None:
    fake, own = driver.fake, driver.stream()
    module, fill = driver.kernel("fake_fill_kernel")
    target = fake.device_tensor(data(0))
    fake.set_pace(HELD)
    value = ctypes.c_uint8(7)
    driver.launch(fill, [ctypes.c_uint64(target.data_ptr()), ctypes.c_uint64(N), value], own)
    value.value = 8
    assert not fake.read_back(target).any()
    driver.synchronize(own)
    assert torch.equal(fake.read_back(target), data(7))
    driver.call("cuModuleUnload", ctypes.c_void_p(module))
    driver.destroy_stream(own)


def test_kernel_that_touches_what_it_cannot_loses_the_device(driver: DriverCalls) -> None:
    fake, own, host = driver.fake, driver.stream(), data()
    _, fill = driver.kernel("fake_fill_kernel")
    driver.launch(
        fill, [ctypes.c_uint64(host.data_ptr()), ctypes.c_uint64(N), ctypes.c_uint8(7)], own
    )
    assert error_of(lambda: driver.synchronize(own)) == codes.ILLEGAL_ADDRESS
    assert error_of(driver.event) == codes.ILLEGAL_ADDRESS
    assert torch.equal(host, data())
    assert fake.take_reports() == ["a kernel: host memory that is not registered"]
    error_of(lambda: driver.destroy_stream(own))


class PackTask(ctypes.Structure):
    """dcpx::device::PackTask."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("dst", "src", "begin", "end")),
        *((name, ctypes.c_uint32) for name in ("shape", "unused")),
    )


class PackShape(ctypes.Structure):
    """dcpx::device::PackShape."""

    _fields_ = (
        *((name, ctypes.c_uint64 * 8) for name in ("lengths", "src_strides", "dst_strides")),
        ("grains_per_run", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("grain_bytes", "dims")),
    )


def test_twin_of_the_pack_kernel_moves_runs_and_boxes(driver: DriverCalls) -> None:
    fake, own = driver.fake, driver.stream()
    values = torch.arange(N, dtype=torch.int64).to(torch.uint8)
    source, host = fake.device_tensor(values), data(0)
    at, to = source.data_ptr(), host.data_ptr()
    table = torch.zeros(4096, dtype=torch.uint8)
    tasks = (PackTask * 3).from_address(table.data_ptr())
    tasks[0] = PackTask(to + 3, at + 5, 0, 100, 0xFFFFFFFF)
    tasks[1] = PackTask(to + 3, at + 5, 100, 301, 0xFFFFFFFF)
    tasks[2] = PackTask(to + 512, at + 8, 0, 12, 0)  # 3 rows of 4 grains
    shapes = (PackShape * 1).from_address(table.data_ptr() + 2048)
    shapes[0].lengths[0], shapes[0].src_strides[0], shapes[0].dst_strides[0] = 3, 128, 16
    shapes[0].grains_per_run, shapes[0].grain_bytes, shapes[0].dims = 4, 4, 1
    for memory in (host, table):
        driver.register(memory)
    module, pack = driver.kernel("dcpx_pack")
    addresses = [ctypes.c_uint64(ctypes.addressof(part)) for part in (tasks, shapes)]
    driver.launch(pack, [*addresses, ctypes.c_uint64(3)], own)
    driver.synchronize(own)
    expected = data(0)
    expected[3:304] = values[5:306]
    expected[512:560].view(3, 16)[:] = values.view(-1, 128)[:3, 8:24]
    assert torch.equal(host, expected)
    for memory in (host, table):
        driver.unregister(memory)
    driver.call("cuModuleUnload", ctypes.c_void_p(module))
    driver.destroy_stream(own)


# ---- Graph captures -----------------------------------------------------------------------------


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


def test_unsafe_call_breaks_a_capture_unless_its_thread_is_relaxed(driver: DriverCalls) -> None:
    fake, event, caller = driver.fake, driver.event(), driver.fake.make_stream()
    mode = ctypes.c_int(2)
    fake.set_capturing(caller)
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == 0
    assert driver.is_done(event)
    assert not fake.is_capture_broken(caller)
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert error_of(lambda: driver.is_done(event)) == codes.CAPTURE_UNSUPPORTED
    assert fake.is_capture_broken(caller)
    assert len(fake.take_reports()) == 1
    fake.set_capturing(caller, is_capturing=False)
    driver.destroy_event(event)


# ---- Processes ----------------------------------------------------------------------------------


def test_forked_child_of_a_process_that_uses_the_driver_is_refused(
    fake_cuda: FakeCuda, run_warm: RunPython
) -> None:
    code = """
import os
from fake_cuda.driver_calls import DriverCalls
from fake_cuda.fake import NOT_INITIALIZED, FakeCuda
with DriverCalls(FakeCuda()) as driver:
    child = os.fork()
    if child == 0:
        os._exit(driver.fake.library.cuInit(0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == NOT_INITIALIZED
    driver.destroy_event(driver.event())
"""
    run_warm(code, env=fake_cuda.environment())


def test_process_ends_with_copies_queued_and_running(
    fake_cuda: FakeCuda, run_warm: RunPython
) -> None:
    code = """
from ctypes import CDLL, c_int as INT, c_size_t as SIZE, c_void_p as HANDLE
from fake_cuda.driver_calls import DriverCalls
from fake_cuda.fake import EAGER, HELD, FakeCuda
fake = FakeCuda()
driver = DriverCalls(fake).__enter__()
size = 64 << 20
host = CDLL(None).mmap  # never unmapped
host.restype, host.argtypes = HANDLE, [HANDLE, SIZE, INT, INT, INT, SIZE]
to = host(None, size, 3, 0x22, -1, 0)
driver.register_range(to, size)
source = fake.alloc(size)
for pace in (EAGER, HELD):
    fake.set_pace(pace)
    own = driver.stream()
    for _ in range(20):
        driver.to_host(to, source, size, own)
"""
    done = run_warm(code, env=fake_cuda.environment(), timeout_s=60)
    assert done.stderr == ""
