"""A checkpoint's metadata as columns.

Each pass takes one attribute of a batch of objects, or makes one check, in C: a million objects are
not looked at one by one, and the next pass finds the batch in cache. The encoder refuses anything
that the columns could not give back exactly, before a byte is written. It then halves the metadata
down to one object, which the error names. `decode` is the way back;
docs/reference/format.md names every column.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from torch_dcpx.metadata.lazy import MANY_PLACES, have_full_lists
from torch_dcpx.metadata.stock_classes import MEMORY_FORMATS
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
        """Returns an int64 column. The order of the first calls is the file's."""
        return self._columns.setdefault(name, array("q"))  # type: ignore[return-value]

    def u8(self, name: str) -> bytearray:
        """As `i64`, a byte column."""
        return self._columns.setdefault(name, bytearray())  # type: ignore[return-value]

    def finished(self) -> dict[str, array[int] | bytes | bytearray]:
        """Returns every column by its name, strings first."""
        return {**self.pool.columns(), **self._columns}


# Objects that are not stock's make len, array, iteration and the columns' C++ raise one of these.
_NOT_STOCK = (TypeError, ValueError, KeyError, OverflowError, AttributeError)


def _require(is_stock: bool, offence: str) -> None:
    if not is_stock:
        raise ValueError(offence)


def _are(values: Iterable[object], *types: type) -> bool:
    return set(map(type, values)) <= set(types)


def _is_list_of_str(value: object) -> bool:
    """Returns whether `value` is exactly a list, of nothing but str."""
    return type(value) is list and _are(value, str)


class _Codes(dict[tuple[Any, ...], tuple[int, int, int, int]]):
    """Codes of dtype, layout, flags and memory format in the columns, by the five properties."""

    def __init__(self, pool: StringPool) -> None:
        super().__init__()
        self._pool = pool

    def __missing__(self, key: tuple[Any, ...]) -> tuple[int, int, int, int]:
        dtype, layout, requires_grad, memory_format, pin_memory = key
        names = self._pool.add(_NAMES[dtype]), self._pool.add(_NAMES[layout])
        flags = requires_grad | pin_memory << 1
        return self.setdefault(key, (*names, flags, MEMORY_FORMATS.index(memory_format)))


_T = TypeVar("_T")
_BATCH = 1000


def _batches(
    objects: dict[str, _T] | dict[MetadataIndex, _T],
) -> Iterator[tuple[list[Any], list[_T]]]:
    """Yields keys and values in batches; at least one, so that every column is there."""
    keys, values = list(objects), list(objects.values())
    for begin in range(0, max(len(keys), 1), _BATCH):
        yield keys[begin : begin + _BATCH], values[begin : begin + _BATCH]


def _encode_properties(properties: list[TensorProperties], codes: _Codes, out: Columns) -> None:
    """Adds the columns of TensorProperties, or of ShardedTensor's own class of the same fields.

    A planner may give that, as torch 2.0 did; the file names stock's, as readers of old files do.
    """
    columns = (
        *(out.i64("tensor_dtype"), out.i64("tensor_layout")),
        *(out.u8("tensor_flags"), out.u8("tensor_memory_format")),
    )
    if not properties:
        return
    _require(_are(properties, TensorProperties, ShardProperties), "properties of another class")
    keys = [
        (one.dtype, one.layout, one.requires_grad, one.memory_format, one.pin_memory)
        for one in properties
    ]
    _, _, requires_grad, _, pin_memory = zip(*keys, strict=True)
    _require(_are(requires_grad + pin_memory, bool), "a flag that is no bool")  # 1 has True's codes
    rows = map(codes.__getitem__, keys)
    for column, values in zip(columns, zip(*rows, strict=True), strict=True):
        column.extend(values)


def _encode_entries(entries_of: dict[str, Any], out: Columns) -> dict[str, int]:
    """Adds the columns of state_dict_metadata; returns the dimensions of every tensor."""
    codes = _Codes(out.pool)
    ndim_of: dict[str, int] = {}
    strides: list[Any] = []
    for fqns, entries in _batches(entries_of):
        _require(_are(entries, TensorStorageMetadata, BytesStorageMetadata), "of another class")
        out.i64("entry_fqn").frombytes(_C.text_column(fqns, out.pool.numbers))
        is_tensor = [type(entry) is TensorStorageMetadata for entry in entries]
        out.u8("entry_kind").extend([not is_one for is_one in is_tensor])
        tensors: list[Any] = list(compress(entries, is_tensor))
        properties = [tensor.properties for tensor in tensors]
        _encode_properties(properties, codes, out)
        strides += all_strides(properties)
        ndim_of.update(zip(compress(fqns, is_tensor), _encode_regions(tensors, out), strict=True))
    if strides.count(None) < len(strides):  # an older torch has none
        counts, flat = _C.row_columns(strides, True)
        out.i64("tensor_stride_count").frombytes(counts)
        out.i64("tensor_strides").frombytes(flat)
    return ndim_of


