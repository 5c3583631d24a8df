"""`load_stock_metadata`: what stock pickles, read without pickle; all else refused."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import io
import pathlib
import pickle

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile import pickles as hp
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

from torch_dcpx._compat import HAS_STRIDES
from torch_dcpx.errors import CorruptionError, UnsafePickleError
from torch_dcpx.metadata.stock import load_stock_metadata

MODULE = "torch.distributed.checkpoint.metadata"
FILES = "torch.distributed.checkpoint.filesystem"
PLACE = "an/id"


def sample(**changes) -> Metadata:
    properties = TensorProperties(torch.bfloat16, requires_grad=True)
    if HAS_STRIDES:
        properties.strides = (3, 1)
    chunks = [
        ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 3))),
        ChunkStorageMetadata(torch.Size((2, 0)), torch.Size((2, 3))),
    ]
    fields = {
        "state_dict_metadata": {
            "w": TensorStorageMetadata(properties, torch.Size((4, 3)), chunks),
            "scalar": TensorStorageMetadata(TensorProperties(), torch.Size(()), []),
            "lr": BytesStorageMetadata(),
        },
        "planner_data": {"w": ("w",), "lr": ("optim", 0, "lr")},
        "storage_data": {
            MetadataIndex("w", torch.Size((0, 0)), 0): _StorageInfo("__0_0.distcp", 0, 100),
            MetadataIndex("w", torch.Size((2, 0)), 1): _StorageInfo(
                "__1_0.distcp", 2**40, 100, ["stream.zstd/1"]
            ),
            MetadataIndex("lr"): _StorageInfo("__0_0.distcp", 100, 7),
        },
        "storage_meta": StorageMeta(PLACE, "save", None, ["a"]),
        "version": "1.0.0",
    }
    return Metadata(**{**fields, **changes})


class Doctored(pickle.Pickler):
    """Pickles metadata as another Python or torch does, or as an attacker would."""

    def __init__(self, file, states=None, reduces=None, protocol=4):
        super().__init__(file, protocol)
        self.states, self.reduces = states or {}, reduces or {}

    def reducer_override(self, obj):
        if type(obj) in self.reduces:
            return self.reduces[type(obj)](obj)
        if type(obj) in self.states:
            return copyreg.__newobj__, (type(obj),), self.states[type(obj)](obj)
        return NotImplemented


def doctored(metadata, **kwargs) -> bytes:
    result = io.BytesIO()
    Doctored(result, **kwargs).dump(metadata)
    return result.getvalue()


def same(got: Metadata, want: Metadata) -> bool:
    """Equal, hints included (equality of MetadataIndex leaves them out), types exact."""
    hints = [[index.index for index in m.storage_data] for m in (got, want)]
    return got == want and hints[0] == hints[1] and pickle.dumps(got) == pickle.dumps(want)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_what_pickle_reads(protocol):
    data = pickle.dumps(sample(), protocol=protocol)
    with hp.watched():
        got = load_stock_metadata(data, "p")
    assert same(got, sample())
    assert load_stock_metadata(data + b"a trailer", "p") == got
    assert load_stock_metadata(memoryview(data), "p") == got


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_reads_what_stock_saved(tmp_path):
    state = {"w": torch.ones(4, 3), "nested": {"list": [1, torch.ones(2)]}, "text": "x"}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    want = pickle.loads(data)
    want.storage_meta.checkpoint_id = str(tmp_path)  # a Path in the file
    assert same(load_stock_metadata(data, "p"), want)


@pytest.mark.parametrize("names", [5, 6])
def test_five_and_six_properties_load_under_any_torch(names):
    def state(p):
        code = encoded_format(p.memory_format)
        five = (p.dtype, p.layout, p.requires_grad, code, p.pin_memory)
        return five if names == 5 else (*five, (3, 1))

    data = doctored(sample(), states={TensorProperties: state})
    for trusted in (False, True):
        got = load_stock_metadata(data, "p", trusted=trusted)
        properties = got.state_dict_metadata["w"].properties
        assert type(properties) is TensorProperties
        assert (properties.dtype, properties.requires_grad) == (torch.bfloat16, True)
        assert properties.memory_format is torch.contiguous_format
        want = (3, 1) if names == 6 else None
        assert getattr(properties, "strides", want) == want


def encoded_format(memory_format):
    names = {"contiguous_format": 0, "channels_last": 1, "preserve_format": 2}
    encoding = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    return encoding(names[str(memory_format).removeprefix("torch.")])


@pytest.mark.parametrize("index", [0, 1, 2])
def test_memory_formats_in_both_ways_that_pythons_pickle_enums(index):
    wanted = (torch.contiguous_format, torch.channels_last, torch.preserve_format)[index]
    encoding = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    properties = TensorProperties(memory_format=wanted)
    entry = TensorStorageMetadata(properties, torch.Size(()), [])
    metadata = sample(state_dict_metadata={"w": entry})
    for reduce in (lambda e: (encoding, (e.value,)), lambda e: (getattr, (encoding, e.name))):
        data = doctored(metadata, reduces={encoding: reduce})
        got = load_stock_metadata(data, "p").state_dict_metadata["w"].properties
        assert got.memory_format is wanted


def test_getattr_is_for_memory_formats_only():
    encoding = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    for args in ((encoding, "__init__"), (Metadata, "__init__"), (encoding, "mro", 1)):
        data = doctored(sample(), reduces={encoding: lambda _, args=args: (getattr, args)})
        with hp.watched(), pytest.raises(UnsafePickleError) as caught:
            load_stock_metadata(data, "p")
        assert caught.value.global_name == "builtins.getattr"


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("cls", ["PosixPath", "PurePosixPath", "Path"])
def test_checkpoint_id_of_any_python_becomes_text(module, cls):
    path = pathlib.PurePosixPath("/an/id")
    data = doctored(sample(storage_meta=StorageMeta(path)))
    old = pickle.dumps(path, protocol=4)[2:-1]
    assert b"PurePosixPath" in old and b"pathlib" in data
    body = data.replace(short_text("pathlib"), short_text(module)).replace(
        short_text("PurePosixPath"), short_text(cls)
    )
    with hp.watched():
        got = load_stock_metadata(unframed(body), "p")
    assert got.storage_meta == StorageMeta("/an/id")


def short_text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def unframed(data: bytes) -> bytes:
    assert data[2:3] == b"\x95"
    return data[:2] + data[11:]


def test_old_files_lack_fields():
    states = {
        Metadata: lambda m: {
            k: v for k, v in vars(m).items() if k not in ("version", "storage_meta")
        },
        _StorageInfo: lambda s: {
            "relative_path": s.relative_path,
            "offset": s.offset,
            "length": s.length,
        },
    }
    got = load_stock_metadata(doctored(sample(), states=states), "p")
    assert (got.version, got.storage_meta) == (None, None)
    assert {info.transform_descriptors for info in got.storage_data.values()} == {None}


def test_planted_attributes_vanish():
    def planted(obj):
        return {**vars(obj), "__reduce_ex__": "os", "__module__": "this", "extra": 1}

    classes = (Metadata, MetadataIndex, _StorageInfo, StorageMeta, TensorStorageMetadata,
               ChunkStorageMetadata, BytesStorageMetadata)  # fmt: skip
    data = doctored(sample(), states=dict.fromkeys(classes, planted))
    with hp.watched():
        got = load_stock_metadata(data, "p")
    assert same(got, sample())


def test_pickle_cannot_patch_the_classes():
    for cls in ("Metadata", "MetadataIndex", "TensorProperties"):
        body = hp.state(hp.name(MODULE, cls), hp.slots(__init__=1)) + b"0"
        with hp.watched(), pytest.raises(CorruptionError):
            load_stock_metadata(hp.document(body + hp.new(hp.name(MODULE, "Metadata"))), "p")
    assert callable(Metadata.__init__)


SIZES = torch.Size((4, 3))
BAD = {
    "key no str": {"state_dict_metadata": {1: BytesStorageMetadata()}},
    "entry a dict": {"state_dict_metadata": {"w": {}}},
    "entry an index": {"state_dict_metadata": {"w": MetadataIndex("w")}},
    "no dict": {"state_dict_metadata": [1]},
    "negative size": {
        "state_dict_metadata": {
            "w": TensorStorageMetadata(TensorProperties(), torch.Size((-1,)), [])
        }
    },
    "size of bools": {
        "state_dict_metadata": {"w": TensorStorageMetadata(TensorProperties(), (True,), [])}
    },
    "size a str": {
        "state_dict_metadata": {"w": TensorStorageMetadata(TensorProperties(), "ab", [])}
    },
    "chunk of other dims": {
        "state_dict_metadata": {
            "w": TensorStorageMetadata(
                TensorProperties(),
                SIZES,
                [ChunkStorageMetadata(torch.Size((0,)), torch.Size((1,)))],
            )
        }
    },
    "chunk uneven": {
        "state_dict_metadata": {
            "w": TensorStorageMetadata(
                TensorProperties(),
                SIZES,
                [ChunkStorageMetadata(torch.Size((0,)), SIZES)],
            )
        }
    },
    "chunks a tuple": {
        "state_dict_metadata": {"w": TensorStorageMetadata(TensorProperties(), SIZES, ())}
    },
    "no properties": {"state_dict_metadata": {"w": TensorStorageMetadata(None, SIZES, [])}},
    "path no str": {"storage_data": {MetadataIndex("w"): _StorageInfo(1, 0, 0)}},
    "path bytes": {"storage_data": {MetadataIndex("w"): _StorageInfo(b"x", 0, 0)}},
    "negative offset": {"storage_data": {MetadataIndex("w"): _StorageInfo("x", -1, 0)}},
    "length past 2^63": {"storage_data": {MetadataIndex("w"): _StorageInfo("x", 0, 2**63)}},
    "length a bool": {"storage_data": {MetadataIndex("w"): _StorageInfo("x", 0, True)}},
    "length a float": {"storage_data": {MetadataIndex("w"): _StorageInfo("x", 0, 1.0)}},
    "descriptor no str": {"storage_data": {MetadataIndex("w"): _StorageInfo("x", 0, 1, [1])}},
    "storage key a str": {"storage_data": {"w": _StorageInfo("x", 0, 1)}},
    "storage value": {"storage_data": {MetadataIndex("w"): _StoragePrefix("x")}},
    "storage None": {"storage_data": None},
    "fqn no str": {"storage_data": {MetadataIndex(1): _StorageInfo("x", 0, 1)}},
    "hint no int": {"storage_data": {MetadataIndex("w", None, "0"): _StorageInfo("x", 0, 1)}},
    "version no str": {"version": 1},
    "storage_meta": {"storage_meta": {"checkpoint_id": "x"}},
    "save id": {"storage_meta": StorageMeta(PLACE, 1)},
    "modules": {"storage_meta": StorageMeta(PLACE, modules="ab")},
    "checkpoint id": {"storage_meta": StorageMeta(1)},
    "nested": {"planner_data": sample()},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD)
def test_a_field_of_another_type_or_range_is_corruption(changes):
    with hp.watched(), pytest.raises(CorruptionError) as caught:
        load_stock_metadata(pickle.dumps(sample(**changes)), "p")
    assert caught.value.path == "p"
    entries = changes.get("state_dict_metadata")
    if type(entries) is dict and "w" in entries:
        assert caught.value.fqn == "w" and "'w'" in str(caught.value)


@pytest.mark.parametrize("root", [None, {}, [1], "x", BytesStorageMetadata()])
def test_a_root_that_is_no_metadata_is_corruption(root):
    with pytest.raises(CorruptionError):
        load_stock_metadata(pickle.dumps(root), "p")


def test_one_item_at_two_places_is_corruption():
    # Two keys that differ in the hint only; a dict cannot hold them, a pickle can.
    item = hp.name(MODULE, "MetadataIndex")
    place = hp.name(FILES, "_StorageInfo")
    info = hp.state(hp.new(place), hp.value({"relative_path": "x", "offset": 0, "length": 1}))
    pair = hp.state(hp.new(item), hp.value({"fqn": "w", "index": None})) + info
    body = hp.state(
        hp.new(hp.name(MODULE, "Metadata")),
        b"}("
        + hp.text("state_dict_metadata")
        + b"}"
        + hp.text("storage_data")
        + b"}("
        + pair
        + pair
        + b"uu",
    )
    with pytest.raises(CorruptionError, match="two places"):
        load_stock_metadata(hp.document(body), "p")


PLANNER = [
    None,
    {"a": ("b", 1)},
    {"a": [1, {"x": (None, 1.5, b"y", True)}], "s": {1, 2}, "f": frozenset("a")},
    collections.OrderedDict(a=torch.Size((1,)), d=torch.float16),
    MetadataIndex("w", torch.Size((1,)), 2),
]


@pytest.mark.parametrize("planner_data", PLANNER)
def test_planner_data_of_plain_types_is_kept(planner_data):
    got = load_stock_metadata(pickle.dumps(sample(planner_data=planner_data)), "p")
    assert got.planner_data == planner_data
    assert type(got.planner_data) is type(planner_data)


class Plan:
    def __init__(self, steps):
        self.steps = steps

    def __eq__(self, other):
        return type(other) is Plan and vars(other) == vars(self)

    __hash__ = None


class Larger(Metadata):
    pass


def test_safe_globals_allow_a_planner_class_for_one_read():
    data = pickle.dumps(sample(planner_data={"plan": Plan([1, (2, "x")])}))
    with pytest.raises(UnsafePickleError) as caught:
        load_stock_metadata(data, "p")
    assert caught.value.global_name == f"{Plan.__module__}.Plan"
    assert load_stock_metadata(data, "p", [Plan]).planner_data == {"plan": Plan([1, (2, "x")])}
    with pytest.raises(UnsafePickleError):
        load_stock_metadata(data, "p")


def test_a_listed_subclass_of_metadata_is_read_as_metadata():
    larger = Larger(**vars(sample()))
    larger.plans = [BytesStorageMetadata()]
    data = pickle.dumps(larger)
    with pytest.raises(UnsafePickleError):
        load_stock_metadata(data, "p")
    assert same(load_stock_metadata(data, "p", [Larger]), sample())


def test_trusted_is_plain_pickle():
    data = pickle.dumps(sample(planner_data=Plan([1])))
    assert load_stock_metadata(data, "p", trusted=True) == sample(planner_data=Plan([1]))
    with pytest.raises(CorruptionError):
        load_stock_metadata(data[:50], "p", trusted=True)


@hypothesis.given(st.data())
def test_mutated_metadata_is_read_or_corrupt(data):
    body = bytearray(pickle.dumps(sample()))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with hp.watched(), contextlib.suppress(CorruptionError):
        assert type(load_stock_metadata(bytes(body), "p")) is Metadata
