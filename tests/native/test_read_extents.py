"""What ReadJob reads for a load, to the byte and to the call: nothing twice, nothing needless."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_jobs import (
    SLOT_BYTES,
    Saved,
    TensorSpec,
    drop_cache,
    locate,
    make,
    read_job,
    write,
)
from support.states import assert_same

from torch_dcpx import _C
from torch_dcpx.errors import CorruptionError, StorageError
from torch_dcpx.reader.locate import Located
from torch_dcpx.reader.rows import ReadRow

BLOCK_BYTES = 64 << 10
PAGE_BYTES = 4096
DIRECTORY_FDS = 1


def flat(nbytes: int, seed: int) -> torch.Tensor:
    return make(TensorSpec((nbytes,), torch.uint8, "contiguous", seed))


def run_row(place: Located, target: torch.Tensor, start: int = 0, fqn: str = "t") -> ReadRow:
    """A row that reads `target.nbytes` bytes of an item of bytes."""
    begin = place.payload_offset + start
    return ReadRow(0, begin, 1, (target.nbytes,), (1,), (1,), target.data_ptr(), target.nbytes, fqn)


def column_row(place: Located, width: int, first: int, target: torch.Tensor) -> ReadRow:
    """A row that reads columns of bytes out of a matrix `width` bytes wide."""
    rows, columns = target.shape
    return ReadRow(
        0, place.payload_offset + first, 1, (rows, columns), (width, 1), (columns, 1),
        target.data_ptr(), target.nbytes, "t",
    )  # fmt: skip


def blocks_of(begin: int, end: int, saved: Saved) -> int:
    """Returns the bytes of the blocks that hold [begin, end)."""
    last = min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, saved.data_bytes(0))
    return last - begin // BLOCK_BYTES * BLOCK_BYTES


def congruent(nbytes: int, offset: int, shift: int = 0) -> torch.Tensor:
    """Returns memory whose address and the file offset agree modulo a page, up to `shift`."""
    memory = torch.zeros(nbytes + PAGE_BYTES, dtype=torch.uint8)
    start = (offset + shift - memory.data_ptr()) % PAGE_BYTES
    return memory[start : start + nbytes]


def preads() -> int:
    return _C.call_counts()["pread"]


def held() -> tuple[int, int]:
    """Returns how many descriptors and threads this process has."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("verify", [True, False])
