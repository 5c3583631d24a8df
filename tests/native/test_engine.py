"""WriteJob and ReadJob through the door; the oracles are torch.load and tensor slicing."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_jobs import (
    SLOT_BYTES,
    Saved,
    TensorSpec,
    drop_cache,
    item_type,
    locate,
    make,
    open_directory,
    read_job,
    scratch,
    specs,
    write,
    write_row,
)
from support.machine import points
from support.states import assert_same

from torch_dcpx import _C
from torch_dcpx.errors import CorruptionError, PlanError, StorageError
from torch_dcpx.reader.locate import Located
from torch_dcpx.reader.rows import ReadRow
from torch_dcpx.tensors.memory import is_dense

BLOCK_BYTES = 64 << 10
CANARY = 0xA5

# ---- What is written ----------------------------------------------------------------------------

some_items = st.lists(st.one_of(specs, st.binary(max_size=300)), min_size=1, max_size=8)
jobs = st.fixed_dictionaries(
    {
        "workers": st.integers(1, 5),
        "segment_bytes": st.sampled_from([256 << 10, 260 << 10, 1 << 20]),
        "use_direct": st.booleans(),
        "files_at_once": st.integers(1, 4),
        "in_place": st.sampled_from(["auto", "always", "never"]),
    }
)


def make_items(described: Sequence[TensorSpec | bytes]) -> list[torch.Tensor | bytes]:
    return [make(item) if isinstance(item, TensorSpec) else item for item in described]


@settings(max_examples=points(60))
@given(described=some_items, job=jobs, windows=st.integers(1, 4), spread=st.floats(0, 1))
def test_every_written_item_loads_with_torch_alone(
    described: list[TensorSpec | bytes], job: dict[str, Any], windows: int, spread: float
) -> None:
    files = 1 + int(spread * (len(described) - 1))
    with scratch() as directory:
        saved = write(directory, make_items(described), files=files, windows=windows, **job)
        total = sum(row[2] for row in saved.files)
        assert saved.report["direct_bytes"] + saved.report["buffered_bytes"] <= total
        assert saved.report["slot_bytes"] <= job["workers"] * job["segment_bytes"]
        for item, (file, offset, nbytes, _) in zip(saved.items, saved.wanted, strict=True):
            data = (directory / saved.files[file][0]).read_bytes()[offset : offset + nbytes]
            if isinstance(item, bytes):
                assert data == item
            else:
                loaded = torch.load(io.BytesIO(data), weights_only=True)
                assert_same(compact(item), compact(loaded))
                if is_dense(item):
                    assert loaded.stride() == item.stride() or item.numel() == 0


# ---- What is read -------------------------------------------------------------------------------


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the strides of C order, also where a length of 1 has an odd one."""
    return tensor.clone(memory_format=torch.contiguous_format)


class Box(NamedTuple):
    """A region of a stored tensor, and memory for it between canaries."""

    stored: int
    expected: torch.Tensor
    memory: torch.Tensor  # uint8, CANARY everywhere
    target: torch.Tensor  # a view into `memory`
    row: ReadRow


