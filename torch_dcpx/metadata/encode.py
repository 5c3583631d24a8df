"""A checkpoint's metadata as columns.

A million objects are not looked at one by one: each pass takes one attribute of a batch of them, or
asks one question, in C; a batch is so small that the next pass finds its objects in cache. What the
columns could not give back exactly is noticed before anything is written, and `metadata_refusals`
then finds the object. `metadata_decode` is the way back; docs/format.md names every column.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from typing import Any, TypeVar

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
from torch_dcpx._native import _C
from torch_dcpx.errors import PlanError
from torch_dcpx.metadata.columns import I64_MAX, StringPool
from torch_dcpx.metadata.refusals import NOT_STOCK, find_refusal, is_list_of_str
from torch_dcpx.metadata.stock_pickle import MEMORY_FORMATS
from torch_dcpx.storage.names import FileEntry

_NAMES: dict[object, str] = {value: name for name, value in (*DTYPES.items(), *LAYOUTS.items())}


class Columns:
    """The columns of one `.metadata` as they grow. Not thread-safe."""

    def __init__(self) -> None:
        self.pool = StringPool()
        self.descriptors: list[list[str]] = []  # the distinct transform_descriptors
        self.planner_data = "none"
        self._columns: dict[str, array[int] | bytearray] = {}

    def i64(self, name: str) -> array[int]:
        """An int64 column; the order in which they are first asked for is the file's."""
        return self._columns.setdefault(name, array("q"))  # type: ignore[return-value]

    def u8(self, name: str) -> bytearray:
        """A byte column; as for `i64`."""
        return self._columns.setdefault(name, bytearray())  # type: ignore[return-value]

    def finished(self) -> dict[str, array[int] | bytes | bytearray]:
        """Every column by its name, strings first."""
        return {**self.pool.columns(), **self._columns}


def _require(is_stock: bool) -> None:
    if not is_stock:
        raise ValueError("not what a checkpoint holds")


def _are(values: Iterable[object], *types: type) -> bool:
    return set(map(type, values)) <= set(types)


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


_T = TypeVar("_T")
_BATCH = 1000


def _batches(
    objects: dict[str, _T] | dict[MetadataIndex, _T],
) -> Iterator[tuple[list[Any], list[_T]]]:
    """Keys and values in batches; at least one, so that every column is there."""
    keys, values = list(objects), list(objects.values())
    for begin in range(0, max(len(keys), 1), _BATCH):
        yield keys[begin : begin + _BATCH], values[begin : begin + _BATCH]


def _encode_properties(properties: list[TensorProperties], codes: _Codes, out: Columns) -> None:
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
    rows = map(codes.__getitem__, keys)
    for column, values in zip(columns, zip(*rows, strict=True), strict=True):
        column.extend(values)


def _encode_strides(found: list[Any], out: Columns) -> None:
    """Columns of TensorProperties.strides; none where all are None, as in an older torch."""
    if found.count(None) == len(found):
        return
    counts, flat = _C.row_columns(found, True)
    out.i64("tensor_stride_count").frombytes(counts)
    out.i64("tensor_strides").frombytes(flat)


def _encode_entries(metadata: Metadata, out: Columns) -> dict[str, int]:
    """Columns of state_dict_metadata; returns the number of dimensions of every tensor."""
    codes = _Codes(out.pool)
    ndim_of: dict[str, int] = {}
    strides: list[Any] = []
    for fqns, entries in _batches(metadata.state_dict_metadata):
        _require(_are(entries, TensorStorageMetadata, BytesStorageMetadata))
        out.i64("entry_fqn").frombytes(_C.text_column(fqns, out.pool.numbers))
        is_tensor = [type(entry) is TensorStorageMetadata for entry in entries]
        out.u8("entry_kind").extend([not is_one for is_one in is_tensor])
        tensors: list[Any] = list(compress(entries, is_tensor))
        properties = [tensor.properties for tensor in tensors]
        _encode_properties(properties, codes, out)
        strides += all_strides(properties)
        ndims = _encode_regions(tensors, out)
        ndim_of.update(zip(compress(fqns, is_tensor), ndims, strict=True))
    _encode_strides(strides, out)
    return ndim_of


