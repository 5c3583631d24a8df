"""Metadata that no reader could use: what the encoder, stock's reader and the recogniser say."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hostile import pickles as hp
from support.metadata_samples import I64, PATH, canonical, small, small_files
from support.rows import check_rows
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

from torch_dcpx.errors import CorruptionError, DcpxError, PlanError, UnsafePickleError
from torch_dcpx.metadata.file import decode_metadata, encode_metadata
from torch_dcpx.metadata.stock import load_stock_metadata
from torch_dcpx.metadata.stock_columns import open_stock_metadata
from torch_dcpx.storage.names import FileEntry

Change = Callable[[Any], object]
S = torch.Size
PROPERTIES = TensorProperties()


@dataclasses.dataclass
class Stray:
    """Of no module that stock's readers know."""

    x: int = 1


class Text(str):
    """Pickled by its own name, which stock's readers need not know."""


def entry_of(key: Any, value: Any) -> Change:
    return lambda m: m.state_dict_metadata.update({key: value})


def tensor(size: Any, offsets: Any, lengths: Any, **properties: Any) -> Change:
    """An entry "key" of one chunk."""
    chunk = ChunkStorageMetadata(offsets, lengths)
    return entry_of("key", TensorStorageMetadata(TensorProperties(**properties), size, [chunk]))


def whole(size: Any, chunks: list[Any], properties: Any = PROPERTIES) -> Change:
    return entry_of("key", TensorStorageMetadata(properties, size, chunks))


def place_of(key: Any, value: Any) -> Change:
    return lambda m: m.storage_data.update({key: value})


def place(path: Any, offset: Any, length: Any, *descriptors: Any) -> Change:
    return place_of(MetadataIndex("key"), _StorageInfo(path, offset, length, *descriptors))


def index(fqn: Any, offset: Any = None, hint: Any = None) -> Change:
    return place_of(MetadataIndex(fqn, offset, hint), _StorageInfo("f", 0, 1))


def field(name: str, value: Any) -> Change:
    return lambda m: vars(m).update({name: value})


def strides(value: Any) -> Change:
    """Torch 2.15's field, in every torch."""
    return lambda m: vars(m.state_dict_metadata["step"].properties).update(strides=value)


