"""The columns of a `.metadata`, checked as a whole, and the dicts over them.

A file whose checksums are right may still be hostile. `metadata_decode` says what it may not hold;
here the same is asked of the columns themselves, in C++, before anything of them is handed out, and
with no memory that the file's own size does not bound.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo

from torch_dcpx import _compat
from torch_dcpx._compat import DTYPES, LAYOUTS
from torch_dcpx._native import _C
from torch_dcpx._plan_classes import MAKER
from torch_dcpx.metadata.columns import I64_MAX, ColumnReader
from torch_dcpx.metadata.decode import decode_descriptors, decode_planner, unknown_constant
from torch_dcpx.metadata.lazy import StoredEntries, StoredPaths, StoredPlaces
from torch_dcpx.metadata.stock_pickle import MEMORY_FORMATS


def _check_ends(columns: ColumnReader, name: str, begins: memoryview, lengths: memoryview) -> None:
    if not _C.have_ends(begins, lengths):
        raise columns.error("a range ends beyond 2**63 - 1", name)


def _constants(
    columns: ColumnReader, name: str, numbers: memoryview, strings: list[str], known: dict[str, Any]
) -> dict[int, Any]:
    """The torch constants that a column of string numbers names, by these numbers."""
    found = set(numbers.cast("q"))
    for number in found:
        if strings[number] not in known:
            raise unknown_constant(columns, name, strings[number])
    return {number: known[strings[number]] for number in found}


def _check_entries(
    columns: ColumnReader, strings: list[str]
) -> tuple[dict[str, int], dict[str, memoryview], dict[str, Any]]:
    """Returns the numbers of all entries by name, their columns, and torch's constants in them."""
    last = len(strings) - 1
    kinds = columns.u8("entry_kind", None, high=1)
    fqns = columns.i64_view("entry_fqn", len(kinds), high=last)
    count = kinds.count(0)
    views = {"entry_kind": memoryview(kinds)}

    def numbers(name: str, length: int, low: int = 0, high: int = I64_MAX) -> memoryview:
        views[name] = columns.i64_view(name, length, low, high)
        return views[name]

    ndims = numbers("tensor_ndim", count)
    numbers("tensor_sizes", _C.total(ndims))
    chunk_counts = numbers("tensor_chunk_count", count)
    # Bounds the chunks of 0-d tensors.
    views["chunk_flags"] = columns.u8_view("chunk_flags", _C.total(chunk_counts), high=0)
    cells = _C.total(ndims, chunk_counts)
    offsets = numbers("chunk_offsets", cells)
    _check_ends(columns, "chunk_sizes", offsets, numbers("chunk_sizes", cells))
    dtypes = numbers("tensor_dtype", count, high=last)
    values: dict[str, Any] = {"dtype": _constants(columns, "tensor_dtype", dtypes, strings, DTYPES)}
    layouts = numbers("tensor_layout", count, high=last)
    values["layout"] = _constants(columns, "tensor_layout", layouts, strings, LAYOUTS)
    views["tensor_flags"] = columns.u8_view("tensor_flags", count, high=3)
    values["memory_formats"] = list(MEMORY_FORMATS)
    highest = len(MEMORY_FORMATS) - 1
    views["tensor_memory_format"] = columns.u8_view("tensor_memory_format", count, high=highest)
    if columns.has("tensor_stride_count"):
        ndims = numbers("tensor_stride_count", count, low=-1)
        numbers("tensor_strides", _C.total(ndims), low=-I64_MAX - 1)
    names = {strings[fqn]: number for number, fqn in enumerate(fqns.cast("q"))}
    if len(names) != len(kinds):
        raise columns.error("a name is there twice", "entry_fqn")
    return names, views, values


def _check_places(columns: ColumnReader, strings: list[str]) -> dict[str, memoryview]:
    """Returns the columns of storage_data."""
    last = len(strings) - 1
    fqns = columns.i64_view("storage_fqn", None, high=last)
    count = len(fqns) // 8
    ndims = columns.i64_view("storage_ndim", count, low=-1)
    views = {"storage_fqn": fqns, "storage_ndim": ndims}
    views["storage_offsets"] = columns.i64_view("storage_offsets", _C.total(ndims))
    views["storage_hint"] = columns.i64_view("storage_hint", count, low=-1)
    views["storage_path"] = columns.i64_view("storage_path", count, high=last)
    views["storage_offset"] = begins = columns.i64_view("storage_offset", count)
    views["storage_bytes"] = lengths = columns.i64_view("storage_bytes", count)
    _check_ends(columns, "storage_bytes", begins, lengths)
    return views


def open_columns(columns: ColumnReader, strings: list[str]) -> tuple[StoredEntries, StoredPlaces]:
    """Checks state_dict_metadata and storage_data; returns them as dicts filled on demand.

    Raises:
        CorruptionError: columns that contradict each other.
        UnsupportedError: a dtype or layout of another torch, which the one that runs lacks.
    """
    names, views, values = _check_entries(columns, strings)
    views |= _check_places(columns, strings)
    count = len(views["storage_fqn"]) // 8
    values["descriptors"] = descriptors = decode_descriptors(columns)
    high = len(descriptors) - 2
    views["storage_descriptors"] = columns.i64_view("storage_descriptors", count, low=-1, high=high)
    values["StorageInfo"] = _StorageInfo
    values["hash_key"] = os.urandom(16)
    values["has_strides"] = _compat.HAS_STRIDES
    stored = _C.StoredColumns(MAKER, strings, views, values)
    if stored.has_twins:
        raise columns.error("an item is there twice", "storage_fqn")
    return StoredEntries.over(stored, names), StoredPlaces.over(stored)


def open_planner(columns: ColumnReader, strings: list[str]) -> StoredPaths:
    """Checks planner_data that is a flatten mapping; returns it as a dict made on demand.

    Raises:
        CorruptionError: columns that contradict each other.
    """
    fqns = columns.i64_view("planner_fqn", None, high=len(strings) - 1)
    counts = columns.i64_view("planner_len", len(fqns) // 8)
    tags = columns.u8_view("planner_tag", _C.total(counts), high=1)
    values = columns.i64_view("planner_value", len(tags), low=-I64_MAX - 1)
    if not _C.are_keys(tags, values, len(strings)):
        raise columns.error("a value numbers no string", "planner_value")
    # Usually the names of the entries in their order, which were compared.
    if fqns != columns.i64_view("entry_fqn", None):
        names = fqns.cast("q")
        if len({strings[number] for number in names}) != len(names):
            raise columns.error("a name is there twice", "planner_fqn")
    return StoredPaths.over(lambda: decode_planner(columns, strings))