def _encode_regions(tensors: list[Any], out: Columns) -> array[int]:
    """Adds the columns of sizes and chunks; returns the numbers of dimensions."""
    ndims, sizes = _C.row_columns([tensor.size for tensor in tensors], False)
    out.i64("tensor_ndim").frombytes(ndims)
    out.i64("tensor_sizes").frombytes(sizes)
    chunk_lists = [tensor.chunks for tensor in tensors]
    _require(_are(chunk_lists, list), "chunks that are no list")
    counts = list(map(len, chunk_lists))
    out.i64("tensor_chunk_count").extend(array("q", counts))
    chunks = list(chain.from_iterable(chunk_lists))
    _require(_are(chunks, ChunkStorageMetadata), "a chunk of another class")
    # One byte a chunk, so that a file of n bytes cannot claim more than n chunks of a 0-d tensor,
    # whose offsets and sizes take no bytes.
    out.u8("chunk_flags").extend(bytes(len(chunks)))
    begin_ndims, begins = _C.row_columns([chunk.offsets for chunk in chunks], False)
    length_ndims, lengths = _C.row_columns([chunk.sizes for chunk in chunks], False)
    tensor_ndims, unlike = array("q", ndims), "a chunk of other dimensions than its tensor"
    if begin_ndims != ndims or set(counts) != {1}:
        of_chunks = array("q", list(chain.from_iterable(map(repeat, tensor_ndims, counts))))
        _require(begin_ndims == of_chunks.tobytes(), unlike)
    _require(begin_ndims == length_ndims, unlike)
    _require(_C.have_ends(begins, lengths), "a chunk that ends beyond 2**63 - 1")
    out.i64("chunk_offsets").frombytes(begins)
    out.i64("chunk_sizes").frombytes(lengths)
    return tensor_ndims


def _encode_storage(
    storage: dict[MetadataIndex, Any], ndim_of: dict[str, int], out: Columns
) -> None:
    """Adds the columns of storage_data."""
    known: dict[tuple[str, ...], int] = {}  # transform_descriptors
    for indices, places in _batches(storage):
        _require(_are(indices, MetadataIndex), "an index of another class")
        _require(_are(places, _StorageInfo), "a place of another class")
        _encode_indices(indices, ndim_of, out)
        paths = [place.relative_path for place in places]
        out.i64("storage_path").frombytes(_C.text_column(paths, out.pool.numbers))
        found = [place.transform_descriptors for place in places]
        are_lists = all(names is None or _is_list_of_str(names) for names in found)
        _require(are_lists, "transform_descriptors that are no list of str")
        out.i64("storage_descriptors").extend(
            [-1 if names is None else known.setdefault(tuple(names), len(known)) for names in found]
        )
        begins = _C.size_column([place.offset for place in places], False)
        lengths = _C.size_column([place.length for place in places], False)
        _require(_C.have_ends(begins, lengths), "an item that ends beyond 2**63 - 1")
        out.i64("storage_offset").frombytes(begins)
        out.i64("storage_bytes").frombytes(lengths)
    out.descriptors = list(map(list, known))


def _encode_indices(indices: list[MetadataIndex], ndim_of: dict[str, int], out: Columns) -> None:
    """Adds the columns of the keys of storage_data."""
    fqns = [index.fqn for index in indices]
    out.i64("storage_fqn").frombytes(_C.text_column(fqns, out.pool.numbers))
    out.i64("storage_hint").frombytes(_C.size_column([index.index for index in indices], True))
    ndims, offsets = _C.row_columns([index.offset for index in indices], True)
    out.i64("storage_ndim").frombytes(ndims)
    out.i64("storage_offsets").frombytes(offsets)
    wanted, found = list(map(ndim_of.get, fqns)), array("q", ndims).tolist()
    if found != wanted:  # items of bytes, and indices without an offset
        pairs = zip(found, wanted, strict=True)
        are_alike = all(ndim in (-1, wants) or wants is None for ndim, wants in pairs)
        _require(are_alike, "another number of dimensions than its tensor's")


