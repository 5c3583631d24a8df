"""A checkpoint's metadata as columns, and as the pickle that stock DCP reads.

What the columns could not give back exactly is refused here, with its key, before anything is
written. `metadata_decode` is the way back; docs/format.md names every column.
"""

from __future__ import annotations

import dataclasses
import os
from array import array
from collections.abc import Sequence
from itertools import chain
from operator import add
from typing import Any

from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx._compat import DTYPES, LAYOUTS, strides_of
from torch_dcpx.columns import I64_MAX, StringPool
from torch_dcpx.errors import PlanError
from torch_dcpx.layout import FileEntry
from torch_dcpx.stock_pickle import MEMORY_FORMATS, pickle_any, pickle_stock

__all__ = [
    "Columns",
    "encode_columns",
    "encode_pickle",
    "stock_storage_meta",
]

_NAMES: dict[object, str] = {value: name for name, value in (*DTYPES.items(), *LAYOUTS.items())}


class Columns:
    """The columns of one `.metadata` as they grow. Not thread-safe."""

    def __init__(self) -> None:
        self.pool = StringPool()
        self.descriptors: list[list[str]] = []  # the distinct transform_descriptors
        self.planner_data = "none"
        self._columns: dict[str, array[int] | bytearray] = {}

    def i64(self, name: str) -> array[int]:
        """A new int64 column; its name fixes its place."""
        column = array("q")
        self._columns[name] = column
        return column

    def u8(self, name: str) -> bytearray:
        """A new byte column."""
        column = bytearray()
        self._columns[name] = column
        return column

    def finished(self) -> dict[str, array[int] | bytes | bytearray]:
        """Every column by its name, strings first."""
        return {**self.pool.columns(), **self._columns}


# What len, array and iteration say about an object that is not stock's.
_NOT_STOCK = (TypeError, ValueError, KeyError, OverflowError, AttributeError)


def _refusal(key: object, why: object) -> PlanError:
    fqn = str(getattr(key, "fqn", key))
    return PlanError(
        f"encode the metadata of {fqn!r}: {why}; a checkpoint holds stock's classes, names of type "
        "str, and sizes of type int in [0, 2**63)",
        fqn=fqn,
    )


def _are_sizes(values: list[int]) -> bool:
    """Whether all are exact ints (the pickle would ship a numpy scalar) in [0, 2**63)."""
    if not set(map(type, values)) <= {int}:
        return False
    return not values or (min(values) >= 0 and max(values) <= I64_MAX)


def _have_ends(begins: list[int], lengths: list[int]) -> bool:
    """Whether no range ends where int64 does not reach."""
    return max(map(add, begins, lengths), default=0) <= I64_MAX


def _codes(properties: TensorProperties, pool: StringPool) -> tuple[int, int, int, int]:
    """dtype, layout, flags and memory format as the columns hold them.

    A planner may give ShardedTensor's own class of the same fields, as torch 2.0 did; what is
    written has stock's, as every reader of old checkpoints makes of it.
    """
    flags = (properties.requires_grad, properties.pin_memory)
    is_stock = type(properties) in (TensorProperties, ShardProperties)
    if not is_stock or set(map(type, flags)) != {bool}:
        raise TypeError(f"its properties are {properties!r}")
    return (
        pool.add(_NAMES[properties.dtype]),
        pool.add(_NAMES[properties.layout]),
        flags[0] | flags[1] << 1,
        MEMORY_FORMATS.index(properties.memory_format),
    )


def _are_regions(entry: TensorStorageMetadata) -> bool:
    """Whether size and chunks are numbers that the columns can hold; slow, to find the culprit."""
    chunks = [(list(chunk.offsets), list(chunk.sizes)) for chunk in entry.chunks]
    return _are_sizes(list(entry.size)) and all(
        _are_sizes(offsets + sizes) and _have_ends(offsets, sizes) for offsets, sizes in chunks
    )


