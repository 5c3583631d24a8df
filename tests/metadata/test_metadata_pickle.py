"""The pickle in `.metadata`: its bytes are those of the reference, whatever wrote them."""

from __future__ import annotations

import pickle
from array import array
from typing import Any

import pytest
from hypothesis import given
from support.metadata_samples import I64, PATH, TAIL, canonical, metadatas, small
from support.reference_pickle import reference_pickle
from torch import Size
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx import _C
from torch_dcpx.errors import PlanError
from torch_dcpx.metadata.encode import encode_columns, stock_storage_meta
from torch_dcpx.metadata.file import decode_metadata, encode_metadata


@given(metadatas())
def test_the_pickle_has_the_bytes_of_the_reference(metadata: Metadata) -> None:
    if isinstance(metadata.planner_data, list):
        metadata.planner_data = None
    data = encode_metadata(metadata, [], "id")
    end = pickle_bytes(data)
    assert data[:end] == reference_pickle(metadata, stock_storage_meta(metadata))


def pickle_bytes(data: bytes) -> int:
    return int(TAIL.unpack(data[-TAIL.size :])[3])


@pytest.mark.parametrize("numbers", [range(-3, 4), range(254, 259), range(65534, 65538)])
def test_integers_of_every_width_have_the_bytes_of_the_reference(numbers: range) -> None:
    near = [(1 << bits) + by for bits in (31, 32, 39, 40, 47, 55, 62) for by in (-1, 0, 1)]
    extremes = [I64, -I64 - 1, -I64, *near, *(-number for number in near)]
    metadata = Metadata({}, {"a": tuple(numbers), "b": tuple(extremes)}, {})
    data = encode_metadata(metadata, [], "id")
    assert data[: pickle_bytes(data)] == reference_pickle(metadata, None)
    assert canonical(pickle.loads(data)) == canonical(metadata)


def test_names_that_stock_uses_itself_have_the_bytes_of_the_reference() -> None:
    texts = [
        "torch",
        "Size",
        "size",
        "offset",
        "torch.strided",
        "strided",
        "float32",
        "",
        "é" * 128,
    ]
    chunk = ChunkStorageMetadata(Size([0]), Size([4]))
    tensor = TensorStorageMetadata(TensorProperties(), Size([4]), [chunk])
    entries = dict.fromkeys(texts, tensor)
    storage = {MetadataIndex(text, [0]): _StorageInfo(text, 0, 1, [text]) for text in texts}
    planner = {text: (text, "x" * 256, text) for text in texts}
    for version in (None, *texts):
        meta = StorageMeta(version, version, None, texts)
        metadata = Metadata(entries, planner, storage, meta, version)
        data = encode_metadata(metadata, [], "id")
        assert data[: pickle_bytes(data)] == reference_pickle(metadata, meta)
        assert canonical(pickle.loads(data)) == canonical(metadata)


def test_more_objects_than_one_batch_and_one_byte_of_memo_come_back() -> None:
    whole = ChunkStorageMetadata(Size([0]), Size([1]))
    entries = {
        f"t{i}": TensorStorageMetadata(TensorProperties(), Size([i]), [whole] * (i == 7) * 2500)
        for i in range(3001)
    }
    storage = {MetadataIndex(fqn, [i], i): _StorageInfo(fqn, i, 1) for i, fqn in enumerate(entries)}
    metadata = Metadata(entries, {fqn: (fqn * 300,) for fqn in list(entries)[:2]}, storage)
    data = encode_metadata(metadata, [], "id")
    assert data[: pickle_bytes(data)] == reference_pickle(metadata, None)
    assert canonical(pickle.loads(data)) == canonical(metadata)
    assert canonical(decode_metadata(data, PATH).metadata) == canonical(metadata)


# ---- Columns that encode_columns would not make ------------------------------------------------


def pickle_of(columns: dict[str, Any]) -> bytes:
    return _C.pickle_metadata(columns, True, [], None, None)


def small_columns() -> dict[str, Any]:
    metadata = small()
    metadata.storage_data.popitem()  # the one with descriptors
    return encode_columns(metadata, []).finished()


def test_columns_that_are_missing_or_of_another_kind_are_refused() -> None:
    columns = small_columns()
    assert pickle.loads(pickle_of(columns)).planner_data == small().planner_data
    for name in set(columns) - {name for name in columns if name[:4] == "file"} - {"chunk_flags"}:
        rest = {other: column for other, column in columns.items() if other != name}
        with pytest.raises(KeyError):
            pickle_of(rest)
        for wrong in (array("i", [0]), memoryview(columns[name])[::-2], [0], 7):
            with pytest.raises(TypeError):
                pickle_of({**columns, name: wrong})


def test_columns_that_contradict_each_other_are_refused() -> None:
    columns = small_columns()
    for name, column in columns.items():
        if name.startswith("file") or name in ("chunk_flags", "strings"):
            continue
        for change in (lambda c: c[:-1], lambda c: c[:0]):
            if name in ("entry_fqn", "storage_fqn", "planner_fqn"):
                continue  # fewer objects
            with pytest.raises(PlanError):
                pickle_of({**columns, name: change(column)})
    for name in ("entry_fqn", "tensor_dtype", "tensor_layout", "storage_path", "planner_fqn"):
        for number in (-1, len(columns["string_ends"]), I64):
            with pytest.raises(PlanError):
                pickle_of({**columns, name: array("q", [number]) * len(columns[name])})
