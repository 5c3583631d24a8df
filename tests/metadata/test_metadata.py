"""`.metadata`: what is encoded comes back equal, and stock's pickle in it says the same."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import pathlib
import pickle
import pickletools
import tarfile
from array import array
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from support.metadata_samples import (
    DTYPES,
    FORMATS,
    I64,
    LAYOUTS,
    PATH,
    TAIL,
    canonical,
    encode_small,
    files,
    metadatas,
    small,
    small_files,
)
from torch import Size
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

from torch_dcpx import _C, _compat
from torch_dcpx._gc import paused_gc
from torch_dcpx.errors import CorruptionError, PlanError, UnsafePickleError
from torch_dcpx.metadata import file as metadata_module
from torch_dcpx.metadata import stock as stock_module
from torch_dcpx.metadata.encode import encode_columns
from torch_dcpx.metadata.file import (
    CheckpointMetadata,
    decode_metadata,
    encode_metadata,
    encode_pieces,
)
from torch_dcpx.metadata.parts import decode_parts
from torch_dcpx.storage.names import FileEntry

GOLDEN = sorted((pathlib.Path(__file__).resolve().parents[1] / "golden").glob("ours-*.tar.xz"))


def pickled(data: bytes) -> bytes:
    """The pickle with which a `.metadata` begins."""
    return data[: TAIL.unpack(data[-TAIL.size :])[3]]


# ---- There and back -----------------------------------------------------------------------------


def assert_comes_back(metadata: Metadata) -> bytes:
    """By its columns and by the pickle; returns the file."""
    data = encode_metadata(metadata, [], "id")
    assert canonical(pickle.loads(data)) == canonical(metadata)
    assert canonical(decode_metadata(data, PATH).metadata) == canonical(metadata)
    return data


@given(metadatas(), files)
def test_decoded_metadata_equals_what_stock_unpickles(
    metadata: Metadata, file_table: list[FileEntry]
) -> None:
    before = canonical(metadata)
    data = encode_metadata(metadata, file_table, "id")
    assert canonical(metadata) == before, "the object given was changed"
    stock = pickle.loads(data)
    decoded = decode_metadata(data, PATH)
    assert canonical(decoded.metadata) == canonical(stock)
    assert canonical(decoded.files) == canonical({file.path: file for file in file_table})
    assert decoded.save_id == "id"
    meta = metadata.storage_meta
    if meta is not None:
        where = None if meta.checkpoint_id is None else str(meta.checkpoint_id)
        meta = StorageMeta(where, meta.save_id, None, meta.modules)
    assert canonical(stock) == canonical(dataclasses.replace(metadata, storage_meta=meta))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name.removesuffix(".tar.xz"))
def test_pickle_has_the_bytes_that_earlier_releases_wrote(path: pathlib.Path) -> None:
    with tarfile.open(path) as archive:
        data = archive.extractfile(".metadata").read()  # type: ignore[union-attr]
    found = decode_metadata(data, PATH)
    assert found.files is not None and len(found.metadata.state_dict_metadata) > 30
    again = encode_metadata(found.metadata, list(found.files.values()), found.save_id)
    assert pickled(again) == pickled(data)


def test_every_mix_of_properties_comes_back_every_time() -> None:
    kinds = itertools.product(DTYPES, LAYOUTS, (False, True), FORMATS, (False, True))
    properties = [TensorProperties(*kind) for kind in kinds]
    entries: dict[str, Any] = {
        str(number): TensorStorageMetadata(one, Size([]), [])
        for number, one in enumerate(properties * 3)
    }
    assert_comes_back(Metadata(entries, None, {}))


@pytest.mark.parametrize("numbers", [range(-3, 4), range(254, 259), range(65534, 65538)])
def test_integers_of_every_width_come_back_in_their_shortest_form(numbers: range) -> None:
    near = [(1 << bits) + by for bits in (31, 32, 39, 40, 47, 55, 62) for by in (-1, 0, 1)]
    extremes = [I64, -I64 - 1, -I64, *near, *(-number for number in near)]
    data = assert_comes_back(Metadata({}, {"a": tuple(numbers), "b": tuple(extremes)}, {}))
    shortest = pickle.dumps([*numbers, *extremes], 4)
    kinds = [
        [code.name for code, value, _ in pickletools.genops(one) if type(value) is int]
        for one in (pickled(data), shortest)
    ]
    wanted = [kind for kind in kinds[1] if kind in ("BININT", "BININT1", "BININT2", "LONG1")]
    assert [
        kind for kind in kinds[0] if kind in ("BININT", "BININT1", "BININT2", "LONG1")
    ] == wanted


def test_names_that_stock_uses_itself_come_back() -> None:
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
    entries: dict[str, Any] = dict.fromkeys(texts, tensor)
    storage = {MetadataIndex(text, [0]): _StorageInfo(text, 0, 1, [text]) for text in texts}
    planner = {text: (text, "x" * 256, text) for text in texts}
    for version in (None, *texts):
        meta = StorageMeta(version, version, None, texts)
        data = assert_comes_back(Metadata(entries, planner, storage, meta, version))
    operations = [(code.name, value) for code, value, _ in pickletools.genops(data)]
    said = [value for name, value in operations if name.endswith("BINUNICODE")]
    assert len(said) == len(set(said)), "a text is written twice"


def test_more_objects_than_one_batch_and_one_byte_of_memo_come_back() -> None:
    whole = ChunkStorageMetadata(Size([0]), Size([1]))
    entries: dict[str, Any] = {
        f"t{i}": TensorStorageMetadata(TensorProperties(), Size([i]), [whole] * (i == 7) * 2500)
        for i in range(3001)
    }
    storage = {MetadataIndex(fqn, [i], i): _StorageInfo(fqn, i, 1) for i, fqn in enumerate(entries)}
    data = assert_comes_back(
        Metadata(entries, {fqn: (fqn * 300,) for fqn in ("t0", "t1")}, storage)
    )
    names = [code.name for code, _, _ in pickletools.genops(data)]
    assert names.count("SETITEMS") >= 8 and names.count("APPENDS") >= 3  # of 1,000 each
    assert len(pickled(data)) < len(pickle.dumps(pickle.loads(data), 4))


def test_lone_surrogate_in_a_name_comes_back() -> None:
    assert_comes_back(Metadata({"a\ud800": BytesStorageMetadata()}, {"a\ud800": ("a\ud800",)}, {}))


def test_plain_tuples_come_back_as_equal_sizes() -> None:
    entry = TensorStorageMetadata(TensorProperties(), (4,), [ChunkStorageMetadata((0,), (4,))])  # type: ignore[arg-type]
    metadata = Metadata({"key": entry}, None, {MetadataIndex("key"): _StorageInfo("f", 0, 1)})
    data = encode_metadata(metadata, [], "id")
    assert decode_metadata(data, PATH).metadata == pickle.loads(data) == metadata


@pytest.mark.parametrize("planner_data", [{"a": ("b", 1)}, OrderedDict(a=1)], ids=["flat", "other"])
def test_pickle_names_stock_classes_only(planner_data: Any) -> None:
    meta = StorageMeta(pathlib.Path("/ckpt"), None)
    data = encode_small(planner_data=planner_data, storage_meta=meta)
    assert data == encode_small(planner_data=planner_data, storage_meta=meta)
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
        assert "strides" not in [value for _, value, _ in pickletools.genops(data)]
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
def test_bytes_behind_a_stock_pickle_are_corruption(trusted: bool) -> None:
    data = pickle.dumps(small())
    for nbytes in (1, 63, 64, 65, 1000):
        with pytest.raises(CorruptionError) as caught:
            decode_metadata(data + bytes(nbytes), PATH, trusted=trusted)
        error = caught.value
        assert (error.path, error.offset, error.nbytes) == (PATH, len(data), nbytes)


def test_columns_are_read_without_the_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(metadata_module, "load_stock_metadata")
    assert canonical(decode_metadata(encode_small(), PATH).metadata) == canonical(small())


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


def test_torch_with_unknown_fields_reads_the_pickle_and_executes_none_even_if_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = encode_small()
    columns = decode_parts(data, PATH).columns
    assert columns is not None
    assert metadata_module.decode_columns(columns) is not None
    monkeypatch.setattr(metadata_module, "HAS_KNOWN_ITEMS", False)
    monkeypatch.setattr(stock_module, "_TrustingUnpickler", None)
    assert canonical(decode_metadata(data, PATH, trusted=True).metadata) == canonical(small())
    assert metadata_module.decode_columns(columns) is None  # no repair by columns alone


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


# ---- Columns -------------------------------------------------------------------------------------


def test_pieces_are_the_columns_themselves_and_make_the_file() -> None:
    pieces = encode_pieces(small(), small_files(), "our save id")
    assert b"".join(pieces) == encode_small()
    owners = [piece.obj for piece in pieces if isinstance(piece, memoryview)]
    assert sum(isinstance(owner, array) for owner in owners) > 10, "columns were copied"


def pickle_of(columns: dict[str, Any]) -> bytes:
    return _C.pickle_metadata(columns, True, [], None, None)


def test_columns_that_encode_columns_would_not_make_are_refused() -> None:
    metadata = small()
    metadata.storage_data.popitem()  # the one with descriptors
    columns = encode_columns(metadata, []).finished()
    assert pickle.loads(pickle_of(columns)).planner_data == small().planner_data
    for name, column in columns.items():
        if name.startswith("file") or name == "chunk_flags":
            continue
        with pytest.raises(KeyError):
            pickle_of({other: one for other, one in columns.items() if other != name})
        for wrong in (array("i", [0]), memoryview(column)[::-2], [0], 7):
            with pytest.raises(TypeError):
                pickle_of({**columns, name: wrong})
        if name in ("strings", "entry_fqn", "storage_fqn", "planner_fqn"):
            continue  # fewer of these are fewer objects
        for shorter in (column[:-1], column[:0]):
            with pytest.raises(PlanError):
                pickle_of({**columns, name: shorter})
    for name in ("entry_fqn", "tensor_dtype", "tensor_layout", "storage_path", "planner_fqn"):
        for number in (-1, len(columns["string_ends"]), I64):
            with pytest.raises(PlanError):
                pickle_of({**columns, name: array("q", [number]) * len(columns[name])})
