"""Which object of a Metadata its columns cannot hold: looked for one by one, once it is known."""

from __future__ import annotations

from operator import add
from typing import Any

from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx._compat import DTYPES, LAYOUTS, all_strides
from torch_dcpx.errors import PlanError
from torch_dcpx.metadata.columns import I64_MAX
from torch_dcpx.metadata.stock_pickle import MEMORY_FORMATS

# What len, array and iteration say about an object that is not stock's.
NOT_STOCK = (TypeError, ValueError, KeyError, OverflowError, AttributeError)

_NAMED: set[object] = {*DTYPES.values(), *LAYOUTS.values()}


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


def _check_properties(properties: Any) -> None:
    flags = (properties.requires_grad, properties.pin_memory)
    is_stock = type(properties) in (TensorProperties, ShardProperties)
    if not is_stock or set(map(type, flags)) != {bool}:
        raise TypeError(f"its properties are {properties!r}")
    for name in (properties.dtype, properties.layout):
        if name not in _NAMED:
            raise KeyError(name)
    MEMORY_FORMATS.index(properties.memory_format)


def _check_entry(fqn: object, entry: Any) -> None:
    """Types, and numbers of dimensions."""
    if type(fqn) is not str:
        raise TypeError(f"its name is of type {type(fqn).__name__}")
    if type(entry) is BytesStorageMetadata:
        return
    if type(entry) is not TensorStorageMetadata or type(entry.chunks) is not list:
        raise TypeError(f"its entry is {entry!r:.300}")
    if not isinstance(entry.size, tuple):
        raise TypeError(f"its size is {entry.size!r}")
    _check_properties(entry.properties)
    ndim = len(entry.size)
    for chunk in entry.chunks:
        if type(chunk) is not ChunkStorageMetadata:
            raise TypeError(f"a chunk is a {type(chunk).__name__}")
        offsets, lengths = chunk.offsets, chunk.sizes
        is_region = isinstance(offsets, tuple) and isinstance(lengths, tuple)
        if not is_region or len(offsets) != ndim or len(lengths) != ndim:
            raise TypeError(f"{chunk!r} is no region of a tensor of {ndim} dimensions")


def _are_regions(entry: TensorStorageMetadata) -> bool:
    """Whether size and chunks are numbers that the columns can hold."""
    chunks = [(list(chunk.offsets), list(chunk.sizes)) for chunk in entry.chunks]
    return _are_sizes(list(entry.size)) and all(
        _are_sizes(offsets + sizes) and _have_ends(offsets, sizes) for offsets, sizes in chunks
    )


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
        and (names is None or is_list_of_str(names))
    )


def is_list_of_str(value: object) -> bool:
    """Whether `value` is a list, and no subclass, of nothing but str."""
    return type(value) is list and all(type(item) is str for item in value)


def _find_entry(metadata: Metadata) -> PlanError | None:
    fqn: object = None
    tensors: dict[str, TensorStorageMetadata] = {}
    try:
        for fqn, entry in metadata.state_dict_metadata.items():
            _check_entry(fqn, entry)
            if isinstance(entry, TensorStorageMetadata):
                tensors[fqn] = entry
    except NOT_STOCK as error:
        return _refusal(fqn, error)
    for fqn, entry in tensors.items():
        if not _are_regions(entry):
            return _refusal(fqn, f"size and chunks are {entry!r:.300}")
    found = all_strides(entry.properties for entry in tensors.values())
    for fqn, strides in zip(tensors, found, strict=True):
        if strides is not None and not (isinstance(strides, tuple) and _are_sizes(list(strides))):
            return _refusal(fqn, f"its strides are {strides!r}")
    return None


def _find_place(metadata: Metadata) -> PlanError | None:
    storage = metadata.storage_data
    if type(storage) is not dict:
        return PlanError(
            f"encode the metadata: storage_data is a {type(storage).__name__}, no dict"
        )
    entries = metadata.state_dict_metadata.items()
    ndim_of = {fqn: len(e.size) for fqn, e in entries if isinstance(e, TensorStorageMetadata)}
    index: Any = None
    try:
        for index, place in storage.items():
            if not _is_place(index, place):
                raise TypeError(f"{index!r} lies in {place!r}")
            if index.index is not None and index.index > I64_MAX:
                raise OverflowError(f"its hint is {index.index}")
            ndim = None if index.offset is None else len(index.offset)
            if ndim is not None and ndim != ndim_of.get(index.fqn, ndim):
                raise ValueError(f"{index!r} has another number of dimensions than its tensor")
        for index, place in storage.items():
            ends = [place.offset, place.length, place.offset + place.length]
            if not _are_sizes([*(index.offset or ()), *ends]):
                raise ValueError(f"{index!r} lies in {place!r}")
    except NOT_STOCK as error:
        return _refusal(index, error)
    return None


def find_refusal(metadata: Metadata, error: Exception) -> PlanError:
    """The error of the first object that the columns cannot hold.

    Args:
        metadata: one that `encode_columns` has not taken.
        error: what it said, for an object that is as it was asked, but changed meanwhile.
    """
    found = _find_entry(metadata) or _find_place(metadata)
    return found or PlanError(f"encode the metadata: {error}, or it changed meanwhile")
