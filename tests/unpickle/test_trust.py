"""Byte items: every plain class comes back as stock reads it, everything else is refused."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import random
import types
import uuid

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hostile import pickles as hp
from support.rows import check_rows
from support.zip_samples import saved

from torch_dcpx.errors import CorruptionError, UnsafePickleError
from torch_dcpx.unpickle.byte_items import decode_byte_item, reencode_byte_item

try:
    import numpy as np
except ImportError:
    np = None

UTC = datetime.timezone.utc


def decode(data, **kwargs):
    with hp.watched():
        return decode_byte_item(data, fqn="k", path="p", **kwargs)


def stock(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def bits(tensor: torch.Tensor):
    if tensor.device.type == "meta":
        return None
    return bytes(tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
                 .view(torch.uint8).tolist())  # fmt: skip


def same(a, b) -> bool:
    """Equal bit by bit, of exactly the same types, attributes included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        facts = [
            (t.dtype, t.shape, t.stride(), t.storage_offset(), t.requires_grad, t.device,
             t.is_conj(), t.is_neg(), t.untyped_storage().nbytes(), vars(t))
            for t in (a, b)
        ]  # fmt: skip
        return facts[0] == facts[1] and bits(a) == bits(b)
    if np is not None and isinstance(a, np.ndarray):
        facts = [
            (x.dtype, x.shape, x.size and x.strides, x.flags.writeable, x.tobytes("A"))
            for x in (a, b)
        ]
        return facts[0] == facts[1]
    if np is not None and isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple, collections.deque)):
        if getattr(a, "maxlen", None) != getattr(b, "maxlen", None):
            return False
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        extra = [
            (getattr(d, "default_factory", None), getattr(d, "__dict__", None)) for d in (a, b)
        ]
        return extra[0] == extra[1] and same(list(a.items()), list(b.items()))
    if isinstance(a, (argparse.Namespace, types.SimpleNamespace)):
        return same(vars(a), vars(b))
    if isinstance(a, io.BytesIO):
        return (a.getvalue(), a.tell(), vars(a)) == (b.getvalue(), b.tell(), vars(b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    return a == b and getattr(a, "fold", 0) == getattr(b, "fold", 0)


def attributed(obj, **attributes):
    vars(obj).update(attributes)
    return obj


def positioned(file: io.BytesIO, at: int) -> io.BytesIO:
    file.seek(at)
    return file


PLAIN = {
    "None": None,
    "bools": [True, False],
    "ints": [0, -1, 2**31, -(2**70)],
    "floats": [0.0, -0.0, 1.5, float("inf"), float("nan")],
    "complex": [1j, complex(-0.0, float("inf"))],
    "str": ["", "text", "\u20ac\U0001f600", "a" * 300],
    "bytes": [b"", b"\x00\xff", bytes(range(256))],
    "bytearray": [bytearray(), bytearray(b"\x00\xff")],
    "containers": {"a": [1, (2, {3: "x"})], (1, 2): [], None: ()},
    "sets": [set(), {1, "a", (2,)}, frozenset(), frozenset({1, frozenset({2})})],
    "slices": [slice(1), slice(1, -2, 3), slice("a", None, 1.5)],
    "ranges": [range(3), range(5, -5, -2)],
    "types": [int, float, str, bytes, list, dict, tuple, set, frozenset, bool, complex],
    "OrderedDict": [collections.OrderedDict(b=1, a=2), collections.OrderedDict()],
    "OrderedDict attributes": attributed(collections.OrderedDict(a=1), _metadata={"v": 1}),
    "defaultdict": [
        collections.defaultdict(None, a=1),
        *[collections.defaultdict(t, a=1) for t in (list, dict, set, int, float, str, tuple, bool)],
    ],
    "deque": [collections.deque([1, [2]]), collections.deque([1, 2], 2), collections.deque()],
    "Counter": [collections.Counter("aab"), collections.Counter()],
    "paths": [
        pathlib.Path("a/../b"),
        pathlib.Path("/x"),
        pathlib.PurePosixPath("a"),
        pathlib.PureWindowsPath("c:\\a"),
    ],
    "datetimes": [
        datetime.datetime(2026, 1, 2, 3, 4, 5, 678901),  # noqa: DTZ001
        datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC, fold=1),
        datetime.datetime.max.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=-3), "X")),
        datetime.date(1, 1, 1),
        datetime.time(23, 59, 59, 999999, fold=1),
        datetime.time(1, tzinfo=UTC),
        datetime.timedelta(-3, 5, 7),
        datetime.timezone(datetime.timedelta(minutes=90)),
    ],
    "numbers": [
        decimal.Decimal("-1.50E+7"),
        decimal.Decimal("Infinity"),
        fractions.Fraction(-1, 3),
        fractions.Fraction(2**80),
    ],
    "UUID": [uuid.UUID(int=2**127 + 5), uuid.UUID(int=3, is_safe=uuid.SafeUUID.safe)],
    "Namespace": argparse.Namespace(a=1, b=[argparse.Namespace()]),
    "SimpleNamespace": types.SimpleNamespace(x=types.SimpleNamespace(y=(1,))),
    "BytesIO": [io.BytesIO(), io.BytesIO(b"\x00\xff"), positioned(io.BytesIO(b"abc"), 3)],
    "small torch": [
        torch.Size(()),
        torch.Size((2, 3)),
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.device("cuda", 1),
        torch.device("cpu"),
        torch.strided,
        torch.sparse_coo,
    ],
    "random": random.Random(7).getstate(),
    "Generator": torch.Generator().manual_seed(3).get_state(),
}


