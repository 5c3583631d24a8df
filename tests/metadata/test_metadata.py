"""`.metadata`: what is encoded comes back equal, and stock's pickle in it says the same."""

from __future__ import annotations

import dataclasses
import gc
import io
import itertools
import pathlib
import pickle
import pickletools
from array import array
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from support.metadata_samples import (
    DTYPES,
    FORMATS,
    LAYOUTS,
    PATH,
    canonical,
    encode_small,
    files,
    metadatas,
    small,
    small_files,
)
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

from torch_dcpx import _compat
from torch_dcpx._gc import paused_gc
from torch_dcpx.errors import CorruptionError, UnsafePickleError
from torch_dcpx.metadata import file as metadata_module
from torch_dcpx.metadata import stock as stock_module
from torch_dcpx.metadata.file import (
    CheckpointMetadata,
    decode_metadata,
    encode_metadata,
    encode_pieces,
)
from torch_dcpx.metadata.parts import decode_parts
from torch_dcpx.storage.names import FileEntry

# ---- There and back -----------------------------------------------------------------------------


@pytest.mark.slow
@given(metadatas(), files)
def test_decoded_metadata_equals_what_stock_unpickles(
    metadata: Metadata, file_table: list[FileEntry]
) -> None:
    before = canonical(metadata)
    data = encode_metadata(metadata, file_table, "id")
    assert canonical(metadata) == before, "the object given was changed"
    stock = pickle.load(io.BytesIO(data))
    decoded = decode_metadata(data, PATH)
    assert canonical(decoded.metadata) == canonical(stock)
    assert canonical(decoded.files) == canonical({file.path: file for file in file_table})
    assert decoded.save_id == "id"
    meta = metadata.storage_meta
    if meta is not None:
        where = None if meta.checkpoint_id is None else str(meta.checkpoint_id)
        meta = StorageMeta(where, meta.save_id, None, meta.modules)
    assert canonical(stock) == canonical(dataclasses.replace(metadata, storage_meta=meta))


def test_every_mix_of_properties_comes_back_every_time() -> None:
    kinds = itertools.product(DTYPES, LAYOUTS, (False, True), FORMATS, (False, True))
    properties = [TensorProperties(*kind) for kind in kinds]
    entries = {
        str(number): TensorStorageMetadata(one, torch.Size([]), [])
        for number, one in enumerate(properties * 3)
    }
    data = encode_metadata(Metadata(entries, None, {}), [], "id")
    assert canonical(pickle.loads(data).state_dict_metadata) == canonical(entries)
    assert canonical(decode_metadata(data, PATH).metadata.state_dict_metadata) == canonical(entries)


def test_lone_surrogate_in_a_name_comes_back() -> None:
    metadata = Metadata({"a\ud800": BytesStorageMetadata()}, {"a\ud800": ("a\ud800",)}, {})
    data = encode_metadata(metadata, [], "id")
    assert canonical(pickle.loads(data)) == canonical(metadata)
    assert canonical(decode_metadata(data, PATH).metadata) == canonical(metadata)


def test_plain_tuples_come_back_as_equal_sizes() -> None:
    entry = TensorStorageMetadata(TensorProperties(), (4,), [ChunkStorageMetadata((0,), (4,))])  # type: ignore[arg-type]
    metadata = Metadata({"key": entry}, None, {MetadataIndex("key"): _StorageInfo("f", 0, 1)})
    data = encode_metadata(metadata, [], "id")
    assert decode_metadata(data, PATH).metadata == pickle.loads(data) == metadata


def test_same_input_gives_same_bytes() -> None:
    assert encode_small() == encode_small()


@pytest.mark.parametrize("planner_data", [{"a": ("b", 1)}, OrderedDict(a=1)], ids=["flat", "other"])
def test_pickle_names_stock_classes_only(planner_data: Any) -> None:
    data = encode_small(
        planner_data=planner_data, storage_meta=StorageMeta(pathlib.Path("/ckpt"), None)
    )
    operations = [(code.name, value) for code, value, _ in pickletools.genops(data)]
    assert operations[0] == ("PROTO", 4)
    values = {value for name, value in operations if name in ("SHORT_BINUNICODE", "BINUNICODE")}
    modules = {value for value in values if isinstance(value, str) and "torch" in value}
    assert not values & {"builtins", "getattr", "pathlib", "pathlib._local"}
    assert "/ckpt" in values
    assert modules >= {"torch.distributed.checkpoint.metadata", "torch"}


