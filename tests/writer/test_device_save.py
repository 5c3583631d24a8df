"""Saves of device memory, on the fake driver: bit for bit, in order, and in so many calls."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fake_cuda.fake import FakeCuda
from support.chunked import Chunked, chunked, grid
from support.device_states import (
    DRIVERS,
    device_0,
    everywhere,
    moved,
    odd_state,
    scattered,
    tensors,
    use_driver,
)
from support.machine import points
from support.saves import assert_loads, data_files, save
from support.states import random_bytes
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import torch_dcpx
from torch_dcpx import _C, DcpxWriter, WriteOptions
from torch_dcpx.tensors import device as device_memory

KIB = 1 << 10
SLOT_BYTES = 256 * KIB
WORKERS = 3
TABLE_BYTES = 512 * KIB  # of a stream that has launched the kernel


def options(**kwargs: Any) -> WriteOptions:
    given = {"workers": WORKERS, "slot_bytes": SLOT_BYTES, "durability": "none", **kwargs}
    return WriteOptions(**given)


@pytest.fixture(autouse=True)
def driver_of_the_test(fake_device_memory: FakeCuda) -> None:
    """The fake's memory is device memory, and its driver is asked for anew."""
    _C.forget_device_driver()


# ---- What is written ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "place"),
    [*zip(DRIVERS, 2 * [device_0, everywhere], strict=True), (DRIVERS[3], device_0)],
)
def test_state_on_devices_is_saved_bit_for_bit(
    fake_cuda: FakeCuda,
    tmp_path: Path,
    seed: int,
    driver: tuple[int, bool],
    place: Callable[[str], int],
) -> None:
    use_driver(fake_cuda, *driver)
    expected = odd_state(seed)
    state = moved(fake_cuda, expected, place)
    if driver == DRIVERS[1]:
        torch_dcpx.save(state, tmp_path, options=options())
    else:
        save(state, tmp_path, options=options())
    assert_loads(expected, tmp_path)


