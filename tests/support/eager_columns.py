"""The columns of our `.metadata` decoded at once, in Python: the oracle of `open_columns`."""

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
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx._compat import DTYPES, LAYOUTS, set_strides
from torch_dcpx.metadata.columns import I64_MAX, ColumnReader
from torch_dcpx.metadata.decode import _descriptors, _unknown_constant
from torch_dcpx.metadata.stock_classes import MEMORY_FORMATS


def _texts(columns: ColumnReader, name: str, count: int | None, strings: list[str]) -> list[str]:
    numbers = columns.i64(name, count, high=len(strings) - 1)
    return [strings[number] for number in numbers]


def _constants(
    columns: ColumnReader, name: str, count: int, strings: list[str], known: dict[str, Any]
) -> list[Any]:
    """The torch constants that a column names."""
    names = _texts(columns, name, count, strings)
    for text in set(names) - set(known):
        raise _unknown_constant(columns, name, text)
    return [known[text] for text in names]


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


def _entries(columns: ColumnReader, strings: list[str]) -> dict[str, STORAGE_TYPES]:
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


def _storage(columns: ColumnReader, strings: list[str]) -> dict[MetadataIndex, _StorageInfo]:
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
    descriptors = _descriptors(columns)
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


def decode_at_once(
    columns: ColumnReader, strings: list[str]
) -> tuple[dict[str, STORAGE_TYPES], dict[MetadataIndex, _StorageInfo]]:
    """Returns state_dict_metadata and storage_data as plain dicts: in place of `open_columns`."""
    return _entries(columns, strings), _storage(columns, strings)
