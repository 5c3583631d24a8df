"""Stock's Metadata out of the columns of our `.metadata`, without any pickle.

The way back of `metadata_encode`. A file whose checksums are right may still be hostile, so every
length, number of a string, sum and range is checked before it is used, and nothing is built whose
size the file's own size does not bound.
"""

from __future__ import annotations

from operator import add, mul
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx._compat import DTYPES, LAYOUTS, TORCH_VERSION, set_strides
from torch_dcpx.errors import DcpxError, UnsupportedError
from torch_dcpx.metadata.columns import I64_MAX, ColumnReader
from torch_dcpx.metadata.stock_pickle import MEMORY_FORMATS
from torch_dcpx.storage.names import FileEntry, id_bytes


def _texts(columns: ColumnReader, name: str, count: int | None, strings: list[str]) -> list[str]:
    """The strings that a column of string numbers names."""
    numbers = columns.i64(name, count, high=len(strings) - 1)
    return [strings[number] for number in numbers]


def _constants(
    columns: ColumnReader, name: str, count: int, strings: list[str], known: dict[str, Any]
) -> list[Any]:
    """The torch constants that a column names."""
    names = _texts(columns, name, count, strings)
    for text in set(names) - set(known):
        raise unknown_constant(columns, name, text)
    return [known[text] for text in names]


def unknown_constant(columns: ColumnReader, name: str, text: str) -> DcpxError:
    """The error for a constant in column `name` that this torch lacks: written by another torch,
    or by none.
    """
    error = columns.error(f"{text!r} is unknown to torch {TORCH_VERSION}", name)
    writer = columns.header.get("torch")
    if writer == TORCH_VERSION:
        return error
    unsupported = UnsupportedError(f"{error}; torch {writer} wrote it")
    unsupported.__cause__ = error
    return unsupported


def _check_ends(columns: ColumnReader, name: str, begins: list[int], lengths: list[int]) -> None:
    if max(map(add, begins, lengths), default=0) > I64_MAX:
        raise columns.error("a range ends beyond 2**63 - 1", name)


def _decode_strides(columns: ColumnReader, count: int) -> list[tuple[int, ...] | None]:
    """TensorProperties.strides of every tensor (None: unknown, as in files of older torch)."""
    if not columns.has("tensor_stride_count"):
        return [None] * count
    ndims = columns.i64("tensor_stride_count", count, low=-1)
    flat = columns.i64("tensor_strides", sum(max(ndim, 0) for ndim in ndims), low=-I64_MAX - 1)
    strides: list[tuple[int, ...] | None] = []
    begin = 0
    for ndim in ndims:
        strides.append(None if ndim < 0 else tuple(flat[begin : begin + ndim]))
        begin += max(ndim, 0)
    return strides


def _decode_properties(
    columns: ColumnReader, count: int, strings: list[str]
) -> list[TensorProperties]:
    properties = [
        TensorProperties(dtype, layout, bool(flags & 1), MEMORY_FORMATS[code], bool(flags & 2))
        for dtype, layout, flags, code in zip(
            _constants(columns, "tensor_dtype", count, strings, DTYPES),
            _constants(columns, "tensor_layout", count, strings, LAYOUTS),
            columns.u8("tensor_flags", count, high=3),
            columns.u8("tensor_memory_format", count, high=len(MEMORY_FORMATS) - 1),
            strict=True,
        )
    ]
    strides = _decode_strides(columns, count)
    for one, its_strides in zip(properties, strides, strict=True):
        set_strides(one, its_strides)
    return properties


def _decode_tensors(
    columns: ColumnReader, count: int, strings: list[str]
) -> list[TensorStorageMetadata]:
    ndims = columns.i64("tensor_ndim", count)
    flat_sizes = columns.i64("tensor_sizes", sum(ndims))
    chunk_counts = columns.i64("tensor_chunk_count", count)
    columns.u8("chunk_flags", sum(chunk_counts), high=0)  # bounds the chunks of 0-d tensors
    cells = sum(map(mul, ndims, chunk_counts))
    flat_offsets = columns.i64("chunk_offsets", cells)
    flat_lengths = columns.i64("chunk_sizes", cells)
    _check_ends(columns, "chunk_sizes", flat_offsets, flat_lengths)
    tensors = []
    size_at = chunk_at = 0
    new_size = torch.Size
    for ndim, chunk_count, properties in zip(
        ndims, chunk_counts, _decode_properties(columns, count, strings), strict=True
    ):
        size = new_size(flat_sizes[size_at : size_at + ndim])
        size_at += ndim
        chunks = []
        for _ in range(chunk_count):
            end = chunk_at + ndim
            chunks.append(
                ChunkStorageMetadata(
                    new_size(flat_offsets[chunk_at:end]), new_size(flat_lengths[chunk_at:end])
                )
            )
            chunk_at = end
        tensors.append(TensorStorageMetadata(properties, size, chunks))
    return tensors