def _encode_planner(metadata: Metadata, out: Columns) -> None:
    """Adds the columns of planner_data that flattening gave; the pickle alone holds any other."""
    planner = metadata.planner_data
    if planner is None:
        return
    out.planner_data = "pickle"
    paths = list(planner.values()) if type(planner) is dict and _are(planner, str) else None
    columns = None if paths is None else _C.path_columns(paths, out.pool.numbers)
    is_short = columns is not None and _C.longest_list(*columns[1:]) <= MANY_PLACES
    is_own = not isinstance(planner, dict)
    if not (is_short or is_own or have_full_lists(planner, metadata.state_dict_metadata)):
        raise PlanError(
            "the lists of the state are far longer than their tensors and objects are many, and no "
            "load would take that: leave empty dicts out of them, or keep a dict by number"
        )
    if columns is None:
        return
    out.planner_data = "columns"
    out.i64("planner_fqn").frombytes(_C.text_column(list(planner), out.pool.numbers))
    counts, tags, values = columns
    out.i64("planner_len").frombytes(counts)
    out.u8("planner_tag").extend(tags)
    out.i64("planner_value").frombytes(values)


def _encode_files(files: Sequence[FileEntry], out: Columns) -> None:
    """Adds the columns of the file table."""
    seen: dict[str, None] = {}
    for file in files:
        if not (
            type(file.path) is str
            and file.path not in seen
            and len(file.file_id) == 16
            and 0 <= file.nbytes <= I64_MAX
            and 0 <= file.footer_crc < 1 << 32
        ):
            raise PlanError(f"encode the file table: {file!r} is no file, or is there twice")
        seen[file.path] = None
    out.i64("file_path").extend(map(out.pool.add, seen))
    out.u8("file_id").extend(b"".join(file.file_id for file in files))
    out.i64("file_bytes").extend(file.nbytes for file in files)
    out.i64("file_crc").extend(file.footer_crc for file in files)


def encode_columns(metadata: Metadata, files: Sequence[FileEntry]) -> Columns:
    """Returns both as columns. Raises PlanError, the key as `fqn`, for what these cannot hold."""
    for name, is_any in (("state_dict_metadata", True), ("storage_data", False)):
        kind = type(getattr(metadata, name))
        if not (issubclass(kind, dict) if is_any else kind is dict):
            raise PlanError(f"encode the metadata: {name} is a {kind.__name__}, no dict")
    out = Columns()
    try:
        ndim_of = _encode_entries(metadata.state_dict_metadata, out)
        _encode_storage(metadata.storage_data, ndim_of, out)
    except _NOT_STOCK as error:
        raise _refusal(metadata, error) from error
    _encode_planner(metadata, out)
    _encode_files(files, out)
    return out


def _refusal(metadata: Metadata, error: Exception) -> PlanError:
    """Returns the error for the first object of refused metadata that the columns cannot hold."""
    entries, storage = metadata.state_dict_metadata, metadata.storage_data
    found = _first_refused(entries, lambda some: _encode_entries(some, Columns()))
    if found is not None:
        why = f"its entry is {found[1]!r:.300} ({found[2]})"
    else:
        sizes = {fqn: getattr(entry, "size", None) for fqn, entry in entries.items()}
        ndim_of = {fqn: len(size) for fqn, size in sizes.items() if size is not None}
        found = _first_refused(storage, lambda some: _encode_storage(some, ndim_of, Columns()))
        if found is None:
            return PlanError(f"encode the metadata: {error}, or it changed meanwhile")
        why = f"{found[0]!r} lies in {found[1]!r} ({found[2]})"
    fqn = str(getattr(found[0], "fqn", found[0]))
    return PlanError(
        f"encode the metadata of {fqn!r}: {why}; a checkpoint holds stock's classes, names of type "
        "str, and sizes of type int in [0, 2**63)",
        fqn=fqn,
    )


def _first_refused(
    objects: dict[Any, Any], encode: Callable[[dict[Any, Any]], object]
) -> tuple[Any, Any, Exception] | None:
    """Returns the first key and value that `encode` refuses, and why; None: it takes them all.

    Halving them costs thrice the encoding of all.
    """
    items = list(objects.items())
    try:
        encode(objects)
        return None
    except _NOT_STOCK as error:
        if len(items) == 1:
            return (*items[0], error)
    half = len(items) // 2
    return _first_refused(dict(items[:half]), encode) or _first_refused(dict(items[half:]), encode)


def stock_storage_meta(metadata: Metadata) -> StorageMeta | None:
    """Returns the storage_meta to be written, or raises PlanError for another type than stock's.

    It has no load id, and the checkpoint's id as a string: Python 3.13 would pickle a Path as
    `pathlib._local.PosixPath`, which older ones lack.
    """
    meta = metadata.storage_meta
    if meta is None:
        return None
    where = meta.checkpoint_id
    if not (
        type(meta) is StorageMeta
        and (where is None or isinstance(where, (str, os.PathLike)))
        and (meta.save_id is None or type(meta.save_id) is str)
        and _is_list_of_str(meta.modules)
    ):
        raise PlanError(f"encode the metadata: storage_meta is {meta!r}")
    checkpoint_id = None if where is None else str(os.fsdecode(where))
    return StorageMeta(checkpoint_id, meta.save_id, None, meta.modules)