def _encode_entries(metadata: Metadata, out: Columns) -> dict[str, int]:
    """Columns of state_dict_metadata; returns the number of dimensions of every tensor."""
    fqns, kinds = out.i64("entry_fqn"), out.u8("entry_kind")
    codes = (
        *(out.i64("tensor_dtype"), out.i64("tensor_layout")),
        *(out.u8("tensor_flags"), out.u8("tensor_memory_format")),
    )
    ndims, chunk_counts = out.i64("tensor_ndim"), out.i64("tensor_chunk_count")
    sizes: list[int] = []
    chunk_offsets: list[int] = []
    chunk_sizes: list[int] = []
    pool = out.pool
    tensors: dict[str, TensorStorageMetadata] = {}
    fqn: object = None
    try:
        for fqn, entry in metadata.state_dict_metadata.items():
            if type(fqn) is not str:
                raise TypeError(f"its name is of type {type(fqn).__name__}")
            fqns.append(pool.add(fqn))
            if type(entry) is BytesStorageMetadata:
                kinds.append(1)
                continue
            if type(entry) is not TensorStorageMetadata or type(entry.chunks) is not list:
                raise TypeError(f"its entry is {entry!r:.300}")
            if not isinstance(entry.size, tuple):
                raise TypeError(f"its size is {entry.size!r}")
            tensors[fqn] = entry
            kinds.append(0)
            for column, code in zip(codes, _codes(entry.properties, pool), strict=True):
                column.append(code)
            ndim = len(entry.size)
            ndims.append(ndim)
            sizes += entry.size
            chunk_counts.append(len(entry.chunks))
            for chunk in entry.chunks:
                if type(chunk) is not ChunkStorageMetadata:
                    raise TypeError(f"a chunk is a {type(chunk).__name__}")
                offsets, lengths = chunk.offsets, chunk.sizes
                is_region = isinstance(offsets, tuple) and isinstance(lengths, tuple)
                if not is_region or len(offsets) != ndim or len(lengths) != ndim:
                    raise TypeError(f"{chunk!r} is no region of a tensor of {ndim} dimensions")
                chunk_offsets += offsets
                chunk_sizes += lengths
        if not _are_sizes(sizes + chunk_offsets + chunk_sizes) or not _have_ends(
            chunk_offsets, chunk_sizes
        ):
            fqn = next(name for name, entry in tensors.items() if not _are_regions(entry))
            raise ValueError(f"size and chunks are {tensors[fqn]!r:.300}")
    except _NOT_STOCK as error:
        raise _refusal(fqn, error) from error
    out.i64("tensor_sizes").extend(sizes)
    # One byte a chunk, so that a file of n bytes cannot claim more than n chunks of a 0-d tensor,
    # whose offsets and sizes take no bytes.
    out.u8("chunk_flags").extend(bytes(sum(chunk_counts)))
    out.i64("chunk_offsets").extend(chunk_offsets)
    out.i64("chunk_sizes").extend(chunk_sizes)
    _encode_strides(tensors, out)
    return dict(zip(tensors, ndims, strict=True))


def _encode_strides(tensors: dict[str, TensorStorageMetadata], out: Columns) -> None:
    """Columns of TensorProperties.strides; none where all are None, as in an older torch."""
    found = {fqn: strides_of(entry.properties) for fqn, entry in tensors.items()}
    if all(strides is None for strides in found.values()):
        return
    counts, flat = out.i64("tensor_stride_count"), out.i64("tensor_strides")
    for fqn, strides in found.items():
        values = list(strides) if isinstance(strides, tuple) else []
        if len(values) != len(strides or ()) or not _are_sizes(values):
            raise _refusal(fqn, f"its strides are {strides!r}")
        counts.append(-1 if strides is None else len(values))
        flat.extend(values)


def _is_place(index: MetadataIndex, place: _StorageInfo) -> bool:
    hint = index.index
    names = place.transform_descriptors
    return (
        type(index) is MetadataIndex
        and type(index.fqn) is str
        and (hint is None or (type(hint) is int and hint >= 0))
        and type(place) is _StorageInfo
        and type(place.relative_path) is str
        and type(place.offset) is int
        and type(place.length) is int
        and (names is None or _is_list_of_str(names))
    )


def _encode_storage(metadata: Metadata, ndim_of: dict[str, int], out: Columns) -> None:
    """Columns of storage_data."""
    storage = metadata.storage_data
    if type(storage) is not dict:
        raise PlanError(f"encode the metadata: storage_data is a {type(storage).__name__}, no dict")
    fqns, ndims = out.i64("storage_fqn"), out.i64("storage_ndim")
    hints, paths = out.i64("storage_hint"), out.i64("storage_path")
    descriptors = out.i64("storage_descriptors")
    flat: list[int] = []
    begins: list[int] = []
    lengths: list[int] = []
    pool, known = out.pool, dict[tuple[str, ...], int]()
    index: Any = None
    try:
        for index, place in storage.items():
            if not _is_place(index, place):
                raise TypeError(f"{index!r} lies in {place!r}")
            fqns.append(pool.add(index.fqn))
            ndim = -1
            if index.offset is not None:
                ndim = len(index.offset)
                if ndim != ndim_of.get(index.fqn, ndim):
                    raise ValueError(f"{index!r} has another number of dimensions than its tensor")
                flat += index.offset
            ndims.append(ndim)
            hints.append(-1 if index.index is None else index.index)
            paths.append(pool.add(place.relative_path))
            begins.append(place.offset)
            lengths.append(place.length)
            names = place.transform_descriptors
            descriptors.append(-1 if names is None else known.setdefault(tuple(names), len(known)))
        if not _are_sizes(flat + begins + lengths) or not _have_ends(begins, lengths):
            for index, place in storage.items():
                ends = [place.offset, place.length, place.offset + place.length]
                if not _are_sizes([*(index.offset or ()), *ends]):
                    raise ValueError(f"{index!r} lies in {place!r}")
    except _NOT_STOCK as error:
        raise _refusal(index, error) from error
    out.i64("storage_offsets").extend(flat)
    out.i64("storage_offset").extend(begins)
    out.i64("storage_bytes").extend(lengths)
    out.descriptors = list(map(list, known))


