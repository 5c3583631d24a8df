"""A small Metadata, any Metadata (hypothesis), and forged `.metadata` files."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import struct
import zlib
from array import array
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import torch
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

from torch_dcpx.metadata.file import encode_metadata
from torch_dcpx.storage.names import FileEntry

PATH = "ckpt/.metadata"
TAIL = struct.Struct("<8sIIQQQI16sI")
I64 = (1 << 63) - 1
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex128]
LAYOUTS = [torch.strided, torch.sparse_coo]
FORMATS = [torch.contiguous_format, torch.channels_last, torch.preserve_format]


def canonical(value: Any) -> Any:
    """Exact types, order of dicts and every field, hints included, as nested tuples."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value), *((name, canonical(getattr(value, name, None))) for name in names)
    if isinstance(value, dict):  # or filled on demand
        return dict, *((canonical(k), canonical(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), *map(canonical, value)
    return type(value), repr(value)


def small() -> Metadata:
    """Something of everything, in some three kilobytes."""
    chunks = [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3])),
        ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3])),
    ]
    whole = ChunkStorageMetadata(torch.Size([]), torch.Size([]))
    return Metadata(
        {
            "model.weight": TensorStorageMetadata(TensorProperties(), torch.Size([4, 3]), chunks),
            "step": TensorStorageMetadata(
                TensorProperties(torch.int64, pin_memory=True), torch.Size([]), [whole]
            ),
            "größe": BytesStorageMetadata(),
        },
        {"model.weight": ("model", "weight"), "step": ("step", 3), "größe": ("größe",)},
        {
            MetadataIndex("model.weight", [0, 0], 0): _StorageInfo("__0_0.distcp", 0, 1500),
            MetadataIndex("model.weight", [2, 0], 1): _StorageInfo("__1_0.distcp", 64, 1500),
            MetadataIndex("step", [], 0): _StorageInfo("__0_0.distcp", 1536, 1300),
            MetadataIndex("größe"): _StorageInfo("__0_0.distcp", 2880, 500, ["stream.zstd/1"]),
        },
        StorageMeta("/ckpt", "stock's save id", None, ["a"]),
        "1.0.0",
    )


def small_files() -> list[FileEntry]:
    return [FileEntry(f"__{rank}_0.distcp", bytes([rank]) * 16, 8192, rank) for rank in range(2)]


def encode_small(**changes: Any) -> bytes:
    return encode_metadata(dataclasses.replace(small(), **changes), small_files(), "our save id")


def many(tensors: int, chunks: int) -> bytes:
    """The encoded metadata of tensors [chunks, 2] of one row a chunk."""
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for t in range(tensors):
        offsets = [torch.Size([c, 0]) for c in range(chunks)]
        own = [ChunkStorageMetadata(offset, torch.Size([1, 2])) for offset in offsets]
        entries[f"t{t}"] = TensorStorageMetadata(TensorProperties(), torch.Size([chunks, 2]), own)
        for c, offset in enumerate(offsets):
            storage[MetadataIndex(f"t{t}", offset, c)] = _StorageInfo("__0_0.distcp", t * 99, c)
    paths = {name: (name,) for name in entries}
    return encode_metadata(Metadata(entries, paths, storage), [], "id")


# ---- Forged files: their checksums are right ---------------------------------------------------


def seal(data: bytes, body: bytes, header_bytes: int, stock: bytes | None = None) -> bytes:
    """`data` with another body (and pickle, unless None) and all checksums right."""
    if stock is None:
        stock = data[: TAIL.unpack(data[-64:])[3]]
    fields = (len(stock), len(body), header_bytes, zlib.crc32(body), b"", 0)
    tail = TAIL.pack(b"DCPXMETA", 1, zlib.crc32(stock), *fields)[:-4]
    return stock + body + tail + struct.pack("<I", zlib.crc32(tail))


