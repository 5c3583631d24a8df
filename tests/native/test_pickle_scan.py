"""The pickle walk: real pickles pass to the last byte, hostile ones are refused."""

from __future__ import annotations

import collections
import contextlib
import io
import pickle
import pickletools
import zipfile
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from torch_dcpx import _C, errors


class Plain:
    """A class of our own, for the opcodes that build objects."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Frozen(tuple[Any, ...]):
    """Pickled by NEWOBJ with arguments."""


def shared() -> list[Any]:
    inner = ["a", 1]
    return [inner, inner, (inner, inner)]


def recursive() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


VALUES: dict[str, Any] = {
    "none": None,
    "numbers": [0, 1, -1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -(2**31), 2**63, 2**2000, 1.5],
    "texts": ["", "x", "\u00e9\n\\", "y" * 300, b"", b"z" * 300, bytearray(b"w")],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "dicts": {"a": {}, ("b", 1): {"c": [1, 2]}, "d": collections.OrderedDict(e=1)},
    "sets": [set(), {1, 2}, frozenset(), frozenset({(1, 2)})],
    "objects": [Plain(Plain(1)), Frozen((1, 2)), 1j, slice(1, 2), torch.Size([1, 2])],
    "shared": shared(),
    "recursive": recursive(),
    "long": list(range(5000)),
    "wide": {i: str(i) for i in range(3000)},
    "globals": [Plain, len, collections.OrderedDict, torch.float32],
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_real_pickle_stops_at_its_last_byte(protocol: int) -> None:
    for name, value in VALUES.items():
        data = pickle.dumps(value, protocol)
        slow = io.BytesIO()
        pickle._Pickler(slow, protocol).dump(value)  # the pickler in Python
        for whole in (data, slow.getvalue(), pickletools.optimize(data)):
            assert _C.scan_pickle(whole) == len(whole), name
            assert _C.scan_pickle(whole + b"trailer") == len(whole), name


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.tuples(inner, inner)
        | st.frozensets(st.integers())
    ),
)


@hypothesis.given(value=JSON_LIKE, protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_any_pickle_passes_and_no_truncation_does(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert _C.scan_pickle(data) == len(data)
    for nbytes in {0, 1, len(data) // 2, len(data) - 1}:
        with pytest.raises(errors.CorruptionError):
            _C.scan_pickle(data[:nbytes])


@hypothesis.given(data=st.binary(max_size=200))
def test_any_bytes_either_stop_inside_or_raise_corruption(data: bytes) -> None:
    try:
        stop = _C.scan_pickle(data)
    except errors.CorruptionError as error:
        at = error.offset
    else:
        at = stop - 1
        assert data[at : at + 1] == b"."
    assert at is not None
    assert 0 <= at <= len(data)


class NoGlobals(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError("no globals")


@hypothesis.given(data=st.binary(max_size=60), tail=st.sampled_from([b".", b"N.", b"t.", b"e."]))
def test_what_passes_does_not_exhaust_the_unpickler(data: bytes, tail: bytes) -> None:
    try:
        stop = _C.scan_pickle(data + tail)
    except errors.CorruptionError:
        return
    # It may object to types and names, with any error but this one; dying would end the run.
    has_run_out = False
    with contextlib.suppress(Exception):
        try:
            NoGlobals(io.BytesIO((data + tail)[:stop])).load()
        except MemoryError:
            has_run_out = True
    assert not has_run_out


def test_persistent_ids_pass_only_on_request() -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        data = archive.read("archive/data.pkl")
    assert _C.scan_pickle(data, allow_persid=True) == len(data)
    assert _C.scan_pickle(b"Pid\n.", allow_persid=True) == 5
    for refused in (data, b"Pid\n.", b"NQ."):
        with pytest.raises(errors.CorruptionError):
            _C.scan_pickle(refused)


MAX32, MAX64 = b"\xff\xff\xff\xff", b"\xff" * 8
# A class and 10,000 arguments for it, in the memo.
CALLED = b"cos\nname\nq\0" + b"0(" + b"N" * 10_000 + b"tq\1" + b"0"
HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "no stop": b"N",
    "stop on an empty stack": b".",
    "stop above a mark": b"N(.",
    "unknown opcode": b"\xf0N.",
    "protocol 6": b"\x80\x06N.",
    "unicode beyond the end": b"X\x05\x00\x00\x00abc.",
    "unicode of 4 GiB": b"X" + MAX32 + b".",
    "unicode8 of 16 EiB": b"\x8d" + MAX64 + b".",
    "bytes8 of 8 EiB": b"\x8e" + b"\xff" * 7 + b"\x7f.",
    "bytearray8 of 1 TiB": b"\x96\x00\x00\x00\x00\x00\x01\x00\x00.",
    "bytes of 4 GiB": b"B" + MAX32 + b".",
    "string of a negative length": b"T" + MAX32 + b".",
    "long of a negative length": b"\x8b" + MAX32 + b".",
    "long of 2 KiB": b"\x8b\x00\x08\x00\x00" + bytes(2048) + b".",
    "long in 2 KiB of digits": b"L" + b"9" * 2048 + b"L\n.",
    "int in 2 KiB of digits": b"I" + b"9" * 2048 + b"\n.",
    "float in 2 KiB of digits": b"F" + b"9" * 2048 + b"\n.",
    "line without end": b"Vabc",
    "global of one line": b"cos\nsystem",
    "frame beyond the end": b"\x95\x05\x00\x00\x00\x00\x00\x00\x00N.",
    "frame of 16 EiB": b"\x95" + MAX64 + b"N.",
    "memo bomb": b"Nr" + b"\x00\x00\x00\x80.",
    "memo bomb in text": b"Np2147483648\n.",
    "memo bomb of ten digits": b"Np9999999999\n.",
    "memo index of a billion digits": b"Np" + b"1" * 50 + b"\n.",
    "memo index with a sign": b"Np-1\n.",
    "memo index with an underscore": b"Np1_0\n.",
    "memo index of nothing": b"Np\n.",
    "memo just beyond the slack": b"Nr" + (1024).to_bytes(4, "little") + b".",
    "memo put on an empty stack": b"q\x00N.",
    "memoize on an empty stack": b"\x94N.",
    "memo get of what was never put": b"h\x00.",
    "memo get in a gap": b"Nq\x05h\x04.",
    "memo get in text of what was never put": b"g7\n.",
    "long memo get beyond": b"j" + MAX32 + b".",
    "marks": b"(" * 1001 + b"N.",
    "tuples": b")" + b"\x85" * 1000 + b".",
    "lists": b"]" * 1001 + b"a" * 1000 + b".",
    "lists by appends": b"](" * 999 + b"](](N" + b"e" * 1001 + b".",
    "tuples through the memo": b")q\x00" + b"0h\x00\x85q\x00" * 1001 + b".",
    "pop of nothing": b"0N.",
    "pop_mark of no mark": b"N1N.",
    "dup of nothing": b"2.",
    "dup above a mark": b"N(2.",
    "tuple of no mark": b"Nt.",
    "tuple2 of one": b"N\x86.",
    "tuple1 across a mark": b"N(\x85.",
    "append to nothing": b"Na.",
    "append across a mark": b"](Na.",
    "appends without mark": b"]Ne.",
    "appends without list": b"(Ne.",
    "setitem of one": b"}Ns.",
    "setitems of an odd count": b"}(Nu.",
    "dict of an odd count": b"(Nd.",
    "build of nothing": b"Nb.",
    "reduce of one": b"NR.",
    "newobj of one": b"N\x81.",
    "newobj_ex of two": b"NN\x92.",
    "stack_global of one": b"N\x93.",
    "obj without class": b"(o.",
    "obj without mark": b"No.",
    "inst without mark": b"ios\nsystem\n.",
    "extension code": b"\x82\x01.",
    "extension code of 2 bytes": b"\x83\x01\x00.",
    "extension code of 4 bytes": b"\x84\x01\x00\x00\x00.",
    "next buffer": b"\x97.",
    "readonly buffer": b"N\x98.",
    "key that explodes": b"}" + b")" + b"2\x86" * 40 + b"Ns.",
    "member that explodes": b"\x8f(" + b")" + b"2\x86" * 40 + b"\x90.",
    "frozenset that explodes": b"()" + b"2\x86" * 40 + b"\x91.",
    "keys of a dict that explode": b"()" + b"2\x86" * 40 + b"Nd.",
    "key in the memo that explodes": b")" + b"2\x86" * 40 + b"q\x000}(h\x00Nu.",
    "arguments of many calls": CALLED + b"h\0h\1R0" * 150 + b"N.",
    "arguments of many objects": CALLED + b"h\0h\1\x810" * 150 + b"N.",
    "names of many arguments": CALLED + b"h\0)h\1\x920" * 150 + b"N.",
    "arguments that grow in the memo": (b"N]q\1(" + b"N" * 10_000 + b"e0" + b"Nh\1R0" * 150 + b"."),
}


def test_hostile_pickle_raises_corruption() -> None:
    places = {}
    for name, data in HOSTILE.items():
        try:
            places[name] = f"stops at {_C.scan_pickle(data)}"
        except errors.CorruptionError as error:
            places[name] = error.offset
    wrong = {name for name, at in places.items() if at not in range(len(HOSTILE[name]) + 1)}
    assert wrong == set(), places


def test_neighbours_of_the_hostile_pass() -> None:
    for data in (
        b"(" * 999 + b"N" + b"t" * 999 + b".",
        b")" + b"\x85" * 999 + b".",
        b"Nr" + (1023).to_bytes(4, "little") + b".",
        b"\x8b\x00\x04\x00\x00" + bytes(1024) + b".",
        b"\x80\x05N.",
        b"N(0.",  # POP takes the mark
        b"N(NN1.",
        b"}" + b")" + b"2\x86" * 10 + b"Ns.",
        b"\x95\x02\x00\x00\x00\x00\x00\x00\x00N.",
        CALLED + b"h\0h\1R0" * 100 + b"N.",
        (b"N(" + b"N" * 10_000 + b"tR0") * 200 + b"N.",  # each with its own
    ):
        assert _C.scan_pickle(data) == len(data)


def test_limits_are_arguments_and_hold_to_the_last_unit() -> None:
    for limits, passes, fails in (
        ({"max_ops": 3}, b"NN.", b"NNN."),
        ({"max_bytes": 2}, b"N.", b"NN."),
        ({"max_depth": 2}, b")\x85.", b")\x85\x85."),
    ):
        assert _C.scan_pickle(passes, **limits) == len(passes), limits
        with pytest.raises(errors.CorruptionError):
            _C.scan_pickle(fails, **limits)


def test_list_that_grows_through_the_memo_counts_with_its_new_depth() -> None:
    # A list in the memo, made 2 deep there, fetched and wrapped: 3 deep.
    data = b"]q\x00)\x85a0h\x00\x85."
    assert _C.scan_pickle(data, max_depth=4) == len(data)
    with pytest.raises(errors.CorruptionError):
        _C.scan_pickle(data, max_depth=3)