def weight(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.weight"]


TAKEN, UNTRIED = "taken", "untried"
# What is wrong -> the change, and the name in the encoder's refusal (None: it has no name).
WRONG: dict[str, tuple[Change, str | None]] = {
    "name no str": (entry_of(7, BytesStorageMetadata()), "7"),
    "name of a subclass": (entry_of(Text("key"), BytesStorageMetadata()), "key"),
    "unknown entry": (entry_of("key", "?"), "key"),
    "entry a dict": (entry_of("key", {}), "key"),
    "entry an index": (entry_of("key", MetadataIndex("w")), "key"),
    "entry of a class": (entry_of("key", Stray()), "key"),
    "chunk of more dimensions": (tensor(S([4]), S([0, 0]), S([4])), "key"),
    "chunk of fewer dimensions": (tensor(S([4]), S([0]), S([])), "key"),
    "chunk of other dimensions": (tensor(S([4, 3]), S([0]), S([1])), "key"),
    "negative offset": (tensor(S([4]), S([-1]), S([4])), "key"),
    "size beyond int64": (tensor((1 << 63,), S([0]), S([4])), "key"),
    "chunk that ends beyond int64": (tensor(S([4]), S([I64]), S([4])), "key"),
    "size no int": (tensor((4.0,), S([0]), S([4])), "key"),
    "size a bool": (tensor((True,), S([0]), S([1])), "key"),
    "size negative": (whole(S([-1]), []), "key"),
    "size a str": (whole("ab", []), "key"),
    "offsets a list": (tensor(S([4]), [0], S([4])), "key"),
    "size None": (tensor(None, S([0]), S([4])), "key"),
    "dtype no dtype": (tensor(S([4]), S([0]), S([4]), dtype="float32"), "key"),
    "flag no bool": (tensor(S([4]), S([0]), S([4]), pin_memory=1), "key"),
    "grad no bool": (tensor(S([4]), S([0]), S([4]), requires_grad=1), "key"),
    "no properties": (whole(S([4]), [], None), "key"),
    "strides a list": (strides([3, 1]), "step"),
    "strides no ints": (strides((3, "1")), "step"),
    "strides negative": (strides((3, -1)), "step"),
    "chunks a tuple": (lambda m: vars(weight(m)).update(chunks=()), "model.weight"),
    "chunk no chunk": (whole(S([]), [1]), "key"),
    "65 dimensions": (tensor(S([1] * 65), S([0] * 65), S([1] * 65)), TAKEN),
    "size of a tuple": (tensor((4,), S([0]), S([4])), TAKEN),
    "shared list": (
        lambda m: whole(S([4, 3]), weight(m).chunks)(m), TAKEN),
    "cycle": (lambda m: weight(m).chunks.append(weight(m).chunks), "model.weight"),
    "index of other dimensions": (index("model.weight", [1]), "model.weight"),
    "index no index": (place_of("key", _StorageInfo("f", 0, 1)), "key"),
    "index name no str": (index(7), "7"),
    "negative hint": (index("key", None, -1), "key"),
    "hint no int": (index("key", None, "0"), "key"),
    "hint beyond int64": (index("key", None, 1 << 63), "key"),
    "negative index": (index("key", [-1]), "key"),
    "index of a tuple": (lambda m: vars(next(iter(m.storage_data))).update(offset=(0, 0)), TAKEN),
    "place no place": (place_of(MetadataIndex("key"), ("f", 0, 1)), "key"),
    "place of a class": (place_of(MetadataIndex("key"), _StoragePrefix("x")), "key"),
    "path no str": (place(None, 0, 1), "key"),
    "path bytes": (place(b"x", 0, 1), "key"),
    "negative place": (place("f", -1, 1), "key"),
    "negative length": (place("f", 0, -1), "key"),
    "length beyond int64": (place("f", 0, 1 << 63), "key"),
    "length a bool": (place("f", 0, True), "key"),
    "length a float": (place("f", 0, 1.0), "key"),
    "item that ends beyond int64": (place("f", I64, 1), "key"),
    "descriptors a tuple": (place("f", 0, 1, ("a",)), "key"),
    "descriptor no str": (place("f", 0, 1, [1]), "key"),
    "no state_dict_metadata": (field("state_dict_metadata", None), None),
    "entries of a list": (field("state_dict_metadata", [1]), None),
    "no storage_data": (field("storage_data", None), None),
    "field missing": (lambda m: vars(m).pop("state_dict_metadata"), UNTRIED),
    "field more": (field("more", 1), TAKEN),
    "version no str": (field("version", 1), None),
    "storage_meta a dict": (field("storage_meta", {"checkpoint_id": "x"}), UNTRIED),
    "save id no str": (field("storage_meta", StorageMeta("a", 1)), None),  # type: ignore[arg-type]
    "checkpoint id no str": (field("storage_meta", StorageMeta(1)), None),  # type: ignore[arg-type]
    "modules no list": (field("storage_meta", StorageMeta("a", "b", None, None)), None),  # type: ignore[arg-type]
    "modules a str": (field("storage_meta", StorageMeta("a", modules="ab")), None),  # type: ignore[arg-type]
    "planner_data of metadata": (field("planner_data", small()), TAKEN),
    "planner_data of a class": (field("planner_data", Stray()), TAKEN),
    "planner_data of lists": (field("planner_data", {"a": ["a"]}), TAKEN),
    "planner_data of a large int": (field("planner_data", {"a": (1 << 64,)}), TAKEN),
    "planner_data of a bool": (field("planner_data", {"a": (True,)}), TAKEN),
    "planner_data of int keys": (field("planner_data", {1: ("a",)}), TAKEN),
}  # fmt: skip
# Of these, stock's reader...
READS = {
    "chunk that ends beyond int64", "65 dimensions", "size of a tuple", "shared list",
    "index of a tuple", "item that ends beyond int64", "field more", "planner_data of lists",
    "planner_data of a large int", "planner_data of a bool", "planner_data of int keys",
}  # fmt: skip
UNSAFE = {"name of a subclass", "entry of a class", "planner_data of a class"}
TAKES_AS_COLUMNS = {
    "strides a list", "strides no ints", "strides negative",  # which this torch may not have
    "index of other dimensions", "descriptors a tuple",
}  # fmt: skip


def changed(change: Change) -> Metadata:
    metadata = small()
    change(metadata)
    return metadata


def test_encoder_refuses_what_would_not_come_back() -> None:
    def check(row: tuple[Change, str | None]) -> None:
        change, fqn = row
        if fqn == TAKEN:
            encode_metadata(changed(change), small_files(), "id")
        elif fqn != UNTRIED:
            with pytest.raises(PlanError) as caught:
                encode_metadata(changed(change), small_files(), "id")
            assert caught.value.fqn == fqn

    unpicklable = field("planner_data", lambda: None)
    formats = tensor(S([4]), S([0]), S([4]), memory_format=torch.channels_last_3d)
    check_rows({**WRONG, "unpicklable": (unpicklable, None), "formats": (formats, "key")}, check)


def test_stocks_reader_refuses_a_field_of_another_type_or_range_and_names_it() -> None:
    def check(name: str) -> None:
        change, fqn = WRONG[name]
        kind = UnsafePickleError if name in UNSAFE else CorruptionError
        with hp.watched(), pytest.raises(kind) as caught:
            load_stock_metadata(pickle.dumps(changed(change)), PATH)
        assert caught.value.path == PATH
        if caught.value.fqn is not None or name.startswith(("chunk", "size", "path", "length")):
            assert caught.value.fqn == fqn and repr(fqn) in str(caught.value)

    check_rows({name: name for name in WRONG.keys() - READS - TAKES_AS_COLUMNS}, check)


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_stock_does_not_write_is_up_to_python(protocol: int) -> None:
    """Whatever Python says: the recogniser declines it, and the file is read or refused by it."""

    def check(name: str) -> None:
        data = pickle.dumps(changed(WRONG[name][0]), protocol)
        assert open_stock_metadata(data) is None
        outcomes = []
        for read in (load_stock_metadata, lambda data, path: decode_metadata(data, path)[0]):
            try:
                outcomes.append(canonical(read(data, PATH)))
            except DcpxError as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1]
        assert (outcomes[0][0] is Metadata) is (name in READS)

    assert open_stock_metadata(pickle.dumps(small(), protocol)) is not None
    check_rows({name: name for name in WRONG.keys() - TAKES_AS_COLUMNS}, check)


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
        chunks = [ChunkStorageMetadata(S([0]), S([-n]))]
        entry = TensorStorageMetadata(TensorProperties(), S([4]), chunks)
        metadata.state_dict_metadata[f"b{n}"] = entry
    with pytest.raises(PlanError, match=r"'b1001': its entry is .*\(a negative number where"):
        encode_metadata(metadata, [], "id")


def test_encoder_refuses_a_wrong_file() -> None:
    for file in (
        FileEntry("__0_0.distcp", bytes(16), 8192, 0),  # there already
        FileEntry("a", bytes(15), 8192, 0),
        FileEntry("a", bytes(16), -1, 0),
        FileEntry("a", bytes(16), 8192, 1 << 32),
        FileEntry(pathlib.Path("a"), bytes(16), 8192, 0),  # type: ignore[arg-type]
    ):
        with pytest.raises(PlanError):
            encode_metadata(small(), [*small_files(), file], "id")