def forge(
    change: Callable[[dict[str, Any], dict[str, Any]], object],
    change_table: Callable[[list[list[Any]]], object] = len,
) -> bytes:
    """`encode_small()` after `change(header, columns)`, in agreement with itself.

    Then `change_table` may change the header's list of columns.
    """
    data = encode_small()
    _, _, _, pickle_bytes, body_bytes, header_bytes, *_ = TAIL.unpack(data[-64:])
    body = data[pickle_bytes : pickle_bytes + body_bytes]
    header = json.loads(body[:header_bytes])
    columns: dict[str, Any] = {}
    at = header_bytes
    for name, kind, count in header.pop("columns"):
        nbytes = count * (8 if kind == "i64" else 1)
        raw = body[at : at + nbytes]
        columns[name] = list(struct.unpack(f"<{count}q", raw)) if kind == "i64" else bytearray(raw)
        at += (nbytes + 7) & ~7
    change(header, columns)
    table = [
        [name, "i64" if isinstance(column, list) else "u8", len(column)]
        for name, column in columns.items()
    ]
    change_table(table)
    head = json.dumps({"columns": table, **header}).encode()
    head += b" " * (-len(head) % 8)
    parts = [array("q", c).tobytes() if isinstance(c, list) else c for c in columns.values()]
    return seal(data, head + b"".join(p + bytes(-len(p) % 8) for p in parts), len(head))


# ---- Any Metadata -------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=()), max_size=8)  # surrogates too
numbers = st.one_of(st.integers(0, 300), st.integers(0, I64 >> 1))  # the sum of two is an int64


def sizes(ndim: int) -> st.SearchStrategy[torch.Size]:
    return st.lists(numbers, min_size=ndim, max_size=ndim).map(torch.Size)


@st.composite
def tensors(draw: st.DrawFn) -> TensorStorageMetadata:
    ndim = draw(st.integers(0, 4))
    properties = TensorProperties(
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.booleans()),
        draw(st.sampled_from(FORMATS)),
        draw(st.booleans()),
    )
    chunk = st.builds(ChunkStorageMetadata, sizes(ndim), sizes(ndim))
    return TensorStorageMetadata(properties, draw(sizes(ndim)), draw(st.lists(chunk, max_size=3)))


places = st.builds(
    _StorageInfo,
    st.sampled_from(["__0_0.distcp", "__1_0.0123456789ab.distcp", "ü"]),
    numbers,
    numbers,
    st.none() | st.lists(names, max_size=2),
)
indices = st.integers(0, 1000)  # of lists: higher ones are refused
mappings = st.dictionaries(names, st.lists(names | indices).map(tuple))
storage_metas = st.builds(
    StorageMeta,
    st.none() | names | st.just(pathlib.PurePosixPath("/a/b")),
    st.none() | names,
    st.just("a load id"),
    st.lists(names, max_size=2),
)


@st.composite
def metadatas(draw: st.DrawFn) -> Metadata:
    entries = draw(st.dictionaries(names, tensors() | st.builds(BytesStorageMetadata), max_size=5))
    storage = {}
    for fqn in [*entries, draw(names)]:
        entry = entries.get(fqn)
        ndim = len(entry.size) if isinstance(entry, TensorStorageMetadata) else 1
        index = st.builds(MetadataIndex, st.just(fqn), st.none() | sizes(ndim), st.none() | numbers)
        storage |= draw(st.dictionaries(index, places, max_size=3))
    planner = draw(st.none() | mappings | st.just([{"not": "flatten's"}, 1 << 80]))
    meta = draw(st.none() | storage_metas)
    return Metadata(entries, planner, storage, meta, draw(st.none() | names))


files = st.lists(
    st.builds(
        FileEntry,
        names,
        st.binary(min_size=16, max_size=16),
        numbers,
        st.integers(0, 2**32 - 1),
        st.just(b""),  # that of the metadata, whatever it was
    ),
    unique_by=lambda file: file.path,
    max_size=4,
)
