"""The fake CUDA driver: streams that hang, default streams of threads, forked children."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import RunPython
from fake_cuda.driver_calls import DriverCalls
from fake_cuda.fake import EAGER, HUNG, FakeCuda

LEGACY, PER_THREAD = 1, 2


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
