"""Calls of the driver that fail, in saves and loads: a typed error, nothing lost, nothing left."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fake_cuda import fake as codes
from fake_cuda.fake import FakeCuda
from support.device_states import device_0, moved, on_host, tensors, use_driver
from support.saves import assert_loads, files_in, raises_one, save
from support.states import assert_same
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import _C, DcpxReader, ReadOptions, WriteOptions
from torch_dcpx.errors import StagingError

KIB = 1 << 10
SAVING = WriteOptions(workers=2, slot_bytes=256 * KIB, durability="none")
LOADING = ReadOptions(workers=2, slot_bytes=256 * KIB)

# Without a context nothing can be given back: what is registered stays so until the next
# registration, after its memory is gone, which the fake reports.
CONTEXTS = {"cuCtxPushCurrent", "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode"}

# What a copy cannot do without: their failure is the save's. Others are a slower way, or an end.
NEEDED = {
    "cuEventCreate",
    "cuEventQuery",
    "cuEventRecord",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuStreamCreateWithPriority",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
}


@pytest.fixture(autouse=True)
def driver_of_the_test(fake_device_memory: FakeCuda) -> None:
    """The fake's memory is device memory, and its driver is asked for anew."""
    _C.forget_device_driver()


def state_of(seed: int) -> dict[str, torch.Tensor]:
    made = tensors(2, 500 * KIB, seed)
    made["columns"] = made["t1"].view(50, 10 * KIB)[:, : 9 * KIB]
    return {**made, **{f"small{i}": torch.arange(50.0) + i + seed for i in range(30)}}


def load(state: Any, directory: Path) -> None:
    dcp.load(state, storage_reader=DcpxReader(directory, options=LOADING), no_dist=True)


def calls_of(fake: FakeCuda, work: Any) -> dict[str, int]:
    """Returns how often `work` calls each entry point of the driver."""
    fake.clear_counts()
    work()
    return {name: n for name, n in fake.counts().items() if name.startswith("cu") and n}


class Held:
    """What the driver holds for this process, but for the kernel's module."""

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake
        self._before = self._live()

    def _live(self) -> dict[str, int]:
        return {kind: n for kind, n in self._fake.live().items() if kind != "modules"}

    def assert_no_more(self, after: object) -> None:
        now = self._live()
        assert all(now[kind] <= n for kind, n in self._before.items()), (after, now, self._before)
        assert self._fake.reports() == [], after
        assert self._fake.library.fake_context_depth() == 0, after


def staging_error(work: Callable[[], None]) -> dict[str, Any] | None:
    """Returns text and fields of the error that `work` ends with; None where it ends well."""
    try:
        work()
    except CheckpointException as caught:
        error = caught.failures[0][0]
        assert type(error) is StagingError, repr(error)
        for raised in (caught, error):  # frames hold the events that they asked for
            traceback.clear_frames(raised.__traceback__)
        return {"text": str(error), "fqn": error.fqn, "touched": error.touched}
    return None


