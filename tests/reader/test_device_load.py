"""Loads into device memory, on the fake driver: bit for bit, in order, and in so many calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fake_cuda.fake import FakeCuda
from support.chunked import chunked, grid
from support.device_states import (
    DRIVERS,
    device_0,
    everywhere,
    moved,
    odd_state,
    on_host,
    scattered,
    tensors,
    use_driver,
)
from support.engine_jobs import drop_cache
from support.machine import points
from support.saves import change, data_files, raises_one, read_footer, save
from support.states import assert_same, random_bytes

from torch_dcpx import _C, DcpxReader, ReadOptions, WriteOptions
from torch_dcpx import load as dcpx_load
from torch_dcpx.errors import CorruptionError
from torch_dcpx.reader import files as read_files
from torch_dcpx.tensors import device as device_memory

KIB = 1 << 10
SLOT_BYTES = 256 * KIB
WORKERS = 3
TABLE_BYTES = 512 * KIB  # of a stream that has launched the kernel


def options(**kwargs: Any) -> ReadOptions:
    return ReadOptions(**{"workers": WORKERS, "slot_bytes": SLOT_BYTES, **kwargs})


def load(state: Any, directory: Path, **kwargs: Any) -> DcpxReader:
    reader = DcpxReader(directory, options=options(**kwargs))
    dcp.load(state, storage_reader=reader, no_dist=True)
    return reader


def blank(state: Any) -> Any:
    """Returns targets of the same strides that hold other bytes."""
    if isinstance(state, torch.Tensor):
        made = torch.empty_strided(state.shape, state.stride(), dtype=state.dtype)
        raw = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())  # type: ignore[call-overload]
        raw.fill_(1 if state.dtype == torch.bool else 0xA5)
        return made
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(value) for value in state] if isinstance(state, list) else None


@pytest.fixture(autouse=True)
def driver_of_the_test(fake_device_memory: FakeCuda) -> None:
    """The fake's memory is device memory, and its driver is asked for anew."""
    _C.forget_device_driver()


# ---- What is read -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "place"),
    [*zip(DRIVERS, 2 * [device_0, everywhere], strict=True), (DRIVERS[3], device_0)],
)
def test_state_on_devices_is_loaded_bit_for_bit(
    fake_cuda: FakeCuda,
    tmp_path: Path,
    seed: int,
    driver: tuple[int, bool],
    place: Callable[[str], int],
) -> None:
    use_driver(fake_cuda, *driver)
    expected = odd_state(seed)
    del expected["expanded"], expected["repeated"]  # no memory to load them into
    save(expected, tmp_path, "stock" if driver == DRIVERS[3] else "ours")
    target = moved(fake_cuda, blank(expected), place)
    if driver == DRIVERS[1]:
        dcpx_load(target, tmp_path, options=options())
    else:
        load(target, tmp_path)
    assert_same(expected, on_host(fake_cuda, target))


