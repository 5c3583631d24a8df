"""A plan's items over a rank's files: balanced by real bytes, never an empty file, in order."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from torch_dcpx.writer.items import _FRAMING_BYTES, Split, planned_bytes, split_items


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