def tensors():
    base = torch.arange(24, dtype=torch.float32)
    complex_ = torch.tensor([1 + 2j, 3j])
    raw = torch.randint(0, 2, (16,), dtype=torch.uint8)
    names = ["uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16"]
    names += ["complex64", "complex128", "uint16", "uint32", "uint64", "float8_e5m2"]
    names += ["float8_e4m3fn"]
    return {
        "plain": base.reshape(2, 3, 4),
        "0-d": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "view at the end": base[24:],
        "views of one storage": [base[3:9].view(2, 3), base[::5], base.view(4, 6).t()],
        "expanded": torch.ones(1).expand(1000, 1000),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "requires_grad": torch.ones(2, requires_grad=True),
        "Parameter": torch.nn.Parameter(torch.randn(3)),
        "frozen Parameter": torch.nn.Parameter(torch.randn(3), requires_grad=False),
        "Parameter attributes": attributed(torch.nn.Parameter(torch.ones(2)), tied=("a", 1)),
        "Buffer": torch.nn.Buffer(torch.ones(2)),
        "attributes": attributed(torch.ones(2), note=[torch.zeros(1)]),
        "conj": complex_.conj(),
        "neg": complex_.conj().imag,
        "meta": torch.empty(2, 3, device="meta"),
        **{name: raw.view(getattr(torch, name)) for name in names},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp": torch.randn(4)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}],
        },
    }