def test_direct_reads_go_to_devices_bit_for_bit(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    expected = {**tensors(3, 900 * KIB), **{f"s{i}": torch.arange(40.0) + i for i in range(99)}}
    save(expected, tmp_path)
    for verify in ("blocks", "none"):
        drop_cache(tmp_path)
        target = moved(fake_cuda, blank(expected), everywhere)
        load(target, tmp_path, verify=verify)
        assert_same(expected, on_host(fake_cuda, target))


@pytest.mark.parametrize("driver", DRIVERS)
def test_chunks_come_into_any_strides_on_devices_and_touch_nothing_else(
    fake_cuda: FakeCuda, tmp_path: Path, driver: tuple[int, bool], seed: int
) -> None:
    pick = random.Random(seed)
    use_driver(fake_cuda, *driver)
    expected, target, memories = {}, {}, {}
    for name in "abc":
        shape = [pick.randint(1, n) for n in pick.choice([(900_000,), (700, 900), (40, 90, 200)])]
        dtype = pick.choice([torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
        whole = random_bytes(
            tuple(shape), dtype, torch.Generator().manual_seed(pick.randrange(1 << 30))
        )
        boxes = grid(shape, [pick.randint(1, min(3, n)) for n in shape])
        made = [scattered(fake_cuda, box.sizes, dtype, pick) for box in boxes]
        expected[name], memories[name] = whole, [memory for memory, _ in made]
        target[name] = chunked(boxes, [part for _, part in made], shape)
    save(expected, tmp_path, options=WriteOptions(slot_bytes=SLOT_BYTES))
    load(target, tmp_path)
    for name, whole in expected.items():
        parts = zip(target[name].boxes, target[name].parts, memories[name], strict=True)
        for box, part, memory in parts:
            raw = torch.full((memory.nbytes,), 0xA5, dtype=torch.uint8)
            wanted = raw.view(whole.dtype)
            view = wanted.as_strided(part.shape, part.stride(), part.storage_offset())
            view.copy_(whole[box.slices])
            assert_same(wanted, fake_cuda.read_back(memory))


@pytest.fixture
def converting(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets torch's `copy_` convert between tensors of the fake's devices; notes their dtypes."""
    host_copy, calls = torch.Tensor.copy_, []

    def copy(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if fake_cuda.ordinal_of(self) < 0:
            return host_copy(self, source)
        is_host = fake_cuda.ordinal_of(source) < 0
        assert is_host or fake_cuda.ordinal_of(source) == fake_cuda.ordinal_of(self)
        calls.append(f"{source.dtype} to {self.dtype}" + " from the host" * is_host)
        twin = fake_cuda.read_back(self)
        host_copy(twin, source if is_host else fake_cuda.read_back(source))
        fake_cuda.stream_write(self, twin)
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    return calls


def test_another_dtype_is_staged_and_converted_on_the_device(
    fake_cuda: FakeCuda, tmp_path: Path, converting: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_files, "_DEVICE_STAGING_BYTES", SLOT_BYTES)
    stored = {f"t{i}": torch.randn(100, 300) for i in range(9)}
    save(stored, tmp_path)
    expected = {key: value.bfloat16() for key, value in stored.items()}
    target = moved(fake_cuda, blank(expected), device_0)
    target_bytes = fake_cuda.count("device_peak_bytes")
    fake_cuda.clear_counts()
    load(target, tmp_path, host_memory_bytes=WORKERS * SLOT_BYTES)
    fake_cuda.sync()
    assert_same(expected, on_host(fake_cuda, target))
    assert converting == ["torch.float32 to torch.bfloat16"] * 9
    assert fake_cuda.count("device_peak_bytes") - target_bytes <= SLOT_BYTES  # two at one time
    assert fake_cuda.count("bytes_to_device") == 9 * 120_000


def test_a_tensor_above_a_devices_bound_is_staged_on_the_host(
    fake_cuda: FakeCuda, tmp_path: Path, converting: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_files, "_DEVICE_STAGING_BYTES", 119_999)
    stored = {f"t{i}": torch.randn(100, 300) for i in range(3)}
    save(stored, tmp_path)
    expected = {key: value.bfloat16() for key, value in stored.items()}
    target = moved(fake_cuda, blank(expected), device_0)
    target_bytes = fake_cuda.count("device_peak_bytes")
    load(target, tmp_path)
    fake_cuda.sync()
    assert_same(expected, on_host(fake_cuda, target))
    assert converting == ["torch.float32 to torch.bfloat16 from the host"] * 3
    assert fake_cuda.count("device_peak_bytes") == target_bytes


def test_tied_weights_on_a_device_hold_what_was_read_last(
    fake_cuda: FakeCuda, tmp_path: Path
) -> None:
    expected = {f"t{i}": torch.full((50_000,), float(i)) for i in range(4)}
    save(expected, tmp_path)
    one = fake_cuda.empty((50_000,), torch.float32)
    target = dict.fromkeys(expected, one)
    load(target, tmp_path)
    assert_same(expected["t3"], fake_cuda.read_back(one))


def test_each_window_waits_for_the_streams_of_all_devices(
    fake_cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = b"x" * (900 * KIB)
    state = {
        f"{i}.{kind}": blob if kind else torch.full((9,), i) for i in range(4) for kind in (0, 1)
    }
    save(state, tmp_path)
    target = moved(fake_cuda, blank(state), device_0, "")
    waits: list[set[int]] = []
    source_events = device_memory.source_events

    def noted(ordinals: set[int]) -> Any:
        waits.append(set(ordinals))
        return source_events(ordinals)

    monkeypatch.setattr(device_memory, "source_events", noted)
    load(target, tmp_path, host_memory_bytes=1024 * KIB, workers=1)
    assert waits == [{0}] * 4
    assert_same(state, on_host(fake_cuda, target))


def test_damaged_block_reaches_no_device(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    expected = tensors(3, 600 * KIB)
    save(expected, tmp_path)
    (file,) = data_files(tmp_path)
    row = read_footer(tmp_path / file).row("t1")
    change(tmp_path / file, row.payload_offset + 300 * KIB, b"damage")
    target = moved(fake_cuda, blank(expected), device_0)
    with raises_one(CorruptionError) as raised:
        load(target, tmp_path, workers=1)
    assert raised.error.fqn == "t1"
    assert raised.error.touched[0] == "t0"
    found = on_host(fake_cuda, target)
    assert b"damage" not in bytes(found["t1"].numpy())
    assert_same(blank(expected)["t2"], found["t2"])


# ---- In which order -----------------------------------------------------------------------------


def load_behind_a_step(fake: FakeCuda, path: Path, seed: int) -> None:
    """Loads while a step on its way to the state would overwrite it, and asserts that it does not,
    and that all is there at once.
    """
    fake.reset(seed)
    expected = {**tensors(4, 700 * KIB), "small": torch.arange(77.0)}
    if not path.exists():
        save(expected, path)
    target = moved(fake, blank(expected), device_0)
    stream = fake.current_streams[0] = fake.make_stream()
    for value in target.values():
        fake.stream_write(value, torch.zeros(value.shape, dtype=value.dtype), stream)
    load(target, path)
    assert_same(expected, on_host(fake, target))
    fake.stream_sync(stream)
    assert_same(expected, on_host(fake, target))


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_load_comes_behind_what_the_current_stream_had_queued_by_any_seed(
    fake_cuda: FakeCuda, tmp_path: Path, hundred: int
) -> None:
    for number in range(hundred, 10 * points(100), 10):
        load_behind_a_step(fake_cuda, tmp_path / "ckpt", number)


def load_through_two_slots(fake: FakeCuda, path: Path, seed: int) -> None:
    """Loads ten slots' bytes by one worker: each slot is used again and again."""
    fake.reset(seed)
    expected = tensors(5, 2 * SLOT_BYTES + 4096)
    if not path.exists():
        save(expected, path)
    target = moved(fake, blank(expected), device_0)
    load(target, path, workers=1)
    assert_same(expected, on_host(fake, target))


def test_loads_come_behind_the_current_stream_and_fill_slots_whose_copies_are_done(
    fake_cuda: FakeCuda, tmp_path: Path
) -> None:
    for number in range(6):
        load_behind_a_step(fake_cuda, tmp_path / "step", number)
        load_through_two_slots(fake_cuda, tmp_path / "slots", number)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_slot_is_filled_again_when_its_copies_are_done_by_any_seed(
    fake_cuda: FakeCuda, tmp_path: Path, hundred: int
) -> None:
    for number in range(hundred, 10 * points(100), 10):
        load_through_two_slots(fake_cuda, tmp_path / "ckpt", number)


# ---- In how many calls --------------------------------------------------------------------------


def copies_of(fake: FakeCuda, state: dict[str, torch.Tensor], path: Path) -> dict[str, int]:
    """Returns what a load into device 0 asks the driver for, without what is 0."""
    save(state, path)
    target = moved(fake, blank(state), device_0)
    fake.clear_counts()
    _C.clear_device_counters()
    load(target, path)
    assert_same(state, on_host(fake, target))
    return {name: count for name, count in _C.device_counters().items() if count}


def test_large_tensor_is_one_copy_a_cell(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    state = {"t": torch.arange(1 << 18, dtype=torch.int32)}
    assert copies_of(fake_cuda, state, tmp_path) == {
        "copies_1d": 5,  # the payload begins and ends within a cell
        "bytes_to_device": 1 << 20,
        "events_recorded": 1 + 5,
    }


def test_small_tensors_are_one_launch_a_cell_and_no_copy(
    fake_cuda: FakeCuda, tmp_path: Path
) -> None:
    use_driver(fake_cuda, 13000, has_kernel=True)
    counts = copies_of(fake_cuda, tensors(1000, 1000), tmp_path)
    assert counts["kernels"] == counts["events_recorded"] - 1 == 8
    assert counts["bytes_to_device"] == 1_000_000
    assert "copies_1d" not in counts


@pytest.mark.parametrize(
    ("memory_bytes", "slots", "tables"),
    [
        (64 << 20, 6, 6),
        (6 * (SLOT_BYTES + TABLE_BYTES), 6, 6),
        (6 * (SLOT_BYTES + TABLE_BYTES) - 1, 4, 4),  # a worker less
        (2 * (SLOT_BYTES + TABLE_BYTES), 2, 2),
        (5 * SLOT_BYTES, 4, 0),  # no room for tables: copies do without the kernel
        (3 * SLOT_BYTES, 2, 0),
        (SLOT_BYTES, 1, 0),
    ],
)
def test_load_holds_two_slots_a_worker_and_their_tables_within_its_budget(
    fake_cuda: FakeCuda, tmp_path: Path, memory_bytes: int, slots: int, tables: int
) -> None:
    use_driver(fake_cuda, 13000, has_kernel=True)
    expected = {
        name: tensor
        for i in range(8)
        for name, tensor in {f"t{i}": torch.randn(1 << 18), **small_ones(i)}.items()
    }
    save(expected, tmp_path)
    target = moved(fake_cuda, blank(expected), device_0)
    before = fake_cuda.count("pinned_bytes")
    fake_cuda.clear_counts()
    _C.clear_device_counters()
    workers = min(WORKERS, memory_bytes // SLOT_BYTES)
    reader = load(target, tmp_path, host_memory_bytes=memory_bytes, workers=workers)
    assert reader.last_report is not None
    assert reader.last_report.slot_bytes == slots * SLOT_BYTES
    assert fake_cuda.count("pinned_peak_bytes") - before <= memory_bytes
    tables_bytes = fake_cuda.count("pinned_peak_bytes") - before - slots * SLOT_BYTES
    assert tables_bytes % TABLE_BYTES == 0
    assert 0 <= tables_bytes <= tables * TABLE_BYTES
    assert (_C.device_counters()["kernels"] > 0) == (tables > 0)
    assert fake_cuda.notes() == []
    assert_same(expected, on_host(fake_cuda, target))


def small_ones(number: int) -> dict[str, torch.Tensor]:
    return {f"s{number}.{i}": torch.arange(40.0) + i for i in range(30)}