def every(calls: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Yields each entry point with the numbers of its first call, a middle one and the last."""
    for entry, count in calls.items():
        for nth in sorted({1, (count + 1) // 2, count}):
            yield entry, nth


CODES = [(True, "INVALID_HANDLE"), (False, "INVALID_HANDLE"), (True, "UNKNOWN")]


@pytest.mark.slow
@pytest.mark.parametrize(("has_kernel", "code"), CODES)
def test_failed_call_fails_the_save_before_its_commit_or_nothing(
    fake_cuda: FakeCuda, tmp_path: Path, has_kernel: bool, code: str
) -> None:
    use_driver(fake_cuda, 13000, has_kernel)
    first, second = state_of(0), state_of(1)
    save(moved(fake_cuda, first, device_0), tmp_path / "a", options=SAVING)
    state = moved(fake_cuda, second, device_0)
    calls = calls_of(fake_cuda, lambda: save(state, tmp_path / "b", options=SAVING))
    before = files_in(tmp_path / "a")
    failed = set()
    for entry, nth in every(calls):
        held = Held(fake_cuda)
        fake_cuda.fail(entry, nth, getattr(codes, code))
        error = staging_error(lambda: save(state, tmp_path / "a", options=SAVING))
        fake_cuda.clear_failures()
        if error is not None:
            assert error["text"].startswith(entry.removesuffix("_v2")), (entry, nth, error)
            assert f"CUDA_ERROR_{code} ({getattr(codes, code)})" in error["text"]
            assert files_in(tmp_path / "a") == before, (entry, nth)
            failed.add(entry)
        else:
            assert_loads(second, tmp_path / "a")
            save(first, tmp_path / "a", options=SAVING)
            before = files_in(tmp_path / "a")
        if entry in CONTEXTS:
            save(state, tmp_path / "b", options=SAVING)
            fake_cuda.take_reports()
        else:
            held.assert_no_more((entry, nth))
    assert (NEEDED & set(calls)) - failed == set()
    save(state, tmp_path / "a", options=SAVING)
    assert_loads(second, tmp_path / "a")


@pytest.mark.slow
@pytest.mark.parametrize(("has_kernel", "code"), CODES)
def test_failed_call_fails_the_load_and_says_what_it_touched(
    fake_cuda: FakeCuda, tmp_path: Path, has_kernel: bool, code: str
) -> None:
    use_driver(fake_cuda, 13000, has_kernel)
    expected = state_of(0)
    save(expected, tmp_path, options=SAVING)
    blank = {key: torch.zeros_like(value) for key, value in expected.items()}
    target = moved(fake_cuda, blank, device_0)
    calls = calls_of(fake_cuda, lambda: load(target, tmp_path))
    failed = set()
    for entry, nth in every(calls):
        held = Held(fake_cuda)
        target = moved(fake_cuda, blank, device_0)
        fake_cuda.fail(entry, nth, getattr(codes, code))
        error = staging_error(partial(load, target, tmp_path))
        fake_cuda.clear_failures()
        if error is not None:
            assert error["text"].startswith(entry.removesuffix("_v2")), (entry, nth, error)
            failed.add(entry)
            for key in set(expected) - set(error["touched"]):
                assert_same(blank[key], fake_cuda.read_back(target[key]))
        else:
            assert_same(expected, on_host(fake_cuda, target))
        if entry in CONTEXTS:
            load(target, tmp_path)
            fake_cuda.take_reports()
        else:
            held.assert_no_more((entry, nth))
    assert (NEEDED & set(calls)) - failed == set()
    load(target, tmp_path)
    assert_same(expected, on_host(fake_cuda, target))


def test_error_of_a_copy_names_its_tensor(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    state = moved(fake_cuda, {"layer.0": torch.arange(5000.0)}, device_0)
    save(state, tmp_path, options=SAVING)
    for entry, work in (
        ("cuMemcpyDtoHAsync", lambda: save(state, tmp_path / "new", options=SAVING)),
        ("cuMemcpyHtoDAsync", lambda: load(state, tmp_path)),
        ("cuStreamCreateWithPriority", lambda: load(state, tmp_path)),
    ):
        fake_cuda.fail(entry, 1, codes.ILLEGAL_ADDRESS)
        with raises_one(StagingError) as raised:
            work()
        assert raised.error.fqn == "layer.0"
        assert str(raised.error).startswith(f"{entry}: CUDA_ERROR_ILLEGAL_ADDRESS (700): ")


def test_capture_of_a_graph_is_refused_before_anything_is_written_or_read(
    fake_cuda: FakeCuda, tmp_path: Path
) -> None:
    expected = state_of(2)
    state = moved(fake_cuda, expected, device_0)
    save(state, tmp_path, options=SAVING)
    before = files_in(tmp_path)
    stream = fake_cuda.current_streams[0] = fake_cuda.make_stream()
    fake_cuda.set_capturing(stream)
    with raises_one(StagingError):
        save(state, tmp_path, options=SAVING)
    assert files_in(tmp_path) == before
    with raises_one(StagingError) as raised:
        load(state, tmp_path)
    assert raised.error.touched == ()
    assert not fake_cuda.is_capture_broken(stream)
    fake_cuda.set_capturing(stream, False)
    save(state, tmp_path, options=SAVING)


@pytest.mark.parametrize("works", [0, 3, 7])
@pytest.mark.parametrize("call", ["save", "load"])
def test_lost_device_fails_the_call_and_keeps_what_was_there(
    fake_cuda: FakeCuda, tmp_path: Path, call: str, works: int
) -> None:
    first = state_of(3)
    save(first, tmp_path, options=SAVING)
    before = files_in(tmp_path)
    state = moved(fake_cuda, state_of(4), device_0)
    fake_cuda.limit_pinned(0)  # what is registered with a lost device cannot be given back
    fake_cuda.lose_device(after_works=works)
    with raises_one(StagingError) as raised:
        save(state, tmp_path, options=SAVING) if call == "save" else load(state, tmp_path)
    assert "CUDA_ERROR_LAUNCH_FAILED (719)" in str(raised.error)
    assert files_in(tmp_path) == before
    assert_loads(first, tmp_path)  # the host needs no device


def test_device_that_is_lost_at_the_last_copy_fails_the_load(
    fake_cuda: FakeCuda, tmp_path: Path
) -> None:
    expected = {"t": torch.arange(100_000.0)}
    save(expected, tmp_path, options=SAVING)
    target = moved(fake_cuda, {"t": torch.zeros(100_000)}, device_0)
    reader = ReadOptions(workers=1, slot_bytes=256 * KIB)
    fake_cuda.set_pace(codes.HELD)  # a copy runs when somebody waits for it, and none before

    def load_by_one_worker() -> None:
        dcp.load(target, storage_reader=DcpxReader(tmp_path, options=reader), no_dist=True)

    before = fake_cuda.count("works_run")
    load_by_one_worker()
    copies = fake_cuda.count("works_run") - before
    assert copies == 2  # into the two slots
    fake_cuda.limit_pinned(0)  # what is registered with a lost device cannot be given back
    fake_cuda.lose_device(after_works=copies)
    with raises_one(StagingError) as raised:
        load_by_one_worker()
    assert "CUDA_ERROR_LAUNCH_FAILED (719)" in str(raised.error)
    assert raised.error.touched == ("t",)