def random_target(
    sizes: Sequence[int], dtype: torch.dtype, pick: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns canary-filled memory and a view of `sizes` somewhere in it, permuted and padded."""
    order = list(range(len(sizes)))
    if pick.random() < 0.5:
        pick.shuffle(order)
    strides, step = [0] * len(sizes), 1
    for d in reversed(order):
        step += pick.choice([0, 0, 0, 1, 5])
        strides[d] = step
        step *= max(sizes[d], 1)
    before, after = pick.choice([0, 0, 3, 1000]), pick.choice([0, 2])
    memory = torch.full(((before + step + after) * dtype.itemsize,), CANARY, dtype=torch.uint8)
    return memory, memory.view(dtype).as_strided(tuple(sizes), tuple(strides), before)


def random_box(saved: Saved, located: list[Located], stored: int, pick: random.Random) -> Box:
    tensor, place = saved.items[stored], located[stored]
    assert isinstance(tensor, torch.Tensor)
    begins = [0 if pick.random() < 0.4 else pick.randrange(n) for n in tensor.shape]
    sizes = [
        n - b if pick.random() < 0.4 else pick.randint(1, n - b)
        for b, n in zip(begins, tensor.shape, strict=True)
    ]
    expected = tensor
    for dim, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        expected = expected.narrow(dim, begin, size)
    memory, target = random_target(sizes, tensor.dtype, pick)
    width = tensor.element_size()
    first = sum(b * s for b, s in zip(begins, place.form.strides, strict=True))
    reach = 1 + sum((n - 1) * s for n, s in zip(sizes, target.stride(), strict=True))
    row = ReadRow(
        saved.wanted[stored][0], place.payload_offset + first * width, width, tuple(sizes),
        tuple(s * width for s in place.form.strides), tuple(s * width for s in target.stride()),
        target.data_ptr(), reach * width, f"item{stored}",
    )  # fmt: skip
    return Box(stored, expected, memory, target, row)


def assert_read(box: Box) -> None:
    """Asserts the region's bytes, and that no byte around them was touched."""
    assert_same(compact(box.expected), compact(box.target))
    target, width = box.target, box.target.element_size()
    is_outside = torch.ones(len(box.memory) // width, dtype=torch.bool)
    is_outside.as_strided(target.shape, target.stride(), target.storage_offset()).fill_(False)
    assert bool((box.memory.view(-1, width)[is_outside] == CANARY).all())


@pytest.mark.slow
@settings(max_examples=points(60))
@given(
    described=st.lists(specs.filter(lambda s: 0 not in s.shape), min_size=1, max_size=5),
    job=jobs,
    seed=st.integers(0, 1 << 30),
    is_cold=st.booleans(),
    verify=st.booleans(),
    use_direct=st.booleans(),
)
def test_random_boxes_come_into_random_strides_and_touch_nothing_else(
    described: list[TensorSpec],
    job: dict[str, Any],
    seed: int,
    is_cold: bool,
    verify: bool,
    use_direct: bool,
) -> None:
    pick = random.Random(seed)
    with scratch() as directory:
        files = pick.randint(1, len(described))
        saved = write(directory, make_items(described), files=files, **job)
        if is_cold:
            drop_cache(directory)
        reader = read_job(directory, verify=verify, use_direct=use_direct, workers=job["workers"])
        located = locate(reader, saved)
        needed_bytes = 0
        for _ in range(2):  # windows: one job reads several times
            stored = [pick.randrange(len(described)) for _ in range(8)]
            boxes = [random_box(saved, located, i, pick) for i in stored]
            reader.read([box.row for box in boxes])
            for box in boxes:
                assert_read(box)
            needed_bytes += sum(box.target.numel() * box.target.element_size() for box in boxes)
            assert reader.touched() == [True] * len(boxes)
        report = reader.report()
        assert report["needed_bytes"] == needed_bytes
        assert report["in_place_bytes"] <= needed_bytes
        assert report["verified_bytes"] <= report["read_bytes"]
        assert (report["verified_bytes"] > 0) == verify
        assert report["direct_bytes"] == 0 or use_direct
        assert report["slot_bytes"] <= job["workers"] * SLOT_BYTES


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("use_direct", [True, False])
def test_contiguous_run_reads_its_bytes_and_its_blocks_edges(
    tmp_path: Path, verify: bool, use_direct: bool, seed: int
) -> None:
    pick = random.Random(seed)
    tensor = make(TensorSpec((2_000_003,), torch.uint8, "contiguous", seed))
    saved = write(tmp_path, [b"before" * 1000, tensor, b"behind"])
    data_bytes = saved.data_bytes(0)
    for length in (1, 100, 65536, 300_000, 1_999_000):
        if use_direct:
            drop_cache(tmp_path)
        reader = read_job(tmp_path, verify=verify, use_direct=use_direct)
        place = locate(reader, saved)[1]
        start = pick.randrange(len(tensor) - length)
        begin, end = place.payload_offset + start, place.payload_offset + start + length
        target = bytearray(length)
        reader.read([ReadRow(0, begin, 1, (length,), (1,), (1,), target, length, "t")])
        assert target == tensor[start : start + length].numpy().tobytes()
        report = reader.report()
        assert report["needed_bytes"] == length
        blocks_begin = begin // BLOCK_BYTES * BLOCK_BYTES
        blocks_bytes = min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, data_bytes) - blocks_begin
        assert report["verified_bytes"] == (blocks_bytes if verify else 0)
        if report["direct_bytes"] == 0:
            assert report["read_bytes"] == (blocks_bytes if verify else length)
        else:  # rounded to pages at both ends, where tmp_path takes direct I/O
            assert report["direct_bytes"] == report["read_bytes"]
            page_begin, page_end = begin // 4096 * 4096, -(-end // 4096) * 4096
            if verify:
                page_begin = blocks_begin
                page_end = -(-(blocks_begin + blocks_bytes) // 4096) * 4096
            assert report["read_bytes"] == page_end - page_begin


@pytest.mark.parametrize("columns", [(1, 4), (0, 3), (2, 5)])
@pytest.mark.parametrize("verify", [True, False])
def test_narrow_columns_of_a_long_matrix_come_back(
    tmp_path: Path, columns: tuple[int, int], verify: bool, seed: int
) -> None:
    """Runs of 12 bytes, 20 apart, over many slots: some lie across the border of a slot."""
    tensor = make(TensorSpec((300_000, 5), torch.int32, "contiguous", seed))
    saved = write(tmp_path, [tensor])
    reader = read_job(tmp_path, verify=verify)
    place = locate(reader, saved)[0]
    first, last = columns
    grid = SLOT_BYTES - 2 * BLOCK_BYTES  # what a part of a box may span
    border = (grid - (place.payload_offset + 4 * first) % grid) // 20  # the first row across it
    for shift in range(border - 30, border + 2):
        target = torch.full((300_000 - shift, last - first), -1, dtype=torch.int32)
        lengths = tuple(target.shape)
        row = ReadRow(
            0, place.payload_offset + 4 * (5 * shift + first), 4, lengths, (20, 4),
            (4 * (last - first), 4), target.data_ptr(), target.nbytes, "t",
        )  # fmt: skip
        reader.read([row])
        assert_same(tensor[shift:, first:last], target)


def test_one_region_for_many_targets_and_no_region_at_all(tmp_path: Path, seed: int) -> None:
    tensor = make(TensorSpec((500, 300), torch.float32, "contiguous", seed))
    saved = write(tmp_path, [tensor])
    reader = read_job(tmp_path)
    located = locate(reader, saved)
    reader.read([])
    assert reader.report()["read_bytes"] == 0
    pick = random.Random(seed)
    first = random_box(saved, located, 0, pick)
    targets = [torch.zeros(first.target.shape, dtype=torch.float32) for _ in range(5)]
    rows = [
        first.row._replace(
            dst_strides=tuple(4 * s for s in t.stride()), dest=t.data_ptr(), dest_bytes=t.nbytes
        )
        for t in targets
    ]
    reader.read([*rows, rows[0]])
    for target in targets:
        assert_same(first.expected, target)
    assert reader.report()["needed_bytes"] == 6 * targets[0].nbytes


# ---- What is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("use_direct", [True, False])
def test_flipped_byte_is_found_where_it_is_read_and_nowhere_else(
    tmp_path: Path, use_direct: bool, seed: int
) -> None:
    pick = random.Random(seed)
    tensors = [make(TensorSpec((200_000,), torch.uint8, "contiguous", seed + i)) for i in range(4)]
    saved = write(tmp_path, list(tensors))
    located = locate(read_job(tmp_path), saved)
    victim = pick.randrange(4)
    at = located[victim].payload_offset + pick.randrange(200_000)
    path = tmp_path / saved.files[0][0]
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << pick.randrange(8)
    path.write_bytes(data)
    for i, place in enumerate(located):
        target = bytearray(200_000)
        row = ReadRow(0, place.payload_offset, 200_000, (), (), (), target, 200_000, f"item{i}")
        careless = read_job(tmp_path, verify=False)
        locate(careless, saved)
        careless.read([row])
        assert (target != tensors[i].numpy().tobytes()) == (i == victim)
        reader = read_job(tmp_path, use_direct=use_direct)
        locate(reader, saved)
        first_block = place.payload_offset // BLOCK_BYTES
        last_block = (place.payload_offset + 199_999) // BLOCK_BYTES
        if not first_block <= at // BLOCK_BYTES <= last_block:
            reader.read([row])
            assert target == tensors[i].numpy().tobytes()
            continue
        with pytest.raises(CorruptionError) as caught:
            reader.read([row])
        error = caught.value
        assert error.path == str(path)
        assert error.fqn == f"item{i}"
        assert error.offset is not None and error.nbytes is not None
        assert error.offset == at // BLOCK_BYTES * BLOCK_BYTES
        assert at < error.offset + error.nbytes
        assert reader.touched() == [True]


def test_region_that_reaches_behind_its_target_is_refused(tmp_path: Path) -> None:
    saved = write(tmp_path, [torch.arange(100, dtype=torch.uint8)])
    reader = read_job(tmp_path)
    place = locate(reader, saved)[0]
    target = bytearray([CANARY] * 50)
    for lengths, strides in [((51,), (1,)), ((26,), (2,)), ((2, 25), (26, 1))]:
        src = (25, 1)[2 - len(lengths) :]
        row = ReadRow(0, place.payload_offset, 1, lengths, src, strides, target, 1 << 20, "t")
        with pytest.raises(PlanError):
            reader.read([row])
    assert target == bytearray([CANARY] * 50)


def test_region_outside_of_the_data_is_refused_when_verifying(tmp_path: Path) -> None:
    saved = write(tmp_path, [torch.arange(100, dtype=torch.uint8)])
    reader = read_job(tmp_path)
    locate(reader, saved)
    target = bytearray(10)
    with pytest.raises(PlanError):
        reader.read([ReadRow(0, saved.data_bytes(0) - 5, 10, (), (), (), target, 10, "t")])
    assert target == bytearray(10)


def test_existing_files_are_never_touched_and_the_next_name_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"precious")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with open_directory(tmp_path) as fd:
        job = _C.WriteJob(
            dir_fd=fd, dir_path=str(tmp_path), workers=2, segment_bytes=SLOT_BYTES,
            use_direct=True, is_durable=True,
        )  # fmt: skip
    job.add_file(["a", "b", "c"], bytes(16), 0)
    job.write([write_row(b"x", 0, 0, "x")], [item_type(torch.uint8)], is_final=True)
    assert job.created() == ["c"]
    assert (tmp_path / "a").read_bytes() == b"precious"
    assert (tmp_path / "b").is_symlink()
    job.add_file(["a", "c"], bytes(16), 0)
    with pytest.raises(StorageError):
        job.write([write_row(b"x", 1, 0, "x")], [item_type(torch.uint8)], is_final=True)
    assert job.created() == ["c"]


def test_a_job_leaves_no_thread_and_no_descriptor(tmp_path: Path, no_leaks: None) -> None:
    saved = write(tmp_path, [torch.zeros(300_000), b"x", torch.ones(3)], files=2, is_durable=True)
    reader = read_job(tmp_path)
    target = bytearray(1_200_000)
    place = locate(reader, saved)[0]
    reader.read(
        [ReadRow(0, place.payload_offset, len(target), (), (), (), target, len(target), "")]
    )
    assert target == bytes(1_200_000)
