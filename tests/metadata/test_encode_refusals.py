"""Metadata that columns could not give back exactly is refused, with the first object's name."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.metadata_samples import I64, small, small_files
from support.rows import check_rows
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

from torch_dcpx.errors import PlanError
from torch_dcpx.metadata.file import encode_metadata
from torch_dcpx.storage.names import FileEntry

Change = Callable[[Metadata], None]


def tensor(size: Any, offsets: Any, lengths: Any, **properties: Any) -> Change:
    """An entry "key" of one chunk."""
    chunk = ChunkStorageMetadata(offsets, lengths)
    return entry_of("key", TensorStorageMetadata(TensorProperties(**properties), size, [chunk]))


def entry_of(key: Any, value: Any) -> Change:
    return lambda metadata: metadata.state_dict_metadata.update({key: value})


def chunks(chunks: Any) -> Change:
    return entry_of("key", TensorStorageMetadata(TensorProperties(), S([]), chunks))


def place_of(key: Any, value: Any) -> Change:
    return lambda metadata: metadata.storage_data.update({key: value})


def place(path: Any, offset: Any, length: Any, *descriptors: Any) -> Change:
    return place_of(MetadataIndex("key"), _StorageInfo(path, offset, length, *descriptors))


def index(offset: Any, hint: Any = None) -> Change:
    return place_of(MetadataIndex("key", offset, hint), PLACE)


def field(name: str, value: Any) -> Change:
    return lambda metadata: setattr(metadata, name, value)


def strides_of(key: str, strides: Any) -> Change:
    """Torch 2.15's field, in every torch."""
    return lambda metadata: vars(metadata.state_dict_metadata[key].properties).update(  # type: ignore[union-attr]
        strides=strides
    )


class Text(str):
    """Pickled by its own name, which stock's readers need not know."""


S = torch.Size
PLACE = _StorageInfo("f", 0, 1)
REFUSED: dict[str, tuple[Change, str | None]] = {
    "name no str": (entry_of(7, BytesStorageMetadata()), "7"),
    "name of a subclass": (entry_of(Text("key"), BytesStorageMetadata()), "key"),
    "unknown entry": (entry_of("key", "?"), "key"),
    "chunk of more dimensions": (tensor(S([4]), S([0, 0]), S([4])), "key"),
    "chunk of fewer dimensions": (tensor(S([4]), S([0]), S([])), "key"),
    "negative offset": (tensor(S([4]), S([-1]), S([4])), "key"),
    "size beyond int64": (tensor((1 << 63,), S([0]), S([4])), "key"),
    "chunk that ends beyond int64": (tensor(S([4]), S([I64]), S([4])), "key"),
    "size no int": (tensor((4.0,), S([0]), S([4])), "key"),
    "size a bool": (tensor((True,), S([0]), S([1])), "key"),
    "offsets a list": (tensor(S([4]), [0], S([4])), "key"),
    "size None": (tensor(None, S([0]), S([4])), "key"),
    "dtype no dtype": (tensor(S([4]), S([0]), S([4]), dtype="float32"), "key"),
    "flag no bool": (tensor(S([4]), S([0]), S([4]), pin_memory=1), "key"),
    "foreign memory format": (
        tensor(S([4]), S([0]), S([4]), memory_format=torch.channels_last_3d),
        "key",
    ),
    "strides a list": (strides_of("step", [3, 1]), "step"),
    "strides no ints": (strides_of("step", (3, "1")), "step"),
    "strides negative": (strides_of("step", (3, -1)), "step"),
    "chunks no list": (chunks(()), "key"),
    "chunk no chunk": (chunks([1]), "key"),
    "index of other dimensions": (
        place_of(MetadataIndex("model.weight", [1]), PLACE),
        "model.weight",
    ),
    "index no index": (place_of("key", PLACE), "key"),
    "index name no str": (place_of(MetadataIndex(7), PLACE), "7"),  # type: ignore[arg-type]
    "negative hint": (index(None, -1), "key"),
    "hint beyond int64": (index(None, 1 << 63), "key"),
    "negative index": (index([-1]), "key"),
    "place no place": (place_of(MetadataIndex("key"), ("f", 0, 1)), "key"),
    "path no str": (place(None, 0, 1), "key"),
    "negative length": (place("f", 0, -1), "key"),
    "item that ends beyond int64": (place("f", I64, 1), "key"),
    "descriptors a tuple": (place("f", 0, 1, ("a",)), "key"),
    "no state_dict_metadata": (field("state_dict_metadata", None), None),
    "no storage_data": (field("storage_data", None), None),
    "version no str": (field("version", 1), None),
    "modules no list": (field("storage_meta", StorageMeta("a", "b", None, None)), None),  # type: ignore[arg-type]
    "planner_data that cannot be pickled": (field("planner_data", lambda: None), None),
}


def test_encode_refuses_what_would_not_come_back() -> None:
    def check(row: tuple[Change, str | None]) -> None:
        change, fqn = row
        metadata = small()
        change(metadata)
        with pytest.raises(PlanError) as caught:
            encode_metadata(metadata, small_files(), "id")
        assert caught.value.fqn == fqn

    check_rows(REFUSED, check)


def test_refusal_names_the_first_of_many_objects_and_why() -> None:
    metadata = Metadata({f"b{n}": BytesStorageMetadata() for n in range(2500)}, None, {})
    places = {MetadataIndex(f"b{n}"): _StorageInfo("f", n, 1) for n in range(2500)}
    metadata.storage_data.update(places)
    for n in (2345, 1717):
        places[MetadataIndex(f"b{n}")].offset = -1
    with pytest.raises(PlanError, match=r"'b1717'.*offset=-1.*\(a negative number where") as caught:
        encode_metadata(metadata, [], "id")
    assert caught.value.fqn == "b1717"
    for n in (2222, 1001):
        entry = TensorStorageMetadata(
            TensorProperties(), S([4]), [ChunkStorageMetadata(S([0]), S([-n]))]
        )
        metadata.state_dict_metadata[f"b{n}"] = entry
    with pytest.raises(PlanError, match=r"'b1001': its entry is .*\(a negative number where"):
        encode_metadata(metadata, [], "id")


def test_encode_refuses_a_wrong_file() -> None:
    for file in (
        FileEntry("__0_0.distcp", bytes(16), 8192, 0),  # there already
        FileEntry("a", bytes(15), 8192, 0),
        FileEntry("a", bytes(16), -1, 0),
        FileEntry("a", bytes(16), 8192, 1 << 32),
        FileEntry(pathlib.Path("a"), bytes(16), 8192, 0),  # type: ignore[arg-type]
    ):
        with pytest.raises(PlanError):
            encode_metadata(small(), [*small_files(), file], "id")
