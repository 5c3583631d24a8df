"""Checkpoints whose numbers lie: sizes, strides, ranges, file tables, columns, sparse indices."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hostile import pickles as hp
from hostile.corpus import STATE, WEIGHT, Case, ours, rewritten_ours, saved, sealed, stock
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from torch_dcpx.storage.names import FileEntry

BIG = [2**31, 2**32, 2**40, 10**18, 2**62, 2**63 - 1]
PARAMETER = hp.name("torch._utils", "_rebuild_parameter")


def _tensor(body: bytes, nbytes: int, root: Path) -> None:
    stock(root, weight=hp.torch_zip(hp.document(body), {"data/0": bytes(nbytes)}))


def _parameter(body: bytes) -> bytes:
    return hp.call(PARAMETER, body, hp.value(False), hp.call(hp.ORDERED))


def _tensor_lies() -> Iterator[tuple[str, bytes, int]]:
    n = STATE["weight"].numel()
    fits: dict[str, Any] = {"sizes": (n,), "strides": (1,)}
    lies: dict[str, dict[str, Any]] = {
        **{f"{number} elements": {"numel": number} for number in (0, 1, n + 1, -1, *BIG)},
        **{f"sizes {number}": {"sizes": (number,)} for number in (n + 1, -1, *BIG)},
        **{f"offset {number}": {"offset": number} for number in (1, -1, *BIG)},
        **{f"stride {number}": {"strides": (number,)} for number in (2, -1, *BIG)},
        "2^62 twice": {"sizes": (2**62, 2**62), "strides": (0, 0)},
        "100,000 dimensions": {"sizes": (1,) * 100_000, "strides": (1,) * 100_000},
        "no strides": {"strides": ()},
        "another record": {"key": "../version"},
        "another device": {"location": "cuda:999999999999"},
        "doubles": {"kind": hp.name("torch", "DoubleStorage")},
    }
    for name, lie in lies.items():
        given = {"numel": n, **fits, **lie}
        yield name, hp.tensor_pickle(**given), 4 * n
    yield "a short record", hp.tensor_pickle(n, **fits), 4 * n - 1
    yield "an empty record", hp.tensor_pickle(n, **fits), 0


def _rewritten(change: Callable[[Metadata], None], root: Path) -> None:
    stock(root, change=change)


def _same(entry: FileEntry) -> FileEntry:
    return entry


def _place(metadata: Metadata, **changes: Any) -> None:
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(info, **changes)


def _places_swapped(metadata: Metadata) -> None:
    indices = list(metadata.storage_data)
    infos = [metadata.storage_data[index] for index in indices]
    for index, info in zip(indices, reversed(infos), strict=True):
        metadata.storage_data[index] = info


def _sizes(metadata: Metadata, size: tuple[int, ...], chunks: list[tuple[Any, Any]]) -> None:
    old: Any = metadata.state_dict_metadata["weight"]
    made = [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in chunks]
    metadata.state_dict_metadata["weight"] = TensorStorageMetadata(
        old.properties, torch.Size(size), made
    )
    info = metadata.storage_data.pop(MetadataIndex("weight", [0]))
    for chunk in made:
        metadata.storage_data[MetadataIndex("weight", chunk.offsets)] = info


def _dtype(metadata: Metadata, dtype: torch.dtype) -> None:
    entry: Any = metadata.state_dict_metadata["weight"]
    entry.properties.dtype = dtype


N = 3000
PLACES: list[dict[str, Any]] = [
    *({"offset": number} for number in (-1, 1, N, *BIG)),
    *({"length": number} for number in (-1, 0, 1, *BIG)),
    {"offset": 2**63 - 1, "length": 2**63 - 1},
    {"offset": 2**64, "length": 1},
    {"offset": 1.5},
    {"length": "9"},
]
SHAPES: list[tuple[tuple[int, ...], list[tuple[Any, Any]]]] = [
    ((N,), [((0,), (N,)), ((0,), (N,))]),
    ((N,), [((0,), (2000,)), ((1000,), (2000,))]),
    ((N,), [((0,), (2000,)), ((2000,), (1000,))]),
    ((N,), [((1,), (N,))]),
    ((N,), [((0,), (N - 1,))]),
    ((N,), []),
    ((N,), [((0,), (10**18,))]),
    ((N,), [((2**63 - 1,), (2**63 - 1,))]),
    ((10**18,), [((0,), (10**18,))]),
    ((2**62, 2**62), [((0, 0), (2**62, 2**62))]),
    ((), [((), ())]),
    ((N, 1), [((0, 0), (N, 1))]),
]


def _sparse(layout: str, at: int, number: int) -> bytes:
    """A sparse tensor, one of whose indices is another."""
    dense = torch.zeros(50, 60)
    dense[3, 5] = dense[7, 11] = 1.0
    made = dense.to_sparse() if layout == "coo" else getattr(dense, f"to_sparse_{layout}")()
    data = bytearray(saved(made))
    old = {"coo": (3, 7, 5, 11), "csr": (5, 11), "csc": (3, 7)}[layout]
    found = data.index(struct.pack(f"<{len(old)}q", *old)) + 8 * at
    data[found : found + 8] = struct.pack("<q", number)
    return bytes(data)


def _sparse_item(layout: str, at: int, number: int, root: Path) -> None:
    stock(root, weight=_sparse(layout, at, number))


def _header(change: Callable[[dict[str, Any]], object], root: Path) -> None:
    path = ours(root) / ".metadata"
    path.write_bytes(sealed(path.read_bytes(), header=change))


def _body(seed: int, root: Path) -> None:
    """Eight bytes of the columns are another number, beneath right checksums."""
    path = ours(root) / ".metadata"

    def change(body: bytearray, begin: int) -> None:
        at = begin + seed * 2654435761 % (len(body) - begin - 8) // 8 * 8
        body[at : at + 8] = struct.pack("<Q", [2**63, 2**63 - 1, 2**40, 1, 0, 2**64 - 1][seed % 6])

    path.write_bytes(sealed(path.read_bytes(), body=change))


def _trailer(at: int, value: bytes, root: Path) -> None:
    path = ours(root) / ".metadata"
    data = bytearray(path.read_bytes())
    begin = len(data) - 64 + at
    data[begin : begin + len(value)] = value
    path.write_bytes(bytes(data))


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "columns that are none": lambda h: h.update(columns=1),
    "a column of 2^80": lambda h: h["columns"][0].__setitem__(2, 1 << 80),
    "a column of -1": lambda h: h["columns"][0].__setitem__(2, -1),
    "a column of another kind": lambda h: h["columns"][0].__setitem__(1, "f64"),
    "columns in another order": lambda h: h["columns"].reverse(),
    "planner data elsewhere": lambda h: h.update(planner_data="/etc/passwd"),
    "a deep header": lambda h: h.update(deep=[[[[]]]] * 1000),
    "descriptors": lambda h: h.update(descriptors=[["../../x"]] * 1000),
    "a save id of a megabyte": lambda h: h.update(save_id="x" * (1 << 20)),
    "modules of numbers": lambda h: h.update(storage_meta={"modules": [1]}),
}


def cases() -> Iterator[Case]:
    for name, body, nbytes in _tensor_lies():
        # Torch takes no strides for contiguous ones, as it takes unknown devices for the host.
        is_valid = nbytes == 4 * N and name in ("another device", "no strides")
        yield Case("tensor lies", f"plain: {name}", partial(_tensor, body, nbytes), is_valid)
        build = partial(_tensor, _parameter(body), nbytes)
        yield Case("tensor lies", f"parameter: {name}", build, is_valid)
    for layout, at in (("coo", 0), ("coo", 3), ("csr", 0), ("csc", 1)):
        for number in (-1, 60, 10**9, 2**63 - 1):
            build = partial(_sparse_item, layout, at, number)
            yield Case("tensor lies", f"sparse {layout}: index {at} is {number}", build)
    for other in (torch.arange(3000), torch.ones(2), torch.ones(3000, 1), torch.ones(0)):
        build = partial(_other_tensor, saved(other))
        is_valid = other.numel() == N and other.dim() == 1
        yield Case("tensor lies", f"{other.dtype} {tuple(other.shape)}", build, is_valid)
    for changes in PLACES:
        change = partial(_place, **changes)
        yield Case("places", f"stock: {changes}", partial(_rewritten, change))
        values = list(changes.values())
        if all(type(v) is int and v >= 0 for v in values) and sum(values) < 2**62:
            build = partial(rewritten_ours, change, _same)
            yield Case("places", f"ours: {changes}", build)
    yield Case("places", "stock: swapped", partial(_rewritten, _places_swapped))
    yield Case("places", "ours: swapped", partial(rewritten_ours, _places_swapped, _same))
    for number, (size, chunks) in enumerate(SHAPES):
        change = partial(_sizes, size=size, chunks=chunks)
        # Chunks that fit, each of them the start of a longer item: stock reads it so, and so do we.
        is_valid = number == 2
        yield Case("shapes", f"stock: {number}, {size}", partial(_rewritten, change), is_valid)
        if sum(map(sum, (a for pair in chunks for a in pair))) < 2**62:
            build = partial(rewritten_ours, change, _same)
            yield Case("shapes", f"ours: {number}, {size}", build, is_valid)
    for dtype in (torch.float64, torch.int8, torch.complex128):
        change = partial(_dtype, dtype=dtype)
        yield Case("shapes", f"stock: {dtype}", partial(_rewritten, change), is_valid=True)
        yield Case("shapes", f"ours: {dtype}", partial(rewritten_ours, change, _same), True)
    for nbytes in (0, 1, 4096, 2**40, 2**63 - 1):
        build = partial(rewritten_ours, _nothing, partial(_sized, nbytes))
        yield Case("files", f"a file of {nbytes} B", build)
    for name, header in HEADERS.items():
        yield Case("columns", name, partial(_header, header), is_valid=True)
    for seed in range(60):
        yield Case("columns", f"a number is another, {seed}", partial(_body, seed), is_valid=True)
    for at in range(0, 64, 4):
        for value in (b"\xff" * 4, b"\x00" * 4, b"\x80\x00\x00\x00"):
            yield Case(
                "columns", f"trailer, {value.hex()} at {at}", partial(_trailer, at, value), True
            )


def _nothing(_metadata: Metadata) -> None:
    pass


def _sized(nbytes: int, entry: FileEntry) -> FileEntry:
    return entry._replace(nbytes=nbytes)


def _other_tensor(data: bytes, root: Path) -> None:
    assert data != WEIGHT
    stock(root, weight=data)