def test_metadata_of_newer_torch_loads_in_older_and_keeps_its_strides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch 2.15's TensorProperties has a sixth field, on which older torch fails."""
    metadata = small()
    for entry, strides in zip(metadata.state_dict_metadata.values(), [(3, 1), None], strict=False):
        assert isinstance(entry, TensorStorageMetadata)
        vars(entry.properties)["strides"] = strides
    five = TensorProperties.__getstate__

    def six(self: TensorProperties) -> tuple[Any, ...]:
        return (*five(self)[:5], self.__dict__.get("strides"))

    for planner_data in (None, ["in the pickle only"]):
        with monkeypatch.context() as newer:
            newer.setattr(TensorProperties, "__getstate__", six)
            given = dataclasses.replace(metadata, planner_data=planner_data)
            data = encode_metadata(given, [], "id")
        values = [value for _, value, _ in pickletools.genops(data)]
        assert "strides" not in values
        stock = pickle.loads(data)
        assert stock.state_dict_metadata["model.weight"].properties.dtype == torch.float32
        for has_strides in (False, True):
            with monkeypatch.context() as other:
                other.setattr(_compat, "HAS_STRIDES", has_strides)
                entries = decode_metadata(data, PATH).metadata.state_dict_metadata
            found = [
                vars(entry.properties).get("strides")
                for entry in entries.values()
                if isinstance(entry, TensorStorageMetadata)
            ]
            assert found == ([(3, 1), None] if has_strides else [None, None])


# ---- Stock's files, and planner_data that only the pickle holds ---------------------------------


def test_stock_file_has_no_file_table() -> None:
    data = pickle.dumps(small())
    found = decode_metadata(data, PATH)
    assert canonical(found) == canonical(CheckpointMetadata(small(), found.save_id, None))
    assert found.save_id == decode_metadata(data, PATH).save_id
    assert found.save_id != decode_metadata(pickle.dumps(small(), protocol=2), PATH).save_id


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 1000])
def test_bytes_behind_a_stock_pickle_are_corruption(nbytes: int, trusted: bool) -> None:
    data = pickle.dumps(small())
    with pytest.raises(CorruptionError) as caught:
        decode_metadata(data + bytes(nbytes), PATH, trusted=trusted)
    error = caught.value
    assert (error.path, error.offset, error.nbytes) == (PATH, len(data), nbytes)


def test_columns_are_read_without_the_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        pytest.fail("the pickle was read")

    data = encode_small()
    monkeypatch.setattr(metadata_module, "load_stock_metadata", load)
    assert canonical(decode_metadata(data, PATH).metadata) == canonical(small())


@dataclasses.dataclass
class Plan:
    """planner_data of a user's own planner."""

    text: str


def test_planner_data_in_the_pickle_needs_leave() -> None:
    data = encode_small(planner_data=Plan("a"))
    with pytest.raises(UnsafePickleError):
        decode_metadata(data, PATH)
    for leave in ({"safe_globals": (Plan,)}, {"trusted": True}):
        found = decode_metadata(data, PATH, **leave)  # type: ignore[arg-type]
        assert canonical(found.metadata.planner_data) == canonical(Plan("a"))
        assert found.files is not None
        assert found.files.keys() == {"__0_0.distcp", "__1_0.distcp"}


# ---- A torch whose classes have fields that C++ does not know ------------------------------------


@pytest.mark.slow
@given(metadatas(), files)
def test_torch_with_unknown_fields_reads_stocks_pickle_of_the_same_file(
    metadata: Metadata, file_table: list[FileEntry]
) -> None:
    data = encode_metadata(metadata, file_table, "id")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata_module, "HAS_KNOWN_ITEMS", False)
        patch.delattr(metadata_module, "open_columns")
        found = decode_metadata(data, PATH)
    assert type(found.metadata.state_dict_metadata) is type(found.metadata.storage_data) is dict
    assert canonical(found) == canonical(decode_metadata(data, PATH))


def test_torch_with_unknown_fields_executes_no_pickle_even_if_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The columns would not, and the file's planner_data is in them."""
    data = encode_small()
    monkeypatch.setattr(metadata_module, "HAS_KNOWN_ITEMS", False)
    monkeypatch.setattr(stock_module, "_TrustingUnpickler", None)
    assert canonical(decode_metadata(data, PATH, trusted=True).metadata) == canonical(small())


def test_torch_with_unknown_fields_cannot_repair_by_columns_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns = decode_parts(encode_small(), PATH).columns
    assert columns is not None
    assert metadata_module.decode_columns(columns) is not None
    monkeypatch.setattr(metadata_module, "HAS_KNOWN_ITEMS", False)
    assert metadata_module.decode_columns(columns) is None


# ---- The garbage collector ----------------------------------------------------------------------


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_is_as_before(was_enabled: bool) -> None:
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    try:
        (gc.enable if was_enabled else gc.disable)()
        data = encode_small()
        decode_metadata(data, PATH)
        with pytest.raises(CorruptionError):
            decode_metadata(data[:-1], PATH)
        assert (gc.isenabled(), gc.get_threshold()) == (was_enabled, thresholds)
    finally:
        (gc.enable if enabled else gc.disable)()


def test_pauses_that_overlap_end_with_the_last() -> None:
    """Two threads decode; the first one to be done must not wake the collector for the other."""
    first, second = paused_gc(), paused_gc()
    thresholds = gc.get_threshold()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() != thresholds
    second.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds and gc.isenabled()


def test_pieces_are_the_columns_themselves_and_make_the_file() -> None:
    pieces = encode_pieces(small(), small_files(), "our save id")
    assert b"".join(pieces) == encode_small()
    owners = [piece.obj for piece in pieces if isinstance(piece, memoryview)]
    assert sum(isinstance(owner, array) for owner in owners) > 10, "columns were copied"