def test_file_does_not_tell_where_its_state_was(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    state = odd_state(7)
    save(state, tmp_path / "host", options=options(in_place="never"))
    save(moved(fake_cuda, state, device_0), tmp_path / "device", options=options())
    contents = []
    for name in ("host", "device"):
        (file,) = data_files(tmp_path / name)
        contents.append((tmp_path / name / file).read_bytes()[:-128])  # its tail has a random id
    assert contents[0] == contents[1]


def scattered_chunks(fake: FakeCuda, whole: torch.Tensor, pick: random.Random) -> Chunked:
    """Returns a tensor whose chunks lie anyhow on the devices."""
    boxes = grid(whole.shape, [pick.randint(1, min(3, n)) for n in whole.shape])
    parts = []
    for box in boxes:
        memory, part = scattered(fake, box.sizes, whole.dtype, pick)
        twin = torch.zeros(memory.shape, dtype=whole.dtype)
        twin.as_strided(part.shape, part.stride(), part.storage_offset()).copy_(whole[box.slices])
        fake.write(memory.data_ptr(), bytes(twin.view(torch.uint8).numpy()))
        parts.append(part)
    return chunked(boxes, parts, whole.shape)


@pytest.mark.parametrize("driver", DRIVERS)
def test_chunks_that_lie_anyhow_on_devices_are_saved_bit_for_bit(
    fake_cuda: FakeCuda, tmp_path: Path, driver: tuple[int, bool], seed: int
) -> None:
    pick = random.Random(seed)
    use_driver(fake_cuda, *driver)
    expected = {}
    for name in "abc":
        shape = [pick.randint(1, n) for n in pick.choice([(900_000,), (700, 900), (40, 90, 200)])]
        dtype = pick.choice([torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
        expected[name] = random_bytes(
            tuple(shape), dtype, torch.Generator().manual_seed(pick.randrange(1 << 30))
        )
    state = {key: scattered_chunks(fake_cuda, whole, pick) for key, whole in expected.items()}
    save(state, tmp_path, options=options())
    assert_loads(expected, tmp_path)


def test_save_without_page_locked_slots_is_right_and_says_why(
    fake_cuda: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cuda.limit_pinned(0)
    expected = odd_state(4)
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        save(moved(fake_cuda, expected, everywhere), tmp_path, options=options())
    assert_loads(expected, tmp_path)
    (told,) = [record for record in caplog.records if record.name == "torch_dcpx"]
    assert "cuMemHostRegister" in told.getMessage()


def test_device_that_no_driver_serves_is_copied_by_torch(
    fake_cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tensors(5, 200 * KIB)
    state = moved(fake_cuda, expected, device_0)
    monkeypatch.setattr(device_memory, "ordinal_of", lambda _: -1)

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        return fake_cuda.read_back(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    save(state, tmp_path, options=options())
    assert_loads(expected, tmp_path)
    assert fake_cuda.count("bytes_to_host") == 0


# ---- In which order -----------------------------------------------------------------------------


def save_behind_a_step(fake: FakeCuda, path: Path, seed: int) -> None:
    """Saves while an optimizer's step is on its way to the state, and asserts that it is in it."""
    fake.reset(seed)
    expected = {**tensors(4, 700 * KIB, seed), "small": torch.arange(77.0)}
    state = moved(fake, {key: torch.zeros_like(t) for key, t in expected.items()}, device_0)
    stream = fake.make_stream()
    for key, data in expected.items():
        fake.stream_write(state[key], data, stream)
    expected["columns"] = expected["t1"].view(700, KIB)[:, 100:700]
    state["columns"] = state["t1"].view(700, KIB)[:, 100:700]
    fake.current_streams[0] = stream
    save(state, path, options=options())
    assert_loads(expected, path)


def test_save_sees_what_the_current_stream_had_queued(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    for number in range(6):
        save_behind_a_step(fake_cuda, tmp_path / str(number), number)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_save_sees_what_the_current_stream_had_queued_by_any_seed(
    fake_cuda: FakeCuda, tmp_path: Path, hundred: int
) -> None:
    for number in range(hundred, 10 * points(100), 10):
        save_behind_a_step(fake_cuda, tmp_path, number)


class Making(DefaultSavePlanner):
    """Makes every tensor anew on the device, where the bytes are still to be computed."""

    def __init__(self, fake: FakeCuda, computed: dict[str, torch.Tensor], stream: int) -> None:
        super().__init__()
        self._fake, self._computed, self._stream = fake, computed, stream

    def transform_object(self, write_item: Any, _: Any) -> Any:
        data = self._computed[write_item.index.fqn]
        made = self._fake.empty(data.shape, data.dtype)
        self._fake.stream_write(made, data, self._stream)
        return made


@pytest.mark.parametrize("number", range(3))
def test_each_window_sees_what_a_planner_has_just_begun_to_compute(
    fake_cuda: FakeCuda, tmp_path: Path, number: int
) -> None:
    fake_cuda.reset(number)
    expected = tensors(9, 100 * KIB, number)
    state = moved(fake_cuda, {key: torch.zeros_like(t) for key, t in expected.items()}, device_0)
    state_bytes = fake_cuda.count("device_peak_bytes")
    stream = fake_cuda.current_streams[0] = fake_cuda.make_stream()
    writer = DcpxWriter(tmp_path, per_thread_copy_ahead=1, options=options())
    planner = Making(fake_cuda, expected, stream)
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    assert_loads(expected, tmp_path)
    assert fake_cuda.count("cuStreamIsCapturing") == 5  # windows of two tensors, and one of one
    assert fake_cuda.count("device_peak_bytes") <= state_bytes + 3 * 104 * KIB


# ---- In how many calls --------------------------------------------------------------------------


def copies_of(fake: FakeCuda, state: Any, directory: Path) -> dict[str, int]:
    """Returns what a save of `state` on device 0 asks the driver for, without what is 0."""
    on_device = moved(fake, state, device_0)
    fake.clear_counts()
    _C.clear_device_counters()
    save(on_device, directory, options=options())
    return {name: count for name, count in _C.device_counters().items() if count}


def test_large_tensor_is_one_copy_a_segment(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    # Behind a page with its head: 252 KiB up to the first whole segment, three segments, 4 KiB.
    assert copies_of(fake_cuda, {"t": torch.arange(1 << 18, dtype=torch.int32)}, tmp_path) == {
        "copies_1d": 5,
        "bytes_to_host": 1 << 20,
        "events_recorded": 1 + 5,  # on the caller's stream, and one a segment
    }
    assert fake_cuda.count("cuMemcpyDtoHAsync") == 5


@pytest.mark.parametrize("has_kernel", [True, False])
def test_small_tensors_are_one_launch_or_one_batch_a_segment(
    fake_cuda: FakeCuda, tmp_path: Path, has_kernel: bool
) -> None:
    use_driver(fake_cuda, 13000 if has_kernel else 12080, has_kernel)
    calls, pieces = ("kernels", "kernel_pieces") if has_kernel else ("batches", "batch_pieces")
    assert copies_of(fake_cuda, tensors(1000, 1000), tmp_path) == {
        calls: 8, pieces: 1000, "bytes_to_host": 1_000_000, "events_recorded": 1 + 8
    }  # fmt: skip
    assert fake_cuda.count("cuLaunchKernel") == 8 * has_kernel


def test_columns_of_a_matrix_are_one_copy_a_segment_and_its_cut_rows(
    fake_cuda: FakeCuda, tmp_path: Path
) -> None:
    columns = torch.arange(200 * 4000, dtype=torch.int32).view(200, 4000)[:, :1500]
    counts = copies_of(fake_cuda, {"t": columns}, tmp_path)  # rows of 6,000 B
    assert counts["copies_2d"] == 5
    assert counts["bytes_to_host"] == columns.numel() * 4
    assert counts["events_recorded"] == 1 + 6


@pytest.mark.parametrize(
    ("memory_bytes", "workers", "tables"),
    [
        (None, WORKERS, 2),
        (WORKERS * (SLOT_BYTES + 2 * TABLE_BYTES), WORKERS, 2),  # a worker has two streams
        (WORKERS * (SLOT_BYTES + 2 * TABLE_BYTES) - 1, WORKERS - 1, 2),
        (WORKERS * SLOT_BYTES, WORKERS, 0),  # no room for tables: copies do without the kernel
    ],
)
def test_save_holds_its_slots_and_their_tables_within_its_budget(
    fake_cuda: FakeCuda, tmp_path: Path, memory_bytes: int | None, workers: int, tables: int
) -> None:
    use_driver(fake_cuda, 13000, has_kernel=True)
    expected = {**tensors(8, 1 << 20), **{f"s{i}": torch.arange(30.0) + i for i in range(200)}}
    state = moved(fake_cuda, expected, everywhere)
    before = fake_cuda.count("pinned_bytes")
    fake_cuda.clear_counts()
    _C.clear_device_counters()
    writer = DcpxWriter(tmp_path, options=options(host_memory_bytes=memory_bytes))
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert writer.last_report is not None
    assert writer.last_report.slot_bytes == workers * SLOT_BYTES
    tables_bytes = fake_cuda.count("pinned_peak_bytes") - before - workers * SLOT_BYTES
    assert tables_bytes % TABLE_BYTES == 0
    assert 0 <= tables_bytes <= tables * workers * TABLE_BYTES
    assert (_C.device_counters()["kernels"] > 0) == (tables > 0)
    assert fake_cuda.notes() == []  # no copy went to other memory
    assert_loads(expected, tmp_path)
