"""Several files a rank: which items they hold, how many are open, and how they are replaced."""

from __future__ import annotations

import errno
import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.engine_jobs import SLOT_BYTES, scratch, write
from support.saves import assert_whole, data_files, files_in, read_footer, save
from support.slow_states import SLOW, CopyingPlanner, windowed_state
from support.states import mixed_state
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from torch_dcpx import _C, DcpxWriter, OptionError, StorageError, WriteOptions
from torch_dcpx.writer.items import _FRAMING_BYTES, Split, planned_bytes, split_items


def several(files: int, **kwargs: Any) -> WriteOptions:
    return WriteOptions(files_per_rank=files, **kwargs)


def test_files_hold_what_a_rank_has_in_equal_parts(tmp_path: Path) -> None:
    state = {f"t{i}": torch.zeros(100_000 * i, dtype=torch.uint8) for i in range(1, 9)}
    save(state, tmp_path, options=several(4))
    loads = [
        sum(row.payload_bytes for row in read_footer(tmp_path / name).rows)
        for name in data_files(tmp_path)
    ]
    assert loads == [900_000] * 4


def test_saves_with_other_numbers_of_files_replace_each_other(tmp_path: Path) -> None:
    for seed, files in enumerate([3, 1, 256, 2, 2]):
        save(mixed_state(seed), tmp_path, options=several(files))
        items = len(dcp.FileSystemReader(tmp_path).read_metadata().storage_data)
        assert len(data_files(tmp_path)) == min(files, items)
        assert_whole(mixed_state(seed), tmp_path)
    save(mixed_state(9), tmp_path, single_file_per_rank=False)
    assert_whole(mixed_state(9), tmp_path)


def test_windows_go_to_several_files(tmp_path: Path) -> None:
    options = several(3, workers=1, slot_bytes=SLOW.slot_bytes, host_memory_bytes=SLOW.slot_bytes)
    writer = DcpxWriter(tmp_path, options=options)
    dcp.save(windowed_state(), storage_writer=writer, planner=CopyingPlanner(), no_dist=True)
    assert len(data_files(tmp_path)) == 3
    assert_whole(windowed_state(), tmp_path)


@pytest.mark.usefixtures("no_leaks")
def test_save_with_any_call_failing_removes_all_of_its_files(tmp_path: Path) -> None:
    def state_of(seed: int) -> dict[str, Any]:
        return {f"t{i}": torch.full((150_000,), seed + i) for i in range(3)} | {"step": seed}

    options = several(3, workers=2, slot_bytes=256 << 10)
    save(state_of(0), tmp_path, options=options)
    before = files_in(tmp_path)
    for nth in range(500):
        already = sum(_C.call_counts().values())
        _C.arm_fault(nth, errno.EIO)
        try:
            save(state_of(1), tmp_path, options=options)
            error = None
        except CheckpointException as failure:
            error = failure.failures[0][0]
        finally:
            _C.disarm_fault()
        if sum(_C.call_counts().values()) - already <= nth:
            break
        assert type(error) is StorageError
        assert files_in(tmp_path) == before, nth
    assert nth > 30, "the loop has met the calls of three files"
    assert error is None
    assert_whole(state_of(1), tmp_path)


def test_a_file_for_each_item_and_several_files_a_rank_contradict_each_other(
    tmp_path: Path,
) -> None:
    with pytest.raises(OptionError, match="single_file_per_rank=False") as caught:
        DcpxWriter(tmp_path, single_file_per_rank=False, options=several(2))
    assert (caught.value.option, caught.value.value) == ("files_per_rank", 2)
    writer = DcpxWriter(tmp_path, options=several(2))
    writer.single_file_per_rank = False
    with pytest.raises(CheckpointException) as failure:
        dcp.save({"w": torch.arange(3)}, storage_writer=writer, no_dist=True)
    assert isinstance(failure.value.failures[0][0], OptionError)
    assert files_in(tmp_path) == {}


def test_thread_count_stays_the_number_of_workers(tmp_path: Path) -> None:
    writer = DcpxWriter(tmp_path, thread_count=2, options=several(3, workers=2))
    dcp.save(mixed_state(), storage_writer=writer, no_dist=True)
    assert len(data_files(tmp_path)) == 3
    assert writer.last_report is not None
    assert writer.last_report.files == 3


SEGMENTS = 2  # of each file


ITEMS = [torch.full((SEGMENTS * SLOT_BYTES,), number, dtype=torch.uint8) for number in range(6)]