def _encode_regions(tensors: list[Any], out: Columns) -> array[int]:
    """Columns of sizes and chunks; returns the numbers of dimensions."""
    ndims, sizes = _C.row_columns([tensor.size for tensor in tensors], False)
    out.i64("tensor_ndim").frombytes(ndims)
    out.i64("tensor_sizes").frombytes(sizes)
    chunk_lists = [tensor.chunks for tensor in tensors]
    _require(_are(chunk_lists, list))
    counts = list(map(len, chunk_lists))
    out.i64("tensor_chunk_count").extend(array("q", counts))
    chunks = list(chain.from_iterable(chunk_lists))
    _require(_are(chunks, ChunkStorageMetadata))
    # One byte a chunk, so that a file of n bytes cannot claim more than n chunks of a 0-d tensor,
    # whose offsets and sizes take no bytes.
    out.u8("chunk_flags").extend(bytes(len(chunks)))
    begin_ndims, begins = _C.row_columns([chunk.offsets for chunk in chunks], False)
    length_ndims, lengths = _C.row_columns([chunk.sizes for chunk in chunks], False)
    tensor_ndims = array("q", ndims)
    if begin_ndims != ndims or set(counts) != {1}:
        of_chunks = array("q", list(chain.from_iterable(map(repeat, tensor_ndims, counts))))
        _require(begin_ndims == of_chunks.tobytes())
    _require(begin_ndims == length_ndims and _C.have_ends(begins, lengths))
    out.i64("chunk_offsets").frombytes(begins)
    out.i64("chunk_sizes").frombytes(lengths)
    return tensor_ndims


def _encode_storage(metadata: Metadata, ndim_of: dict[str, int], out: Columns) -> None:
    """Columns of storage_data."""
    storage = metadata.storage_data
    _require(type(storage) is dict)
    known: dict[tuple[str, ...], int] = {}  # transform_descriptors
    for indices, places in _batches(storage):
        _require(_are(indices, MetadataIndex) and _are(places, _StorageInfo))
        _encode_indices(indices, ndim_of, out)
        paths = [place.relative_path for place in places]
        out.i64("storage_path").frombytes(_C.text_column(paths, out.pool.numbers))
        found = [place.transform_descriptors for place in places]
        _require(all(names is None or is_list_of_str(names) for names in found))
        out.i64("storage_descriptors").extend(
            [-1 if names is None else known.setdefault(tuple(names), len(known)) for names in found]
        )
        begins = _C.size_column([place.offset for place in places], False)
        lengths = _C.size_column([place.length for place in places], False)
        _require(_C.have_ends(begins, lengths))
        out.i64("storage_offset").frombytes(begins)
        out.i64("storage_bytes").frombytes(lengths)
    out.descriptors = list(map(list, known))


def _encode_indices(indices: list[MetadataIndex], ndim_of: dict[str, int], out: Columns) -> None:
    """Columns of the keys of storage_data."""
    fqns = [index.fqn for index in indices]
    out.i64("storage_fqn").frombytes(_C.text_column(fqns, out.pool.numbers))
    hints = _C.size_column([index.index for index in indices], True)
    out.i64("storage_hint").frombytes(hints)
    ndims, offsets = _C.row_columns([index.offset for index in indices], True)
    out.i64("storage_ndim").frombytes(ndims)
    out.i64("storage_offsets").frombytes(offsets)
    wanted = list(map(ndim_of.get, fqns))
    found = array("q", ndims).tolist()
    if found != wanted:  # items of bytes, and indices without an offset
        pairs = zip(found, wanted, strict=True)
        _require(all(ndim in (-1, of_tensor) or of_tensor is None for ndim, of_tensor in pairs))


def _encode_planner(metadata: Metadata, out: Columns) -> None:
    """Columns of planner_data where it is what flattening gives; else the pickle alone holds it."""
    planner = metadata.planner_data
    if planner is None:
        return
    out.planner_data = "pickle"
    if type(planner) is not dict or not _are(planner, str):
        return
    paths = list(planner.values())
    columns = _C.path_columns(paths, out.pool.numbers)
    if columns is None:
        return
    out.planner_data = "columns"
    out.i64("planner_fqn").frombytes(_C.text_column(list(planner), out.pool.numbers))
    counts, tags, values = columns
    out.i64("planner_len").frombytes(counts)
    out.u8("planner_tag").extend(tags)
    out.i64("planner_value").frombytes(values)


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