def arrays():
    if np is None:
        return {}
    dtypes = ("?", "i1", "u1", "<i2", ">i2", "<u4", "<i8", ">f8", "<f2", "g", "F", "D")
    field = np.zeros(1, [("a", "f4")])
    return {
        "dtypes": [np.arange(6).astype(d).reshape(2, 3) for d in dtypes],
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "strided": np.arange(12)[::3],
        "0-d and empty": [np.array(3), np.zeros((0, 3)), np.zeros((2, 0), order="F")],
        "texts": [np.array(["ab", "c"]), np.array([b"ab", b""]), np.array("x"), np.zeros(2, "S0")],
        "big-endian text": np.array(["ab"]).astype(">U2"),
        "times": [
            np.array(["2026-01-02"], "M8[ns]"), np.array([5], "m8[25us]"), np.array(["NaT"], "M8"),
        ],
        "structures": [
            np.zeros(2, [("a", "f4"), ("b", ">i8", (2,))]),
            np.zeros(1, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
            np.zeros(1, [("a", [("b", "M8[s]")])]),
        ],
        "void": np.array([b"abc"], "V3"),
        "scalars": [
            np.float32(1.5), np.int64(-1), np.bool_(True), np.str_("ab"), np.bytes_(b"x"),
            np.complex64(1j), np.datetime64("2026-01-01"), np.float16(2), field[0],
        ],
        "dtype objects": [np.dtype(">f8"), np.dtype("U3"), np.dtype([("a", "f4")])],
        "legacy state": np.random.RandomState(3).get_state(),
        "generator state": np.random.default_rng(3).bit_generator.state,
    }  # fmt: skip


OBJECTS = {**PLAIN, **tensors(), **arrays()}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_allowed_objects_come_back_as_stock_reads_them(protocol):
    def check(obj):
        data = saved(obj, pickle_protocol=protocol)
        got = decode(data)
        assert same(got, stock(data))
        again = reencode_byte_item(data, fqn="k", path="p")
        assert again.tell() == 0
        assert same(stock(again.getvalue()), stock(saved(got)))

    check_rows(OBJECTS, check)


def test_views_share_their_storage():
    base = torch.arange(6.0)
    a, b = decode(saved([base[:3], base[3:]]))
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_decoded_memory_is_its_own():
    data = bytearray(saved(torch.ones(4)))
    got = decode(memoryview(data))
    data[:] = bytes(len(data))
    assert got.tolist() == [1.0] * 4


def test_big_endian_archives_are_swapped():
    body = hp.document(hp.tensor_pickle(2))
    data = hp.torch_zip(body, {"data/0": b"\x3f\x80\x00\x00\x40\x00\x00\x00"}, b"big")
    assert decode(data).tolist() == [1.0, 2.0]


def test_storage_of_a_missing_device_comes_to_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    for location in ("cuda:7", "mps", "xpu:1", "hpu", "cuda"):
        body = hp.document(hp.tensor_pickle(2, location=location))
        got = decode(hp.torch_zip(body, {"data/0": bytes(8)}))
        assert got.device == torch.device("cpu")


# ---- The user's own classes ---------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    weights: object
    colour: Colour = Colour.RED


class Stateful:
    def __init__(self):
        self.seen = None

    def __getstate__(self):
        return {"seen": self.seen}

    def __setstate__(self, state):
        self.seen = state["seen"]

    def __eq__(self, other):
        return self.seen == other.seen

    __hash__ = None


class Names(dict):
    pass


class Items(list):
    pass


def rebuild(x):
    return Config(x)


def test_safe_globals_are_built_and_only_for_that_call():
    tensor = torch.arange(3.0)
    config = Config({"t": tensor})
    config.again = config
    data = saved([config, Colour.RED])
    for _ in range(2):
        with pytest.raises(UnsafePickleError) as caught:
            decode(data)
        assert caught.value.global_name == f"{__name__}.Config"
        got, colour = decode(data, safe_globals=[Config, Colour])
        assert type(got) is Config and got.again is got and same(got.weights["t"], tensor)
        assert got.colour is colour is Colour.RED
    again = reencode_byte_item(data, fqn="k", path="p", safe_globals=[Config, Colour])
    assert stock(again.getvalue())[0].weights["t"].tolist() == [0, 1, 2]
    assert Config not in torch.serialization.get_safe_globals()


def test_safe_globals_of_every_shape():
    stateful, names, items = Stateful(), Names(a=1), Items([1, torch.ones(1)])
    stateful.seen, names.extra = torch.ones(2), 5
    data = saved([stateful, names, items, Colour])
    got = decode(data, safe_globals=[Stateful, Names, Items, Colour])
    assert same(got[0].seen, torch.ones(2))
    assert (type(got[1]), got[1], got[1].extra) == (Names, {"a": 1}, 5)
    assert type(got[2]) is Items and same(list(got[2]), list(items))
    assert got[3] is Colour
    call = hp.call(hp.name(__name__, "rebuild"), hp.value([1]))
    assert decode(hp.torch_zip(hp.document(call)), safe_globals=[rebuild]) == Config([1])


def test_enum_of_python_3_11_0_is_read_for_listed_classes_only():
    call = hp.call(hp.name("builtins", "getattr"), hp.name(__name__, "Colour"), hp.text("RED"))
    data = hp.torch_zip(hp.document(call))
    assert decode(data, safe_globals=[Colour]) is Colour.RED
    bad = hp.call(hp.name("builtins", "getattr"), hp.name(__name__, "Colour"), hp.text("mro"))
    with pytest.raises(UnsafePickleError) as caught:
        decode(hp.torch_zip(hp.document(bad)), safe_globals=[Colour])
    assert caught.value.global_name == "builtins.getattr"


def test_listed_classes_cannot_be_patched_or_planted():
    config = hp.name(__name__, "Config")
    for body in (
        hp.state(config, hp.slots(__init__=1)),
        hp.state(config, hp.value({"x": 1})),
        hp.state(hp.new(config), hp.value({"__reduce_ex__": "os"})),
        hp.state(hp.new(config), hp.slots(__class__="os")),
        hp.state(hp.name(__name__, "rebuild"), hp.slots(__defaults__=(1,))),
    ):
        with pytest.raises(CorruptionError):
            decode(hp.torch_zip(hp.document(body)), safe_globals=[Config, rebuild])
    assert rebuild.__defaults__ is None


PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@hypothesis.given(PLAIN_VALUES, st.sampled_from([2, 4]))
def test_any_plain_value_comes_back(value, protocol):
    data = saved(value, pickle_protocol=protocol)
    assert same(decode(data), stock(data))
