"""`load_stock_metadata`: what stock pickles, read without pickle; all else refused."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import dataclasses
import io
import pathlib
import pickle
import tracemalloc
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile import pickles as hp
from support.metadata_samples import canonical, small
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

from torch_dcpx.errors import CorruptionError, UnsafePickleError
from torch_dcpx.metadata.stock import load_stock_metadata

MODULE = "torch.distributed.checkpoint.metadata"
FILES = "torch.distributed.checkpoint.filesystem"
ENCODING = dcp.metadata._MEM_FORMAT_ENCODING


def sample(**changes: Any) -> Metadata:
    return dataclasses.replace(small(), **changes)


class Doctored(pickle.Pickler):
    """Pickles metadata as another Python or torch does, or as an attacker would."""

    def __init__(self, file: Any, states: Any = None, reduces: Any = None) -> None:
        super().__init__(file, 4)
        self.states, self.reduces = states or {}, reduces or {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in self.reduces:
            return self.reduces[type(obj)](obj)
        if type(obj) in self.states:
            return copyreg.__newobj__, (type(obj),), self.states[type(obj)](obj)  # type: ignore[attr-defined]
        return NotImplemented


def doctored(metadata: Metadata, **kwargs: Any) -> bytes:
    result = io.BytesIO()
    Doctored(result, **kwargs).dump(metadata)
    return result.getvalue()


def read(data: bytes, *args: Any, **kwargs: Any) -> Any:
    with hp.watched():
        return load_stock_metadata(data, "p", *args, **kwargs)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_what_pickle_reads(protocol: int) -> None:
    data = pickle.dumps(sample(), protocol=protocol)
    got = read(data)
    assert canonical(got) == canonical(sample())
    assert load_stock_metadata(data + b"a trailer", "p") == got
    assert load_stock_metadata(memoryview(data), "p") == got


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_reads_what_stock_saved(tmp_path: pathlib.Path) -> None:
    state = {"w": torch.ones(4, 3), "nested": {"list": [1, torch.ones(2)]}, "text": "x"}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    want = pickle.loads(data)
    want.storage_meta.checkpoint_id = str(tmp_path)  # a Path in the file
    assert canonical(load_stock_metadata(data, "p")) == canonical(want)


@pytest.mark.parametrize("names", [5, 6])
def test_five_and_six_properties_load_under_any_torch(names: int) -> None:
    def state(_: TensorProperties) -> Any:
        five = (torch.bfloat16, torch.strided, True, ENCODING(0), False)
        return five if names == 5 else (*five, (3, 1))

    data = doctored(sample(), states={TensorProperties: state})
    for trusted in (False, True):
        got: Any = load_stock_metadata(data, "p", trusted=trusted)
        properties = got.state_dict_metadata["model.weight"].properties
        assert type(properties) is TensorProperties
        assert (properties.dtype, properties.requires_grad) == (torch.bfloat16, True)
        assert properties.memory_format is torch.contiguous_format
        want = (3, 1) if names == 6 else None
        assert getattr(properties, "strides", want) == want


def test_memory_formats_in_both_ways_that_pythons_pickle_enums() -> None:
    for wanted in (torch.contiguous_format, torch.channels_last, torch.preserve_format):
        properties = TensorProperties(memory_format=wanted)
        entry = TensorStorageMetadata(properties, torch.Size(()), [])
        metadata = sample(state_dict_metadata={"w": entry})
        for reduce in (lambda e: (ENCODING, (e.value,)), lambda e: (getattr, (ENCODING, e.name))):
            got = read(doctored(metadata, reduces={ENCODING: reduce})).state_dict_metadata["w"]
            assert got.properties.memory_format is wanted


def test_getattr_is_for_memory_formats_only() -> None:
    for args in ((ENCODING, "__init__"), (Metadata, "__init__"), (ENCODING, "mro", 1)):
        data = doctored(sample(), reduces={ENCODING: lambda _, args=args: (getattr, args)})
        with pytest.raises(UnsafePickleError) as caught:
            read(data)
        assert caught.value.global_name == "builtins.getattr"


def short_text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("cls", ["PosixPath", "PurePosixPath", "Path"])
def test_checkpoint_id_of_any_python_becomes_text(module: str, cls: str) -> None:
    path = pathlib.PurePosixPath("/an/id")
    data = doctored(sample(storage_meta=StorageMeta(path)))
    assert data[2:3] == b"\x95"  # the frame, which other names do not fit
    body = data[:2] + data[11:]
    for old, new in ((type(path).__module__, module), ("PurePosixPath", cls)):
        assert short_text(old) in body
        body = body.replace(short_text(old), short_text(new))
    assert read(body).storage_meta == StorageMeta("/an/id")


def test_old_files_lack_fields() -> None:
    def without(*names: str) -> Any:
        return lambda obj: {k: v for k, v in vars(obj).items() if k not in names}

    states = {
        Metadata: without("version", "storage_meta"),
        _StorageInfo: without("transform_descriptors"),
    }
    got = read(doctored(sample(), states=states))
    assert (got.version, got.storage_meta) == (None, None)
    assert {info.transform_descriptors for info in got.storage_data.values()} == {None}


def test_planted_attributes_vanish() -> None:
    def planted(obj: Any) -> Any:
        return {**vars(obj), "__reduce_ex__": "os", "__module__": "this", "extra": 1}

    classes = (Metadata, MetadataIndex, _StorageInfo, StorageMeta, TensorStorageMetadata,
               ChunkStorageMetadata, BytesStorageMetadata)  # fmt: skip
    got = read(doctored(sample(), states=dict.fromkeys(classes, planted)))
    assert canonical(got) == canonical(sample())
    assert pickle.dumps(got) == pickle.dumps(sample())


def test_pickle_cannot_patch_the_classes() -> None:
    for cls in ("Metadata", "MetadataIndex", "TensorProperties"):
        body = hp.state(hp.name(MODULE, cls), hp.slots(__init__=1)) + b"0"
        with pytest.raises(CorruptionError):
            read(hp.document(body + hp.new(hp.name(MODULE, "Metadata"))))
    assert callable(Metadata.__init__)


def test_a_root_that_is_no_metadata_is_corruption() -> None:
    for root in (None, {}, [1], "x", BytesStorageMetadata()):
        with pytest.raises(CorruptionError):
            load_stock_metadata(pickle.dumps(root), "p")


def test_one_item_at_two_places_is_corruption() -> None:
    # Two keys that differ in the hint only; a dict cannot hold them, a pickle can.
    info = hp.new(hp.name(FILES, "_StorageInfo"))
    info = hp.state(info, hp.value({"relative_path": "x", "offset": 0, "length": 1}))
    index = hp.new(hp.name(MODULE, "MetadataIndex"))
    pair = hp.state(index, hp.value({"fqn": "w", "index": None})) + info
    fields = hp.text("state_dict_metadata") + b"}" + hp.text("storage_data")
    body = hp.new(hp.name(MODULE, "Metadata"))
    body = hp.state(body, b"}(" + fields + b"}(" + pair + pair + b"uu")
    with pytest.raises(CorruptionError, match="two places"):
        load_stock_metadata(hp.document(body), "p")


def test_planner_data_of_plain_types_is_kept() -> None:
    for planner_data in (
        None,
        {"a": ("b", 1)},
        {"a": [1, {"x": (None, 1.5, b"y", True)}], "s": {1, 2}, "f": frozenset("a")},
        collections.OrderedDict(a=torch.Size((1,)), d=torch.float16),
        MetadataIndex("w", torch.Size((1,)), 2),
    ):
        got = load_stock_metadata(pickle.dumps(sample(planner_data=planner_data)), "p")
        assert got.planner_data == planner_data
        assert type(got.planner_data) is type(planner_data)


# ---- What the user allows -----------------------------------------------------------------------


class Plan:
    def __init__(self, steps: Any) -> None:
        self.steps = steps

    def __eq__(self, other: object) -> bool:
        return type(other) is Plan and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]


class Larger(Metadata):
    pass


def test_safe_globals_allow_a_planner_class_for_one_read() -> None:
    data = pickle.dumps(sample(planner_data={"plan": Plan([1, (2, "x")])}))
    for _ in range(2):
        with pytest.raises(UnsafePickleError) as caught:
            load_stock_metadata(data, "p")
        assert caught.value.global_name == f"{Plan.__module__}.Plan"
        got = load_stock_metadata(data, "p", [Plan])
        assert got.planner_data == {"plan": Plan([1, (2, "x")])}


def test_a_listed_subclass_of_metadata_is_read_as_metadata() -> None:
    larger: Any = Larger(**vars(sample()))
    larger.plans = [BytesStorageMetadata()]
    data = pickle.dumps(larger)
    with pytest.raises(UnsafePickleError):
        load_stock_metadata(data, "p")
    assert canonical(load_stock_metadata(data, "p", [Larger])) == canonical(sample())


def test_trusted_is_plain_pickle() -> None:
    data = pickle.dumps(sample(planner_data=Plan([1])))
    assert load_stock_metadata(data, "p", trusted=True) == sample(planner_data=Plan([1]))
    with pytest.raises(CorruptionError):
        load_stock_metadata(data[:50], "p", trusted=True)


@hypothesis.given(st.data())
def test_mutated_metadata_is_read_or_corrupt(data: st.DataObject) -> None:
    body = bytearray(pickle.dumps(sample()))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptionError):
        assert type(read(bytes(body))) is Metadata


# ---- One thing that a small file names a million times ------------------------------------------

MANY = 300


def loaded(entries: Any, places: Any = None) -> Metadata:
    data = pickle.dumps(Metadata(entries, None, places or {}), protocol=4)
    return load_stock_metadata(data, "p")


def chunk(*sizes: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([0] * len(sizes)), torch.Size(sizes))


def test_shared_chunks_sizes_and_descriptors_are_made_once() -> None:
    properties = TensorProperties(torch.float32)
    chunks = [chunk(i + 1, 2) for i in range(MANY)]
    size = torch.Size([MANY, 2])
    lists = {f"t{i}": TensorStorageMetadata(properties, size, chunks) for i in range(MANY)}
    found: Any = loaded(lists).state_dict_metadata
    assert found == lists
    assert len({id(entry.chunks) for entry in found.values()}) == 1

    entry = TensorStorageMetadata(properties, torch.Size([4]), [chunk(4)] * MANY)
    found = loaded({"t": entry}).state_dict_metadata["t"]
    assert found == entry
    assert len({id(one) for one in found.chunks}) == 1

    sizes: Any = tuple(range(1, 65))
    entries = {
        f"t{i}": TensorStorageMetadata(properties, sizes, [ChunkStorageMetadata(sizes, sizes)])
        for i in range(MANY)
    }
    found = loaded(entries).state_dict_metadata
    made = {id(entry.size) for entry in found.values()}
    assert len(made | {id(one.sizes) for entry in found.values() for one in entry.chunks}) == 1
    assert type(found["t0"].size) is torch.Size

    descriptors: Any = tuple(f"d{i}" for i in range(MANY))
    places = {MetadataIndex(f"t{i}"): _StorageInfo("f", i, 1, descriptors) for i in range(MANY)}
    found = loaded({}, places).storage_data
    assert len({id(place.transform_descriptors) for place in found.values()}) == 1
    assert found[MetadataIndex("t7")].transform_descriptors == list(descriptors)


def test_chunks_of_other_dimensions_than_each_other_or_the_tensor_are_refused() -> None:
    for chunks, match in (
        ([chunk(2), chunk(2, 2)], "a chunk of 2 dimensions beside 1"),
        ([chunk(2, 2)], "a chunk of 2 dimensions in a tensor of 1"),
    ):
        with pytest.raises(CorruptionError, match=match):
            loaded({"t": TensorStorageMetadata(TensorProperties(), torch.Size([4]), chunks)})


def test_text_is_not_joined_to_a_path_before_it_is_charged() -> None:
    class Place:
        def __reduce__(self) -> Any:
            return pathlib.PosixPath, ("x" * 60_000,) * 10_000

    meta = StorageMeta(checkpoint_id=Place())  # type: ignore[arg-type]
    data = pickle.dumps(Metadata({}, storage_data={}, storage_meta=meta), protocol=4)
    assert len(data) < 1 << 20
    tracemalloc.start()
    with pytest.raises(CorruptionError, match="far more by its calls than it has bytes"):
        load_stock_metadata(data, "p")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20, peak