def open_files(directory: Path) -> int:
    """Returns how many files beneath `directory` this process has open."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # of the listing itself
    return sum(link.startswith(f"{directory}/") for link in links)


def open_when_call_fails(nth: int, workers: int, files_at_once: int) -> int | None:
    """Returns how many files were open when the nth call failed; None when there was none."""
    with scratch() as directory:
        _C.arm_fault(nth, errno.EIO)
        try:
            write(
                directory, ITEMS, files=len(ITEMS), workers=workers, use_direct=False,
                files_at_once=files_at_once,
            )  # fmt: skip
        except StorageError:
            return open_files(directory)  # the traceback keeps the job
        finally:
            _C.disarm_fault()
    return None


@pytest.mark.parametrize(("workers", "files_at_once"), [(1, 1), (1, 3), (3, 1), (2, 4), (2, 99)])
def test_no_more_files_are_open_than_workers_and_files_at_once(
    workers: int, files_at_once: int
) -> None:
    found = []
    for nth in range(200):
        count = open_when_call_fails(nth, workers, files_at_once)
        if count is None:
            break
        found.append(count)
    assert len(found) > 6 * SEGMENTS
    assert max(found) <= min(6, workers + files_at_once)
    assert max(found) >= min(6, files_at_once)


def item_of(number: int, numel: int | None, dtype: torch.dtype = torch.uint8) -> WriteItem:
    """Returns an item of `numel` elements of a huge tensor; None: a bytes item."""
    if numel is None:
        return WriteItem(MetadataIndex(f"t{number}"), WriteItemType.BYTE_IO)
    offset, whole = torch.Size([number]), torch.Size([1 << 50])
    chunk = ChunkStorageMetadata(offset, torch.Size([numel]))
    about = TensorWriteData(chunk, TensorProperties(dtype), whole)
    index = MetadataIndex(f"t{number}", offset)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=about)


sizes = st.one_of(st.none(), st.integers(0, 4096), st.integers(0, 20 << 30))


def plan_of(numels: list[int | None]) -> list[WriteItem]:
    return [item_of(number, numel) for number, numel in enumerate(numels)]


def loads_of(split: Split) -> list[int]:
    loads: Counter[int] = Counter()
    for item, file in zip(*split, strict=True):
        loads[file] += planned_bytes(item) + _FRAMING_BYTES
    return [loads[file] for file in sorted(loads)]


def best_load(items: list[WriteItem], files: int) -> int:
    """Returns the fullest file's load in the best of all splits."""
    weights = [planned_bytes(item) + _FRAMING_BYTES for item in items]
    return min(
        max(
            sum(w for w, f in zip(weights, choice, strict=True) if f == file)
            for file in range(files)
        )
        for choice in itertools.product(range(files), repeat=len(items))
    )


@given(st.lists(sizes, min_size=1, max_size=6), st.integers(2, 3))
def test_no_file_exceeds_the_best_split_by_more_than_a_third(
    numels: list[int | None], files: int
) -> None:
    items = plan_of(numels)
    fullest = max(loads_of(split_items(items, files)))
    assert 3 * files * fullest <= (4 * files - 1) * best_load(items, files)


@given(st.lists(sizes, max_size=200), st.integers(1, 256))
def test_every_item_is_in_one_file_no_file_is_empty_and_order_is_kept(
    numels: list[int | None], files_per_rank: int
) -> None:
    items = plan_of(numels)
    split = split_items(items, files_per_rank)
    assert split == split_items(list(items), files_per_rank), "deterministic"
    assert sorted(map(id, split.items)) == sorted(map(id, items))
    used = min(len(items), files_per_rank)
    assert sorted(set(split.files)) == list(range(used))
    assert list(split.files) == sorted(split.files)
    for file in range(used):
        within = [item for item, f in zip(*split, strict=True) if f == file]
        keys = [(item.type != WriteItemType.BYTE_IO, items.index(item)) for item in within]
        assert keys == sorted(keys), "bytes items first, else the plan's order"
    loads = loads_of(split)
    if loads:
        heaviest = max(planned_bytes(item) for item in items) + _FRAMING_BYTES
        assert max(loads) <= sum(loads) / used + heaviest


def test_a_rank_is_split_by_its_own_chunks_not_by_the_tensors_global_size() -> None:
    # What stock estimates by is the same for all: 2^50 elements.
    numels = [8 << 30, 1 << 30, 1 << 30, 2 << 30, 4 << 30]
    assert sorted(loads_of(split_items(plan_of(numels), 2))) == sorted(
        [(8 << 30) + _FRAMING_BYTES, (8 << 30) + 4 * _FRAMING_BYTES]
    )


def test_a_file_for_each_item_keeps_the_plan_as_it_is() -> None:
    items = plan_of([5, None, 0, 7])
    split = split_items(items, None)
    assert (list(split.items), list(split.files)) == (items, [0, 1, 2, 3])
    assert split_items([], 4) == ([], [])


@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.bfloat16, 2), (torch.complex128, 16)])
def test_planned_bytes_are_those_of_the_chunk(dtype: torch.dtype, nbytes: int) -> None:
    assert planned_bytes(item_of(0, 11, dtype)) == 11 * nbytes
    assert planned_bytes(item_of(0, None)) == 0
