"""A checkpoint's metadata as columns.

A million objects are not looked at one by one: each pass takes one attribute of all of them, or
asks one question, in C. What the columns could not give back exactly is so noticed before anything
is written, and `metadata_refusals` then finds the object. `metadata_decode` is the way back;
docs/format.md names every column.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, compress, repeat
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

from torch_dcpx._compat import DTYPES, LAYOUTS, all_strides
from torch_dcpx.columns import I64_MAX, StringPool
from torch_dcpx.errors import PlanError
from torch_dcpx.layout import FileEntry
from torch_dcpx.metadata_refusals import NOT_STOCK, find_refusal, is_list_of_str
from torch_dcpx.stock_pickle import MEMORY_FORMATS

__all__ = ["Columns", "encode_columns", "stock_storage_meta"]

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


def _require(is_stock: bool) -> None:
    if not is_stock:
        raise ValueError("not what a checkpoint holds")


def _are(values: Iterable[object], *types: type) -> bool:
    return set(map(type, values)) <= set(types)


def _are_tuples(values: Iterable[object]) -> bool:
    return all(issubclass(kind, tuple) for kind in set(map(type, values)))


def _extend(column: array[int], values: list[int]) -> None:
    """Fills a column with numbers, which must be exact ints (else the pickle differs) and >= 0."""
    _require(_are(values, int))
    column.extend(values)  # OverflowError from 2**63 on
    signs = memoryview(column).cast("B")[7::8]  # the highest byte of each
    _require(signs.tobytes().isascii())


def _require_ends(begins: list[int], lengths: list[int]) -> None:
    """No range may end where int64 does not reach."""
    _require(max(map(add, begins, lengths), default=0) <= I64_MAX)


class _Codes(dict[tuple[Any, ...], tuple[int, int, int, int]]):
    """dtype, layout, flags and memory format as the columns hold them, by the five properties."""

    def __init__(self, pool: StringPool) -> None:
        super().__init__()
        self._pool = pool

    def __missing__(self, key: tuple[Any, ...]) -> tuple[int, int, int, int]:
        dtype, layout, requires_grad, memory_format, pin_memory = key
        codes = (
            self._pool.add(_NAMES[dtype]),
            self._pool.add(_NAMES[layout]),
            requires_grad | pin_memory << 1,
            MEMORY_FORMATS.index(memory_format),
        )
        return self.setdefault(key, codes)


def _encode_properties(properties: list[TensorProperties], out: Columns) -> None:
    """Columns of TensorProperties.

    A planner may give ShardedTensor's own class of the same fields, as torch 2.0 did; what is
    written has stock's, as every reader of old checkpoints makes of it.
    """
    columns = (
        *(out.i64("tensor_dtype"), out.i64("tensor_layout")),
        *(out.u8("tensor_flags"), out.u8("tensor_memory_format")),
    )
    if not properties:
        return
    _require(_are(properties, TensorProperties, ShardProperties))
    keys = [
        (one.dtype, one.layout, one.requires_grad, one.memory_format, one.pin_memory)
        for one in properties
    ]
    _, _, requires_grad, _, pin_memory = zip(*keys, strict=True)
    _require(_are(requires_grad, bool) and _are(pin_memory, bool))  # 1 has the codes of True
    codes = _Codes(out.pool)
    rows = map(codes.__getitem__, keys)
    for column, values in zip(columns, zip(*rows, strict=True), strict=True):
        column.extend(values)


def _encode_strides(properties: list[TensorProperties], out: Columns) -> None:
    """Columns of TensorProperties.strides; none where all are None, as in an older torch."""
    found = all_strides(properties)
    given = [strides for strides in found if strides is not None]
    if not given:
        return
    _require(_are_tuples(given))
    counts = [-1 if strides is None else len(strides) for strides in found]
    out.i64("tensor_stride_count").extend(counts)
    _extend(out.i64("tensor_strides"), list(chain.from_iterable(given)))


def _encode_entries(metadata: Metadata, out: Columns) -> dict[str, int]:
    """Columns of state_dict_metadata; returns the number of dimensions of every tensor."""
    fqns, kinds = out.i64("entry_fqn"), out.u8("entry_kind")
    names, entries = list(metadata.state_dict_metadata), list(metadata.state_dict_metadata.values())
    _require(_are(names, str) and _are(entries, TensorStorageMetadata, BytesStorageMetadata))
    fqns.extend(out.pool.numbers(names))
    is_tensor = [type(entry) is TensorStorageMetadata for entry in entries]
    kinds.extend([type(entry) is BytesStorageMetadata for entry in entries])
    tensors: list[Any] = list(compress(entries, is_tensor))
    properties = [tensor.properties for tensor in tensors]
    _encode_properties(properties, out)

    sizes = [tensor.size for tensor in tensors]
    chunk_lists = [tensor.chunks for tensor in tensors]
    _require(_are_tuples(sizes) and _are(chunk_lists, list))
    ndims, counts = list(map(len, sizes)), list(map(len, chunk_lists))
    out.i64("tensor_ndim").extend(ndims)
    out.i64("tensor_chunk_count").extend(counts)
    _extend(out.i64("tensor_sizes"), list(chain.from_iterable(sizes)))

    chunks = list(chain.from_iterable(chunk_lists))
    _require(_are(chunks, ChunkStorageMetadata))
    # One byte a chunk, so that a file of n bytes cannot claim more than n chunks of a 0-d tensor,
    # whose offsets and sizes take no bytes.
    out.u8("chunk_flags").extend(bytes(len(chunks)))
    chunk_ndims = list(chain.from_iterable(map(repeat, ndims, counts)))
    begins = _flat([chunk.offsets for chunk in chunks], chunk_ndims)
    lengths = _flat([chunk.sizes for chunk in chunks], chunk_ndims)
    _extend(out.i64("chunk_offsets"), begins)
    _extend(out.i64("chunk_sizes"), lengths)
    _require_ends(begins, lengths)
    _encode_strides(properties, out)
    return dict(zip(compress(names, is_tensor), ndims, strict=True))


def _flat(rows: list[tuple[int, ...]], ndims: list[int]) -> list[int]:
    """The numbers of all rows, which must be tuples of so many."""
    _require(_are_tuples(rows) and list(map(len, rows)) == ndims)
    return list(chain.from_iterable(rows))


def _encode_storage(metadata: Metadata, ndim_of: dict[str, int], out: Columns) -> None:
    """Columns of storage_data."""
    storage = metadata.storage_data
    _require(type(storage) is dict)
    indices, places = list(storage), list(storage.values())
    _require(_are(indices, MetadataIndex) and _are(places, _StorageInfo))
    fqns = [index.fqn for index in indices]
    paths = [place.relative_path for place in places]
    _require(_are(fqns, str) and _are(paths, str))
    out.i64("storage_fqn").extend(out.pool.numbers(fqns))

    offsets = [index.offset for index in indices]
    ndims = [-1 if offset is None else len(offset) for offset in offsets]
    tensor_ndims = list(map(ndim_of.get, fqns))
    if ndims != tensor_ndims:  # items of bytes, and indices without an offset
        pairs = zip(ndims, tensor_ndims, strict=True)
        _require(
            all(ndim == of_tensor or ndim < 0 or of_tensor is None for ndim, of_tensor in pairs)
        )
    out.i64("storage_ndim").extend(ndims)

    hints = [index.index for index in indices]
    given = [hint for hint in hints if hint is not None]
    _require(_are(given, int) and min(given, default=0) >= 0)
    out.i64("storage_hint").extend([-1 if hint is None else hint for hint in hints])
    out.i64("storage_path").extend(out.pool.numbers(paths))
    out.i64("storage_descriptors").extend(_descriptor_numbers(places, out))
    flat = [offset for offset in offsets if offset is not None]
    _extend(out.i64("storage_offsets"), list(chain.from_iterable(flat)))
    begins = [place.offset for place in places]
    lengths = [place.length for place in places]
    _extend(out.i64("storage_offset"), begins)
    _extend(out.i64("storage_bytes"), lengths)
    _require_ends(begins, lengths)


def _descriptor_numbers(places: list[_StorageInfo], out: Columns) -> list[int]:
    """Which of `out.descriptors` each place has; -1: none."""
    found = [place.transform_descriptors for place in places]
    if _are(found, type(None)):
        return [-1] * len(found)
    _require(all(names is None or is_list_of_str(names) for names in found))
    known: dict[tuple[str, ...], int] = {}
    numbers = [
        -1 if names is None else known.setdefault(tuple(names), len(known)) for names in found
    ]
    out.descriptors = list(map(list, known))
    return numbers


def _is_flatten_mapping(value: object) -> bool:
    """Whether planner_data is what flattening gives: dict[str, tuple[str | int, ...]]."""
    if type(value) is not dict or not (_are(value, str) and _are(value.values(), tuple)):
        return False
    keys = list(chain.from_iterable(value.values()))
    if not _are(keys, str, int):
        return False
    numbers = [key for key in keys if type(key) is int]
    return not numbers or (min(numbers) >= -I64_MAX - 1 and max(numbers) <= I64_MAX)


def _encode_planner(metadata: Metadata, out: Columns) -> None:
    """Columns of planner_data where it is a flatten mapping; else the pickle alone holds it."""
    planner = metadata.planner_data
    if planner is None:
        return
    if not _is_flatten_mapping(planner):
        out.planner_data = "pickle"
        return
    out.planner_data = "columns"
    out.i64("planner_fqn").extend(out.pool.numbers(planner))
    out.i64("planner_len").extend(list(map(len, planner.values())))
    keys = list(chain.from_iterable(planner.values()))
    is_int = [type(key) is int for key in keys]
    out.u8("planner_tag").extend(is_int)
    number = out.pool.number
    values = [key if type(key) is int else number[key] for key in keys]
    out.i64("planner_value").extend(values)


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
    try:
        ndim_of = _encode_entries(metadata, out)
        _encode_storage(metadata, ndim_of, out)
    except NOT_STOCK as error:
        raise find_refusal(metadata, error) from error
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
        and is_list_of_str(meta.modules)
    )
    if not is_stock:
        raise PlanError(f"encode the metadata: storage_meta is {meta!r}")
    checkpoint_id = None if where is None else str(os.fsdecode(where))
    return StorageMeta(checkpoint_id, meta.save_id, None, meta.modules)