def _is_list_of_str(value: object) -> bool:
    return type(value) is list and all(type(item) is str for item in value)


def _is_flatten_mapping(value: object) -> bool:
    """Whether planner_data is what flattening gives: dict[str, tuple[str | int, ...]]."""
    if type(value) is not dict or not set(map(type, value)) <= {str}:
        return False
    if not set(map(type, value.values())) <= {tuple}:
        return False
    keys = list(chain.from_iterable(value.values()))
    if not set(map(type, keys)) <= {str, int}:
        return False
    numbers = [key for key in keys if type(key) is int]
    return not numbers or (min(numbers) >= -I64_MAX - 1 and max(numbers) <= I64_MAX)


def _encode_planner(metadata: Metadata, out: Columns) -> None:
    """Columns of planner_data where it is a flatten mapping; else the pickle alone holds it."""
    if metadata.planner_data is None:
        return
    if not _is_flatten_mapping(metadata.planner_data):
        out.planner_data = "pickle"
        return
    out.planner_data = "columns"
    fqns, counts = out.i64("planner_fqn"), out.i64("planner_len")
    tags, values = out.u8("planner_tag"), out.i64("planner_value")
    pool = out.pool
    for fqn, path in metadata.planner_data.items():
        fqns.append(pool.add(fqn))
        counts.append(len(path))
        for key in path:
            is_text = type(key) is str
            tags.append(0 if is_text else 1)
            values.append(pool.add(key) if is_text else key)


def _encode_files(files: Sequence[FileEntry], out: Columns) -> None:
    """Columns of the file table."""
    paths, ids = out.i64("file_path"), out.u8("file_id")
    nbytes, crcs = out.i64("file_bytes"), out.i64("file_crc")
    seen = set()
    for file in files:
        is_valid = (
            type(file.path) is str
            and file.path not in seen
            and len(file.file_id) == 16
            and 0 <= file.nbytes <= I64_MAX
            and 0 <= file.footer_crc < 1 << 32
        )
        if not is_valid:
            raise PlanError(f"encode the file table: {file!r} is no file, or is there twice")
        seen.add(file.path)
        paths.append(out.pool.add(file.path))
        ids.extend(file.file_id)
        nbytes.append(file.nbytes)
        crcs.append(file.footer_crc)


def encode_columns(metadata: Metadata, files: Sequence[FileEntry]) -> Columns:
    """Everything that `metadata` and `files` say, as columns.

    Raises:
        PlanError: something that the columns cannot hold; its key is the error's `fqn`.
    """
    out = Columns()
    ndim_of = _encode_entries(metadata, out)
    _encode_storage(metadata, ndim_of, out)
    _encode_planner(metadata, out)
    _encode_files(files, out)
    return out


def stock_storage_meta(metadata: Metadata) -> StorageMeta | None:
    """The storage_meta to be written: no load id, and the checkpoint's id as a string.

    A Path would be pickled as `pathlib._local.PosixPath` by Python 3.13, which older ones lack.

    Raises:
        PlanError: a value of another type than stock's.
    """
    meta = metadata.storage_meta
    if meta is None:
        return None
    where = meta.checkpoint_id
    is_stock = (
        type(meta) is StorageMeta
        and (where is None or isinstance(where, (str, os.PathLike)))
        and (meta.save_id is None or type(meta.save_id) is str)
        and _is_list_of_str(meta.modules)
    )
    if not is_stock:
        raise PlanError(f"encode the metadata: storage_meta is {meta!r}")
    checkpoint_id = None if where is None else str(os.fsdecode(where))
    return StorageMeta(checkpoint_id, meta.save_id, None, meta.modules)


def encode_pickle(metadata: Metadata, storage_meta: StorageMeta | None, is_stock: bool) -> bytes:
    """The pickle, for every torch and Python that is supported; `metadata` stays as it is.

    Args:
        metadata: that `encode_columns` has taken.
        storage_meta: what to write as its storage_meta.
        is_stock: planner_data is in the columns as well, or None.

    Raises:
        PlanError: planner_data that cannot be pickled.
    """
    if is_stock:
        return pickle_stock(metadata, storage_meta)
    try:
        return pickle_any(dataclasses.replace(metadata, storage_meta=storage_meta))
    except Exception as error:
        raise PlanError(f"pickle the metadata with its planner_data: {error}") from error