def decode_entries(columns: ColumnReader, strings: list[str]) -> dict[str, STORAGE_TYPES]:
    """Metadata.state_dict_metadata.

    Raises:
        CorruptionError: columns that contradict each other.
        UnsupportedError: a dtype or layout of another torch, which the one that runs lacks.
    """
    kinds = columns.u8("entry_kind", None, high=1)
    fqns = _texts(columns, "entry_fqn", len(kinds), strings)
    tensors = iter(_decode_tensors(columns, kinds.count(0), strings))
    entries: dict[str, STORAGE_TYPES] = {
        fqn: BytesStorageMetadata() if kind else next(tensors)
        for fqn, kind in zip(fqns, kinds, strict=True)
    }
    if len(entries) != len(fqns):
        raise columns.error("a name is there twice", "entry_fqn")
    return entries


def decode_descriptors(columns: ColumnReader) -> list[list[str] | None]:
    """The distinct transform_descriptors, None last so that number -1 finds it."""
    lists = columns.header.get("descriptors")
    if type(lists) is not list or not all(
        type(names) is list and all(type(name) is str for name in names) for names in lists
    ):
        raise columns.error("the descriptors are no list of lists of strings")
    return [*lists, None]


def decode_storage(columns: ColumnReader, strings: list[str]) -> dict[MetadataIndex, _StorageInfo]:
    """Metadata.storage_data.

    Raises:
        CorruptionError: columns that contradict each other.
    """
    fqns = _texts(columns, "storage_fqn", None, strings)
    count = len(fqns)
    ndims = columns.i64("storage_ndim", count, low=-1)
    flat = columns.i64("storage_offsets", sum(max(ndim, 0) for ndim in ndims))
    hints = columns.i64("storage_hint", count, low=-1)
    paths = _texts(columns, "storage_path", count, strings)
    begins = columns.i64("storage_offset", count)
    lengths = columns.i64("storage_bytes", count)
    _check_ends(columns, "storage_bytes", begins, lengths)
    descriptors = decode_descriptors(columns)
    numbers = columns.i64("storage_descriptors", count, low=-1, high=len(descriptors) - 2)
    storage = {}
    at = 0
    for fqn, ndim, hint, path, begin, nbytes, number in zip(
        fqns, ndims, hints, paths, begins, lengths, numbers, strict=True
    ):
        offset = None
        if ndim >= 0:
            offset = flat[at : at + ndim]
            at += ndim
        index = MetadataIndex(fqn, offset, None if hint < 0 else hint)
        storage[index] = _StorageInfo(path, begin, nbytes, descriptors[number])
    if len(storage) != count:
        raise columns.error("an item is there twice", "storage_fqn")
    return storage


def decode_planner(columns: ColumnReader, strings: list[str]) -> dict[str, tuple[str | int, ...]]:
    """Metadata.planner_data where it is a flatten mapping.

    Raises:
        CorruptionError: columns that contradict each other.
    """
    fqns = _texts(columns, "planner_fqn", None, strings)
    counts = columns.i64("planner_len", len(fqns))
    tags = columns.u8("planner_tag", sum(counts), high=1)
    values = columns.i64("planner_value", len(tags), low=-I64_MAX - 1)
    # Of one tag or the other: a number of a string or the integer itself.
    is_known = range(len(strings)).__contains__
    if not all(tag or is_known(value) for tag, value in zip(tags, values, strict=True)):
        raise columns.error("a value numbers no string", "planner_value")
    keys: list[str | int] = [
        value if tag else strings[value] for tag, value in zip(tags, values, strict=True)
    ]
    mapping = {}
    begin = 0
    for fqn, count in zip(fqns, counts, strict=True):
        mapping[fqn] = tuple(keys[begin : begin + count])
        begin += count
    if len(mapping) != len(fqns):
        raise columns.error("a name is there twice", "planner_fqn")
    return mapping


def decode_files(columns: ColumnReader, strings: list[str]) -> dict[str, FileEntry]:
    """The file table by path.

    Raises:
        CorruptionError: columns that contradict each other.
    """
    paths = _texts(columns, "file_path", None, strings)
    ids = columns.u8("file_id", 16 * len(paths))
    sizes = columns.i64("file_bytes", len(paths))
    crcs = columns.i64("file_crc", len(paths), high=(1 << 32) - 1)
    save_id = id_bytes(columns.header.get("save_id"))
    files = {
        path: FileEntry(path, ids[16 * number : 16 * number + 16], nbytes, crc, save_id)
        for number, (path, nbytes, crc) in enumerate(zip(paths, sizes, crcs, strict=True))
    }
    if len(files) != len(paths):
        raise columns.error("a file is there twice", "file_path")
    return files


def optional_str(columns: ColumnReader, values: dict[str, Any], name: str) -> str | None:
    """Value `name` of the header or a dict in it, which is a string or null.

    Raises:
        CorruptionError: it is missing or of another type.
    """
    value = values.get(name, 0)
    if value is not None and type(value) is not str:
        raise columns.error(f"the header's {name!r} is no string")
    return value


def decode_storage_meta(columns: ColumnReader) -> StorageMeta | None:
    """Metadata.storage_meta.

    Raises:
        CorruptionError: values of another type than stock's.
    """
    values = columns.header.get("storage_meta", 0)
    if values is None:
        return None
    if type(values) is not dict or type(values.get("modules")) is not list:
        raise columns.error("the header's 'storage_meta' is no object with modules")
    if not all(type(name) is str for name in values["modules"]):
        raise columns.error("the header's modules are no strings")
    return StorageMeta(
        optional_str(columns, values, "checkpoint_id"),
        optional_str(columns, values, "save_id"),
        None,
        values["modules"],
    )
