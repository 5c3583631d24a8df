"""The fake CUDA driver: hung streams, those of threads, captures, kernels, forked children."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from conftest import RunPython
from fake_cuda import fake as codes
from fake_cuda.driver_calls import DriverCalls, error_of
from fake_cuda.fake import EAGER, HUNG, FakeCuda

LEGACY, PER_THREAD = 1, 2
N = 1024  # bytes


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


@pytest.mark.slow
def test_forked_child_frees_its_tensors_and_waits_for_nothing_whoever_holds_the_fake(
    run_warm: RunPython, fake_cuda: FakeCuda
) -> None:
    code = (
        "import os, signal, threading, torch\n"
        "from fake_cuda import seam\n"
        "from fake_cuda.fake import HELD\n"
        "fake = seam.install()\n"
        "fake.set_pace(HELD)\n"
        "kept = [fake.device_tensor(torch.ones(5)) for _ in range(3)]\n"
        "fake.stream_write(kept[0], torch.zeros(5), fake.make_stream())\n"
        "is_over = threading.Event()\n"
        "def ask():\n"
        "    while not is_over.is_set():\n"
        "        fake.counts()\n"
        "threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]\n"
        "for thread in threads: thread.start()\n"
        "for _ in range(40):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        signal.alarm(300)\n"
        "        kept.clear()\n"
        "        fake.sync()\n"
        "        fake.reset(1)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "is_over.set()\n"
        "for thread in threads: thread.join()\n"
    )
    run_warm(code, env=fake_cuda.environment())
