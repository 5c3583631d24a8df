"""Stock's Metadata over the columns of our `.metadata`: the way back of `encode`, without a pickle.

A file with right checksums may still be hostile. So C++ checks each length, number of a string, sum
and range in the columns before `lazy` makes an object of them, and the file's own size bounds the
memory. Columns that contradict each other, or hold values of other types than stock's, are a
CorruptionError of each function here.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta

from torch_dcpx._compat import DTYPES, LAYOUTS, TORCH_VERSION
from torch_dcpx._native import _C
from torch_dcpx.errors import DcpxError, UnsupportedError
from torch_dcpx.metadata.brief import optional_str
from torch_dcpx.metadata.columns import I64_MAX, ColumnReader
from torch_dcpx.metadata.lazy import (
    MANY_PLACES,
    StoredEntries,
    StoredPaths,
    StoredPlaces,
    have_full_lists,
    stored_dicts,
    stored_paths,
)
from torch_dcpx.metadata.stock_classes import MEMORY_FORMATS

_ENDLESS = "a range ends beyond 2**63 - 1"


def _unknown_constant(columns: ColumnReader, name: str, text: str) -> DcpxError:
    """Returns the error for a constant that this torch lacks: another torch, or none, wrote it."""
    error = columns.error(f"{text!r} is unknown to torch {TORCH_VERSION}", name)
    writer = columns.header.get("torch")
    if writer == TORCH_VERSION:
        return error
    unsupported = UnsupportedError(f"{error}; torch {writer} wrote it")
    unsupported.__cause__ = error
    return unsupported


def _descriptors(columns: ColumnReader) -> list[list[str] | None]:
    """Returns the distinct transform_descriptors, None last so that number -1 finds it."""
    lists: Any = columns.header.get("descriptors")
    are_lists = type(lists) is list and all(
        type(names) is list and {*map(type, names)} <= {str} for names in lists
    )
    columns.require(are_lists, "the descriptors are no list of lists of strings")
    return [*lists, None]


def _constants(
    columns: ColumnReader, name: str, numbers: memoryview, strings: list[str], known: dict[str, Any]
) -> dict[int, Any]:
    """Returns the torch constants that a column of string numbers names, by these numbers."""
    names = {number: strings[number] for number in set(numbers.cast("q"))}
    for text in names.values():
        if text not in known:
            raise _unknown_constant(columns, name, text)
    return {number: known[text] for number, text in names.items()}


def _check_entries(
    columns: ColumnReader, strings: list[str]
) -> tuple[dict[str, int], dict[str, memoryview], dict[int, Any], dict[int, Any]]:
    """Returns numbers of entries by name, their columns, dtypes and layouts by string number."""
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
    are_ended = _C.have_ends(numbers("chunk_offsets", cells), numbers("chunk_sizes", cells))
    columns.require(are_ended, _ENDLESS, "chunk_sizes")
    dtypes = numbers("tensor_dtype", count, high=last)
    dtype_of = _constants(columns, "tensor_dtype", dtypes, strings, DTYPES)
    layouts = numbers("tensor_layout", count, high=last)
    layout_of = _constants(columns, "tensor_layout", layouts, strings, LAYOUTS)
    views["tensor_flags"] = columns.u8_view("tensor_flags", count, high=3)
    highest = len(MEMORY_FORMATS) - 1
    views["tensor_memory_format"] = columns.u8_view("tensor_memory_format", count, high=highest)
    if columns.has("tensor_stride_count"):
        counts = numbers("tensor_stride_count", count, low=-1)
        numbers("tensor_strides", _C.total(counts), low=-I64_MAX - 1)
    names = {strings[fqn]: number for number, fqn in enumerate(fqns.cast("q"))}
    columns.require(len(names) == len(kinds), "a name is there twice", "entry_fqn")
    return names, views, dtype_of, layout_of


def _check_places(columns: ColumnReader, strings: list[str]) -> dict[str, memoryview]:
    """Returns the columns of storage_data."""
    last = len(strings) - 1
    fqns = columns.i64_view("storage_fqn", None, high=last)
    count = len(fqns) // 8
    ndims = columns.i64_view("storage_ndim", count, low=-1)
    views = {
        "storage_fqn": fqns,
        "storage_ndim": ndims,
        "storage_offsets": columns.i64_view("storage_offsets", _C.total(ndims)),
        "storage_hint": columns.i64_view("storage_hint", count, low=-1),
        "storage_path": columns.i64_view("storage_path", count, high=last),
        "storage_offset": columns.i64_view("storage_offset", count),
        "storage_bytes": columns.i64_view("storage_bytes", count),
    }
    are_ended = _C.have_ends(views["storage_offset"], views["storage_bytes"])
    columns.require(are_ended, _ENDLESS, "storage_bytes")
    return views


def open_columns(columns: ColumnReader, strings: list[str]) -> tuple[StoredEntries, StoredPlaces]:
    """Checks state_dict_metadata and storage_data; returns them as dicts filled on demand.

    Raises:
        UnsupportedError: a dtype or layout of another torch, which the one that runs lacks.
    """
    names, views, dtypes, layouts = _check_entries(columns, strings)
    views |= _check_places(columns, strings)
    descriptors = _descriptors(columns)
    count, high = len(views["storage_fqn"]) // 8, len(descriptors) - 2
    views["storage_descriptors"] = columns.i64_view("storage_descriptors", count, low=-1, high=high)
    found = stored_dicts(strings, views, names, dtypes, layouts, descriptors, os.urandom(16))
    if found is None:
        raise columns.error("an item is there twice", "storage_fqn")
    return found


def open_planner(columns: ColumnReader, strings: list[str]) -> StoredPaths:
    """Checks planner_data that is a flatten mapping; returns it as a dict made on demand."""
    fqns = columns.i64_view("planner_fqn", None, high=len(strings) - 1)
    counts = columns.i64_view("planner_len", len(fqns) // 8)
    tags = columns.u8_view("planner_tag", _C.total(counts), high=1)
    values = columns.i64_view("planner_value", len(tags), low=-I64_MAX - 1)
    are_keys = _C.are_keys(tags, values, len(strings))
    columns.require(are_keys, "a value numbers no string", "planner_value")
    # Usually the names of the entries in their order, which were compared.
    if fqns != columns.i64_view("entry_fqn", None):
        names = {strings[number] for number in fqns.cast("q")}
        columns.require(len(names) == len(fqns) // 8, "a name is there twice", "planner_fqn")
    paths = stored_paths(strings, fqns.cast("q"), counts.cast("q"), tags, values.cast("q"))
    if _C.longest_list(tags, values) > MANY_PLACES:
        stored = {strings[number] for number in columns.i64_view("entry_fqn", None).cast("q")}
        are_full = have_full_lists(paths, stored)
        columns.require(are_full, "a list index that the names cannot fill", "planner_value")
    return paths


def decode_storage_meta(columns: ColumnReader) -> StorageMeta | None:
    """Returns Metadata.storage_meta."""
    values = columns.header.get("storage_meta", 0)
    if values is None:
        return None
    has_modules = type(values) is dict and type(values.get("modules")) is list
    columns.require(has_modules, "the header's 'storage_meta' is no object with modules")
    modules = values["modules"]
    columns.require({*map(type, modules)} <= {str}, "the header's modules are no strings")
    checkpoint_id = optional_str(columns, values, "checkpoint_id")
    return StorageMeta(checkpoint_id, optional_str(columns, values, "save_id"), None, modules)
