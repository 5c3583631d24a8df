"""Columns of a hostile `.metadata` cost no more than their size: work counted, not timed."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from support.metadata_samples import PATH, encode_small, forge
from torch.distributed.checkpoint.metadata import MetadataIndex

import torch_dcpx as dcpx
from torch_dcpx import _C, DcpxLoadPlanner
from torch_dcpx._compat import IS_SWEPT
from torch_dcpx._plan_classes import MAKER
from torch_dcpx.metadata.columns import ColumnReader, encode_body
from torch_dcpx.metadata.decode import open_columns
from torch_dcpx.metadata.file import decode_metadata
from torch_dcpx.metadata.lazy import StoredEntries, StoredPlaces

ROWS = 5000

# ---- The index of items --------------------------------------------------------------------------


def places_at(offsets: list[int]) -> StoredPlaces:
    """The places of items named "" at these offsets, two numbers each."""
    count = len(offsets) // 2

    def column(value: int, length: int = count) -> array[int]:
        return array("q", [value]) * length

    numbers = ["entry_fqn", "tensor_ndim", "tensor_sizes", "tensor_chunk_count", "chunk_offsets"]
    numbers += ["chunk_sizes", "tensor_dtype", "tensor_layout"]
    flags = ["entry_kind", "chunk_flags", "tensor_flags", "tensor_memory_format"]
    body, header_bytes = encode_body(
        {"descriptors": []},
        {
            "strings": b"x",
            "string_ends": array("q", [0, 1]),
            **{name: array("q") for name in numbers},
            **dict.fromkeys(flags, b""),
            "storage_fqn": column(0),
            "storage_ndim": column(2),
            "storage_offsets": array("q", offsets),
            "storage_hint": column(0),
            "storage_path": column(1),
            "storage_offset": column(0),
            "storage_bytes": column(0),
            "storage_descriptors": column(-1),
        },
    )
    reader = ColumnReader(memoryview(b"".join(body)), header_bytes, PATH, 0)
    return open_columns(reader, reader.strings())[1]


def solved() -> list[int]:
    """Offsets that meet in one slot where numbers are mixed by a public function, which is undone,
    from the hash of "", which is 0 for Python.
    """
    whole, step = (1 << 64) - 1, 0x9E3779B97F4A7C15
    factors = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53

    def mix(found: int, value: int) -> int:
        found ^= (value + step) & whole
        for factor in factors:
            found = (found ^ found >> 33) * factor & whole
        return found ^ found >> 33

    wanted = 12345 << 32 | 777
    for factor in reversed(factors):
        wanted = (wanted ^ wanted >> 33) * pow(factor, -1, 1 << 64) & whole
    wanted ^= wanted >> 33
    start = mix(0, 2)
    offsets: list[int] = []
    first = 0
    while len(offsets) < 2 * ROWS:
        first += 1
        second = ((wanted ^ mix(start, first)) - step) & whole
        if second < 1 << 63:
            offsets += [first, second]
    assert mix(mix(start, offsets[0]), offsets[1]) == 12345 << 32 | 777
    return offsets


@pytest.mark.parametrize("kind", ["solved", "first", "second"])
def test_items_that_a_file_chooses_do_not_meet_in_the_index(kind: str) -> None:
    rows = solved() if kind == "solved" else []
    for number in range(ROWS if not rows else 0):
        rows += [number, 0] if kind == "first" else [0, number << 40]
    places = places_at(rows)
    assert places.columns.probe_count < ROWS  # half a slot an item; all of one hash: millions
    last = MetadataIndex("", rows[-2:])
    assert places[last].relative_path == "x"
    assert places.get(MetadataIndex("", [rows[-2] + 1, rows[-1]])) is None


def test_each_file_is_indexed_by_a_key_of_its_own() -> None:
    rows = [at for number in range(ROWS) for at in (number, 0)]
    assert len({places_at(rows).columns.probe_count for _ in range(6)}) > 1


# ---- Chunks that all meet in one wanted element --------------------------------------------------


def entries_of_many_chunks(ndim: int) -> StoredEntries:
    """Entries of which "step" has ROWS times the chunk that is all of it."""

    def change(_: dict[str, Any], columns: dict[str, Any]) -> None:
        columns["tensor_chunk_count"][1] = ROWS
        columns["chunk_flags"] = bytes(2 + ROWS)
        columns["tensor_ndim"][1] = ndim
        columns["tensor_sizes"] += [3] * ndim
        columns["chunk_offsets"] += [0] * ndim * ROWS
        columns["chunk_sizes"] += [3] * ndim * ROWS

    metadata = decode_metadata(forge(change), PATH).metadata
    assert isinstance(metadata.state_dict_metadata, StoredEntries)
    return metadata.state_dict_metadata


@pytest.mark.parametrize("ndim", [0, 1, 2])
def test_chunks_that_meet_are_refused_before_an_item_is_made(ndim: int) -> None:
    entries = entries_of_many_chunks(ndim)
    shape = torch.Size([3] * ndim)
    row = ("step", shape, entries.chunks("step"), shape)
    items, offences = MAKER.read_items([row, "behind"], list, IS_SWEPT, entries.columns)
    assert items == []
    assert offences == [(0, 0, "overlap", 0, 1, ())]
    assert entries.columns.made_count == 0
    metadata = decode_metadata(encode_small(), PATH).metadata
    metadata.state_dict_metadata = entries
    planner = DcpxLoadPlanner()
    planner.set_up_planner({"step": torch.zeros(shape, dtype=torch.int64)}, metadata, True)
    box = "[" + ", ".join(["0:3"] * ndim) + "]"
    with pytest.raises(dcpx.CorruptionError) as caught:
        planner.create_local_plan()
    assert f"chunks {box} and {box} of the checkpoint hold the same" in str(caught.value)
    assert entries.columns.made_count == 2  # those that the refusal names


def test_chunk_that_is_not_there_is_refused() -> None:
    columns: _C.StoredColumns
    columns = decode_metadata(encode_small(), PATH).metadata.storage_data.columns  # type: ignore[attr-defined]
    assert columns.chunk(0, 1).offsets == (2, 0)
    for number, at in ((0, 2), (0, 1 << 40), (2, 0), (9, 0), (-1, 0)):
        with pytest.raises(dcpx.PlanError):
            columns.chunk(number, at)
