"""The classes of a stock `.metadata` pickle, each rebuilt from fields of exact types.

A build reads known fields only: planted attributes, and fields of a newer torch, stay behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx._compat import PROPERTIES_COUNTS, set_strides
from torch_dcpx.errors import UnsafePickleError
from torch_dcpx.unpickle.plain_objects import PATHS, PLAIN, path_text
from torch_dcpx.unpickle.settle import Settler, no_more_than, refuse
from torch_dcpx.unpickle.stand_ins import GlobalTable, StandIn, StateStandIn, brief, stand_in
from torch_dcpx.unpickle.torch_objects import DTYPES, MAX_INT64, build_layout, dims

# By the codes of stock's _MEM_FORMAT_ENCODING.
_MEMORY_FORMAT_NAMES = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)


def fields(raw: StateStandIn) -> dict[str, Any]:
    """Returns the instance dict of a pickled object; callers read known keys only."""
    if len(raw) == 1 and type(raw[0]) is dict:
        return raw[0]
    if len(raw) > 1 or (raw and raw[0] is not None):
        refuse(f"has a {raw.global_name} with a state that is no dict")
    return {}


def text(value: Any, what: str) -> str:
    """Returns `value` if it is a str, else refuses it by the name `what`."""
    if type(value) is not str:
        refuse(f"has a {what} of type {type(value).__name__}")
    return value


def optional_text(value: Any, what: str) -> str | None:
    """As `text`, or None."""
    return None if value is None else text(value, what)


def _size(value: Any, what: str, settle: Settler) -> torch.Size:
    if type(value) is not torch.Size:
        made: torch.Size | None = settle.cache.get(id(value))  # a tuple may be named by many
        if made is None:
            made = settle.cache[id(value)] = torch.Size(dims(value, what))
        return made
    for n in value:  # here and not by `dims`: called half a million times for a large model
        if type(n) is not int or not 0 <= n <= MAX_INT64:
            refuse(f"has {brief(n)} in a {what}")
    return value


def _memory_format(raw: StandIn, _settle: Settler) -> torch.memory_format:
    no_more_than(raw)
    if raw.global_name == "builtins.getattr":  # CPython 3.11.0 to 3.11.3 pickle enums so
        cls, name = raw.args if len(raw.args) == 2 else (None, None)
        if cls is not _MEMORY_FORMAT or type(name) is not str or name not in _MEMORY_FORMAT_NAMES:
            raise UnsafePickleError(
                "refuse to call getattr for anything but a memory format",
                global_name=raw.global_name,
            )
        return MEMORY_FORMATS[_MEMORY_FORMAT_NAMES.index(name)]
    code = raw.args[0] if len(raw.args) == 1 else None
    if type(code) is not int or not 0 <= code < len(MEMORY_FORMATS):
        refuse(f"has the memory format {brief(code)}")
    return MEMORY_FORMATS[code]


def _properties(raw: StateStandIn, settle: Settler) -> TensorProperties:
    state = raw[0] if len(raw) == 1 else None
    if type(state) is not tuple or len(state) not in PROPERTIES_COUNTS:
        refuse("has TensorProperties of other than 5 or 6 fields")
    dtype, kind, requires_grad, memory_format, pin_memory, *strides = state
    stride = dims(strides[0], "stride") if strides and strides[0] is not None else None
    if tuple in map(type, state[:5]):  # may take for ever to hash
        refuse("has TensorProperties with a field of another type")
    values = settle.cache.get(state)  # most tensors of a model have the same
    if values is None:
        kind, memory_format = settle(kind), settle(memory_format)
        if (
            type(dtype) is not torch.dtype
            or type(kind) is not torch.layout
            or type(memory_format) is not torch.memory_format
            or type(requires_grad) is not bool
            or type(pin_memory) is not bool
        ):
            refuse("has TensorProperties with a field of another type")
        values = (dtype, kind, requires_grad, memory_format, pin_memory), stride
        settle.cache[state] = values
    made = TensorProperties(*values[0])
    set_strides(made, values[1])
    return made


def _chunk(raw: StateStandIn, settle: Settler) -> ChunkStorageMetadata:
    state = fields(raw)
    offsets = _size(state.get("offsets"), "chunk", settle)
    sizes = _size(state.get("sizes"), "chunk", settle)
    if len(offsets) != len(sizes):
        refuse(f"has a chunk of {len(offsets)} offsets and {len(sizes)} sizes")
    return ChunkStorageMetadata(offsets, sizes)


def _chunks(raw: list[Any], settle: Settler) -> tuple[list[ChunkStorageMetadata], int]:
    """Returns the chunks of a tensor, and how many dimensions all of them have (0 without any).

    An object that the file has once is made once: a thousand tensors may name one list of chunks,
    and a list one chunk a thousand times.
    """
    known: tuple[list[ChunkStorageMetadata], int] | None = settle.cache.get(id(raw))
    if known is not None:
        return known
    made: list[ChunkStorageMetadata] = []
    for chunk in raw:
        if type(chunk) is not _CHUNK:
            refuse(f"has a chunk of type {type(chunk).__name__}")
        one = settle.cache.get(id(chunk))
        if one is None:
            one = settle.cache[id(chunk)] = _chunk(chunk, settle)
        made.append(one)
        if len(one.sizes) != len(made[0].sizes):
            refuse(f"has a chunk of {len(one.sizes)} dimensions beside {len(made[0].sizes)}")
    known = settle.cache[id(raw)] = made, len(made[0].sizes) if made else 0
    return known


def _tensor(raw: StateStandIn, settle: Settler) -> TensorStorageMetadata:
    """Builds the entry of a tensor; its chunks have as many dimensions as it has."""
    state = fields(raw)
    shape = _size(state.get("size"), "tensor size", settle)
    properties: Any = state.get("properties")
    chunks: Any = state.get("chunks")
    if type(properties) is not _PROPERTIES or type(chunks) is not list:
        refuse("has a tensor without properties or chunks")
    made, ndim = _chunks(chunks, settle)
    if made and ndim != len(shape):
        refuse(f"has a chunk of {ndim} dimensions in a tensor of {len(shape)}")
    return TensorStorageMetadata(_properties(properties, settle), shape, made)


def _bytes(raw: StateStandIn, _settle: Settler) -> BytesStorageMetadata:
    fields(raw)
    return BytesStorageMetadata()


def build_index(raw: StateStandIn, settle: Settler) -> MetadataIndex:
    """Builds a key of `storage_data`."""
    state = fields(raw)
    offset, hint = state.get("offset"), state.get("index")
    if hint is not None and (type(hint) is not int or not 0 <= hint <= MAX_INT64):
        refuse(f"has the index {brief(hint)}")
    # As unpickling makes one: its __init__ copies the offset and calls object.__setattr__ thrice.
    made: MetadataIndex = object.__new__(MetadataIndex)
    known: dict[str, Any] = {"fqn": text(state.get("fqn"), "name"), "index": hint}
    if offset is not None:
        known["offset"] = _size(offset, "offset", settle)
    made.__dict__.update(known)
    return made


def build_storage_info(raw: StateStandIn, settle: Settler) -> _StorageInfo:
    """Builds a value of `storage_data`; its path is not vetted here."""
    state = fields(raw)
    path = text(state.get("relative_path"), "relative path")
    offset, length = dims((state.get("offset"), state.get("length")), "range of a file")
    descriptors = state.get("transform_descriptors")  # not in files before torch 2.7
    if descriptors is None:
        return _StorageInfo(path, offset, length)
    if type(descriptors) not in (list, tuple):
        refuse(f"has transform descriptors of type {type(descriptors).__name__}")
    # Made once, as the file has it once: all its places may name one list of a million texts.
    texts = settle.cache.get(id(descriptors))
    if texts is None:
        texts = [text(value, "transform descriptor") for value in descriptors]
        settle.cache[id(descriptors)] = texts
    return _StorageInfo(path, offset, length, texts)


def _storage_prefix(raw: StateStandIn, _settle: Settler) -> _StoragePrefix:
    return _StoragePrefix(text(fields(raw).get("prefix"), "prefix"))


def build_storage_meta(raw: StateStandIn, settle: Settler) -> StorageMeta:
    """Builds a `StorageMeta`; its `checkpoint_id` becomes a str."""
    state = fields(raw)
    place, modules = settle(state.get("checkpoint_id")), state.get("modules", [])
    if place is not None:
        place = text(os.fspath(place), "checkpoint id")
    if type(modules) is not list:
        refuse(f"has modules of type {type(modules).__name__}")
    save_id = optional_text(state.get("save_id"), "save id")
    load_id = optional_text(state.get("load_id"), "load id")
    return StorageMeta(place, save_id, load_id, [text(name, "module") for name in modules])


def _metadata(_raw: StateStandIn, _settle: Settler) -> Metadata:
    return refuse("has a Metadata inside of another")


_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # where torch 2.0 kept two of them
_STATES: dict[tuple[str, str], Callable[[StateStandIn, Settler], Any]] = {
    (_METADATA, "BytesStorageMetadata"): _bytes,
    (_METADATA, "ChunkStorageMetadata"): _chunk,
    (_METADATA, "Metadata"): _metadata,
    (_METADATA, "MetadataIndex"): build_index,
    (_METADATA, "StorageMeta"): build_storage_meta,
    (_METADATA, "TensorProperties"): _properties,
    (_METADATA, "TensorStorageMetadata"): _tensor,
    (_FILESYSTEM, "_StorageInfo"): build_storage_info,
    (_FILESYSTEM, "_StoragePrefix"): _storage_prefix,
}
_CALLS: dict[tuple[str, str], Callable[[StandIn, Settler], Any]] = {
    (_METADATA, "_MEM_FORMAT_ENCODING"): _memory_format,
    ("builtins", "getattr"): _memory_format,
    ("torch.serialization", "_get_layout"): build_layout,
    # Text, not a path object: `checkpoint_id` is only ever shown.
    **{key: path_text(kind) for key, kind in PATHS.items()},
}
_STAND_INS: dict[tuple[str, str], Any] = {
    **{key: stand_in(".".join(key), build, base=StateStandIn) for key, build in _STATES.items()},
    **{key: stand_in(".".join(key), build) for key, build in _CALLS.items()},
}
BYTES = _STAND_INS[_METADATA, "BytesStorageMetadata"]
_CHUNK = _STAND_INS[_METADATA, "ChunkStorageMetadata"]
INDEX = _STAND_INS[_METADATA, "MetadataIndex"]
_MEMORY_FORMAT = _STAND_INS[_METADATA, "_MEM_FORMAT_ENCODING"]
METADATA_ROOT = _STAND_INS[_METADATA, "Metadata"]
_PROPERTIES = _STAND_INS[_METADATA, "TensorProperties"]
STORAGE_INFO = _STAND_INS[_FILESYSTEM, "_StorageInfo"]
STORAGE_META = _STAND_INS[_METADATA, "StorageMeta"]
TENSOR = _STAND_INS[_METADATA, "TensorStorageMetadata"]

METADATA: GlobalTable = {
    **{key: entry for key, entry in PLAIN.items() if key[0] in ("builtins", "__builtin__")},
    ("collections", "OrderedDict"): PLAIN["collections", "OrderedDict"],
    ("_codecs", "encode"): PLAIN["_codecs", "encode"],
    **DTYPES,
    # Real, as the dtypes are, for speed: immutable like its instances, and it takes only ints.
    ("torch", "Size"): torch.Size,
    **_STAND_INS,
    (_SHARDED, "TensorProperties"): _PROPERTIES,
    (_SHARDED, "MEM_FORMAT_ENCODING"): _MEMORY_FORMAT,
    ("__builtin__", "getattr"): _STAND_INS["builtins", "getattr"],
}