def test_range_that_many_regions_want_is_read_once(tmp_path: Path, verify: bool, seed: int) -> None:
    tensor = flat(3 * SLOT_BYTES, seed)
    saved = write(tmp_path, [tensor])
    reader = read_job(tmp_path, verify=verify, use_direct=False)
    place = locate(reader, saved)[0]
    whole = [torch.zeros_like(tensor) for _ in range(3)]
    halves = [torch.zeros(tensor.nbytes // 2, dtype=torch.uint8) for _ in range(2)]
    rows = [run_row(place, target) for target in whole]
    rows += [run_row(place, half, i * half.nbytes) for i, half in enumerate(halves)]
    begin, end = place.payload_offset, place.payload_offset + tensor.nbytes
    cells = (end - 1) // SLOT_BYTES - begin // SLOT_BYTES + 1
    before = preads()
    reader.read(rows)
    table_reads = 2 if verify else 0  # the block table and the checks of its pages
    assert preads() - before == cells + table_reads
    report = reader.report()
    assert report["read_bytes"] == (blocks_of(begin, end, saved) if verify else tensor.nbytes)
    assert report["needed_bytes"] == 4 * tensor.nbytes
    for target in whole:
        assert_same(tensor, target)
    assert_same(tensor, torch.cat(halves))


def test_file_that_is_replaced_before_it_is_opened_again_is_corruption(
    tmp_path: Path, seed: int
) -> None:
    saved = write(tmp_path, [flat(1000, seed)])
    reader = read_job(tmp_path, max_open_files=0)
    place, target = locate(reader, saved)[0], torch.zeros(1000, dtype=torch.uint8)
    reader.read([run_row(place, target)])  # it was opened again
    path = tmp_path / saved.files[0][0]
    shutil.copy(path, tmp_path / "other")
    (tmp_path / "other").rename(path)  # of one size and one content
    with pytest.raises(CorruptionError, match="was replaced while it was read") as caught:
        reader.read([run_row(place, target)])
    assert caught.value.path == str(path)


def test_one_tensor_of_many_items_is_read_with_their_frames_in_one_go(
    tmp_path: Path, seed: int
) -> None:
    tensors = [flat(10_000, seed + i) for i in range(8)]
    saved = write(tmp_path, list(tensors))
    reader = read_job(tmp_path, verify=False, use_direct=False)
    located = locate(reader, saved)
    target = torch.zeros(8 * 10_000, dtype=torch.uint8)
    before = preads()
    reader.read([run_row(p, t) for p, t in zip(located, target.split(10_000), strict=True)])
    assert preads() - before == 1
    assert_same(torch.cat(tensors), target)
    report = reader.report()
    last = located[-1].payload_offset + 10_000
    assert report["read_bytes"] == last - located[0].payload_offset
    assert report["in_place_bytes"] == target.nbytes


@pytest.mark.parametrize("run", [100, 4096, 6000, 40_000])
def test_columns_never_read_more_than_the_item_and_unverified_half_as_much_again(
    tmp_path: Path, run: int, seed: int
) -> None:
    width = 2 * run
    rows = 3_000_000 // width
    matrix = flat(rows * width, seed).view(rows, width)
    saved = write(tmp_path, [matrix])
    for verify in (True, False):
        reader = read_job(tmp_path, verify=verify, use_direct=False)
        place = locate(reader, saved)[0]
        target = torch.zeros(rows, run, dtype=torch.uint8)
        reader.read([column_row(place, width, run, target)])
        assert_same(matrix[:, run:].contiguous(), target)
        report = reader.report()
        begin, end = place.payload_offset + run, place.payload_offset + matrix.nbytes
        if verify:
            assert report["read_bytes"] == blocks_of(begin, end, saved)  # none of them twice
        elif run >= 4096:
            assert report["read_bytes"] <= 1.5 * target.nbytes
        if run >= 4096 and verify:  # but for short pieces at both sides of a cell's border
            cells = -(-saved.data_bytes(0) // SLOT_BYTES)
            assert report["in_place_bytes"] >= target.nbytes - cells * 2 * 4096


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("shift", [0, 64])
def test_direct_read_passes_through_the_slot_wherever_the_tensor_lies(
    tmp_path: Path, verify: bool, shift: int, seed: int
) -> None:
    tensor = flat(5 * SLOT_BYTES + 777, seed)
    saved = write(tmp_path, [b"before", tensor, b"behind"])
    drop_cache(tmp_path)
    reader = read_job(tmp_path, verify=verify)
    place = locate(reader, saved)[1]
    target = congruent(tensor.nbytes, place.payload_offset, shift)
    reader.read([run_row(place, target)])
    assert_same(tensor, target)
    report = reader.report()
    if report["direct_bytes"]:  # where tmp_path takes direct I/O
        assert report["direct_bytes"] == report["read_bytes"]
        assert report["in_place_bytes"] == 0
    assert report["needed_bytes"] == tensor.nbytes


@pytest.mark.parametrize("use_direct", [True, False])
@pytest.mark.parametrize("nbytes", [4000, 2 * SLOT_BYTES])
def test_damaged_block_that_went_into_the_slot_never_reaches_the_tensor(
    tmp_path: Path, use_direct: bool, nbytes: int, seed: int
) -> None:
    tensors = [flat(nbytes, seed), flat(nbytes, seed + 1)]
    saved = write(tmp_path, list(tensors))
    reader = read_job(tmp_path, workers=1, use_direct=use_direct)
    located = locate(reader, saved)
    path = tmp_path / saved.files[0][0]
    data = bytearray(path.read_bytes())
    data[located[0].payload_offset + 100] ^= 1
    path.write_bytes(data)
    drop_cache(tmp_path)
    targets = [torch.full_like(tensor, 0xA5) for tensor in tensors]
    with pytest.raises(CorruptionError):
        reader.read([run_row(p, t) for p, t in zip(located, targets, strict=True)])
    report = reader.report()
    is_straight = not report["direct_bytes"] and nbytes > SLOT_BYTES
    assert (report["in_place_bytes"] > 0) == is_straight
    assert reader.touched() == [is_straight, False]
    for target, is_touched in zip(targets, reader.touched(), strict=True):
        assert is_touched or bool((target == 0xA5).all())


def test_each_cell_is_read_directly_or_through_the_page_cache_by_where_it_is(
    tmp_path: Path, seed: int
) -> None:
    tensor = flat(8 * SLOT_BYTES, seed)
    saved = write(tmp_path, [tensor])
    path = tmp_path / saved.files[0][0]
    reports: list[dict[str, int]] = []
    for warm_cells in (0, 3):
        drop_cache(tmp_path)
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no readahead
            assert len(file.read(warm_cells * SLOT_BYTES)) == warm_cells * SLOT_BYTES
        reader = read_job(tmp_path, verify=False)
        place = locate(reader, saved)[0]
        target = torch.zeros_like(tensor)
        reader.read([run_row(place, target)])
        assert_same(tensor, target)
        reports.append(reader.report())
    cold, mixed = reports
    end = -(-(place.payload_offset + tensor.nbytes) // PAGE_BYTES) * PAGE_BYTES
    if cold["direct_bytes"]:  # where tmp_path takes direct I/O
        begin = place.payload_offset // PAGE_BYTES * PAGE_BYTES
        assert cold["direct_bytes"] == end - begin
        assert mixed["direct_bytes"] == end - 3 * SLOT_BYTES
        assert mixed["read_bytes"] == mixed["direct_bytes"] + 3 * SLOT_BYTES - place.payload_offset


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EFAULT])
def test_refused_direct_read_falls_back_to_the_page_cache(
    tmp_path: Path, refusal: int, seed: int
) -> None:
    tensor = flat(3 * SLOT_BYTES, seed)
    saved = write(tmp_path, [tensor])
    outcomes = []
    for nth in range(20):
        drop_cache(tmp_path)
        reader = read_job(tmp_path, workers=1, verify=False)
        place = locate(reader, saved)[0]
        target = congruent(tensor.nbytes, place.payload_offset)
        before = sum(_C.call_counts().values())
        _C.arm_fault(nth, refusal)
        try:
            reader.read([run_row(place, target)])
        except StorageError as error:  # of a read that was no direct one
            outcomes.append(error.errno)
        else:
            outcomes.append(0)
            assert_same(tensor, target)
        finally:
            _C.disarm_fault()
        was_direct = reader.report()["direct_bytes"] > 0
        assert outcomes[-1] == 0 or not was_direct
        if sum(_C.call_counts().values()) - before <= nth:
            break
    assert 3 <= nth < 19
    assert outcomes[0] == outcomes[-1] == 0  # the first call is the open for direct I/O
    assert not was_direct or set(outcomes) == {0}


@pytest.mark.parametrize("use_direct", [True, False])
@pytest.mark.parametrize("max_open_files", [0, 2])
def test_nothing_is_read_after_the_first_error_and_all_is_given_back(
    tmp_path: Path, use_direct: bool, max_open_files: int, seed: int
) -> None:
    tensors = [flat(2 * SLOT_BYTES, seed + i) for i in range(4)]
    saved = write(tmp_path, list(tensors), files=1)
    path = tmp_path / saved.files[0][0]
    options: dict[str, Any] = {
        "workers": 1, "use_direct": use_direct, "max_open_files": max_open_files,
    }  # fmt: skip
    reader = read_job(tmp_path, **options)
    located = locate(reader, saved)
    data = bytearray(path.read_bytes())
    data[located[1].payload_offset + SLOT_BYTES] ^= 1
    path.write_bytes(data)
    drop_cache(tmp_path)
    targets = [torch.full_like(tensor, 0xA5) for tensor in tensors]
    rows = [
        run_row(p, t, 0, f"t{i}") for i, (p, t) in enumerate(zip(located, targets, strict=True))
    ]
    held_before, preads_before = held(), preads()
    with pytest.raises(CorruptionError) as caught:
        reader.read(rows)
    assert held() == held_before
    assert caught.value.fqn == "t1"
    bad_cell = (located[1].payload_offset + SLOT_BYTES) // SLOT_BYTES
    assert preads() - preads_before == bad_cell + 1 + 2  # cells up to it, and the block table
    ends = [place.payload_offset // SLOT_BYTES <= bad_cell for place in located]
    assert reader.touched() == ends
    for tensor, target, is_touched in zip(tensors, targets, ends, strict=True):
        if not is_touched:
            assert_same(torch.full_like(tensor, 0xA5), target)
    good = torch.zeros_like(tensors[3])
    reader.read([run_row(located[3], good)])  # the job survives its error
    assert_same(tensors[3], good)
    reader.close()
    kept = min(max_open_files, 1)
    assert held() == (held_before[0] - kept - DIRECTORY_FDS, held_before[1])


def test_phases_and_bytes_without_checksums_are_reported(tmp_path: Path, seed: int) -> None:
    tensor = flat(4 * SLOT_BYTES, seed)
    saved = write(tmp_path, [tensor])
    reader = read_job(tmp_path)
    place = locate(reader, saved)[0]
    target = torch.zeros_like(tensor)  # a row holds its address alone
    reader.read([run_row(place, target)])
    report = reader.report()
    assert report["foreign_bytes"] == 0
    assert all(report[f"{phase}_ns"] > 0 for phase in ("locate", "read", "verify", "engine"))
    path = saved.files[0][0]
    foreign = Saved(saved.items, [(path, False, 0, b"", 0, b"")], saved.wanted, saved.report)
    reader = read_job(tmp_path)
    place = locate(reader, foreign)[0]
    target = torch.zeros_like(tensor)
    reader.read([run_row(place, target)])
    assert_same(tensor, target)
    report = reader.report()
    assert report["foreign_bytes"] == report["read_bytes"] >= tensor.nbytes
    assert report["verified_bytes"] == report["verify_ns"] == 0
