"""A small `.metadata` of stock's may name one thing a million times: it is made once."""

from __future__ import annotations

import pathlib
import pickle
import tracemalloc
from typing import Any

import pytest
import torch
from support.metadata_samples import PATH
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx.errors import CorruptionError
from torch_dcpx.metadata.stock import load_stock_metadata

MANY = 300
PROPERTIES = TensorProperties(torch.float32)


def loaded(metadata: Metadata) -> Any:
    if metadata.storage_data is None:
        metadata.storage_data = {}
    return load_stock_metadata(pickle.dumps(metadata, protocol=4), PATH)


def chunk(*sizes: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([0] * len(sizes)), torch.Size(sizes))


def test_one_list_of_chunks_is_made_once() -> None:
    chunks = [chunk(i + 1, 2) for i in range(MANY)]
    entries = {
        f"t{i}": TensorStorageMetadata(PROPERTIES, torch.Size([MANY, 2]), chunks)
        for i in range(MANY)
    }
    found = loaded(Metadata(entries)).state_dict_metadata  # type: ignore[arg-type]
    assert found == entries
    assert len({id(entry.chunks) for entry in found.values()}) == 1


def test_one_chunk_is_made_once() -> None:
    entry = TensorStorageMetadata(PROPERTIES, torch.Size([4]), [chunk(4)] * MANY)
    found = loaded(Metadata({"t": entry})).state_dict_metadata["t"]
    assert found == entry
    assert len({id(one) for one in found.chunks}) == 1


def test_one_tuple_of_sizes_is_made_once() -> None:
    sizes: Any = tuple(range(1, 65))
    entries = {
        f"t{i}": TensorStorageMetadata(PROPERTIES, sizes, [ChunkStorageMetadata(sizes, sizes)])
        for i in range(MANY)
    }
    found = loaded(Metadata(entries)).state_dict_metadata  # type: ignore[arg-type]
    made = {id(entry.size) for entry in found.values()}
    made |= {id(one.sizes) for entry in found.values() for one in entry.chunks}
    assert len(made) == 1
    assert type(found["t0"].size) is torch.Size


def test_one_list_of_descriptors_is_made_once() -> None:
    descriptors: Any = tuple(f"d{i}" for i in range(MANY))
    places = {MetadataIndex(f"t{i}"): _StorageInfo("f", i, 1, descriptors) for i in range(MANY)}
    found = loaded(Metadata({}, storage_data=places)).storage_data
    assert len({id(place.transform_descriptors) for place in found.values()}) == 1
    assert found[MetadataIndex("t7")].transform_descriptors == list(descriptors)


def test_chunks_of_other_dimensions_than_each_other_or_the_tensor_are_refused() -> None:
    for chunks, match in (
        ([chunk(2), chunk(2, 2)], "a chunk of 2 dimensions beside 1"),
        ([chunk(2, 2)], "a chunk of 2 dimensions in a tensor of 1"),
    ):
        entry = TensorStorageMetadata(PROPERTIES, torch.Size([4]), chunks)
        with pytest.raises(CorruptionError, match=match):
            loaded(Metadata({"t": entry}))


def test_text_is_not_joined_to_a_path_before_it_is_charged() -> None:
    class Place:
        def __reduce__(self) -> Any:
            return pathlib.PosixPath, ("x" * 60_000,) * 10_000

    meta = StorageMeta(checkpoint_id=Place())  # type: ignore[arg-type]
    data = pickle.dumps(Metadata({}, storage_data={}, storage_meta=meta), protocol=4)
    assert len(data) < 1 << 20
    tracemalloc.start()
    with pytest.raises(CorruptionError, match="far more by its calls than it has bytes"):
        load_stock_metadata(data, PATH)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20, peak
