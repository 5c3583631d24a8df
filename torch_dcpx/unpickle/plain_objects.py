"""The plain Python classes a byte item may hold, each built from exactly checked arguments.

    builtins        None bool int float complex str bytes bytearray list tuple dict set frozenset
                    slice range Ellipsis; the bare types themselves
    collections     OrderedDict defaultdict (no factory, or a builtin type) deque Counter
    pathlib         PurePath PurePosixPath PureWindowsPath Path PosixPath; a
                    WindowsPath as PureWindowsPath
    datetime        datetime date time timedelta timezone
    numbers         decimal.Decimal fractions.Fraction uuid.UUID
    attributes      argparse.Namespace types.SimpleNamespace
    memory files    io.BytesIO (trainers keep histories of losses in one)

A constructor that could compute or allocate more than the pickle's size (`bytes(10**12)`,
`list(range(10**12))`, `Fraction("1e999999999")`) gets only what pickle itself writes.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import pathlib
import re
import types
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from torch_dcpx.unpickle.settle import (
    Settler,
    build_enum_member,
    check_attributes,
    checked_args,
    never_called,
    no_more_than,
    refuse,
)
from torch_dcpx.unpickle.stand_ins import (
    EMPTY,
    GlobalTable,
    StandIn,
    brief,
    stand_in,
    with_python2_names,
)

_FACTORIES = (bool, bytes, dict, float, int, list, set, str, tuple)
# What a path is built as: no system but Windows makes a WindowsPath.
_PATH_KINDS = {
    "Path": pathlib.Path,
    "PosixPath": pathlib.PosixPath,
    "PurePath": pathlib.PurePath,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
    "WindowsPath": pathlib.PureWindowsPath,
}
# CPython 3.13 pickles paths under the private name.
PATHS = {(m, n): kind for m in ("pathlib", "pathlib._local") for n, kind in _PATH_KINDS.items()}
_SCALARS = (type(None), bool, int, float, str)
_FRACTION = re.compile(r"-?[0-9]+(/[0-9]+)?\Z")  # no exponent: "1e999999999" would be computed


def _arguments(
    raw: StandIn, settle: Settler, *kinds: type | tuple[type, ...], least: int | None = None
) -> tuple[Any, ...]:
    """Settles and checks the arguments of a plain call."""
    no_more_than(raw)
    return checked_args(raw, settle(raw.args), *kinds, least=least)


def _calls(
    target: Callable[..., Any], *kinds: type | tuple[type, ...], least: int | None = None
) -> Callable[[StandIn, Settler], Any]:
    """Builds by a call of `target` with such `checked_args`."""

    def build(raw: StandIn, settle: Settler) -> Any:
        return target(*_arguments(raw, settle, *kinds, least=least))

    return build


def _set_of(kind: type) -> Callable[[StandIn, Settler], Any]:
    """Builds a set or frozenset of one list or tuple: how protocols 2 and 3 write them."""

    def build(raw: StandIn, settle: Settler) -> Any:
        args = _arguments(raw, settle, (list, tuple), least=0)
        settle.keys(*args or ((),))
        return kind(*args)

    return build


def _encode_latin1(raw: StandIn, settle: Settler) -> bytes:
    """Builds `_codecs.encode(text, "latin1")`: how protocol 2 writes bytes."""
    text, encoding = _arguments(raw, settle, str, str)
    if encoding not in ("latin1", "latin-1"):
        refuse(f"encodes bytes as {encoding!r}")
    return bytes(text.encode("latin-1"))


def _bytearray(raw: StandIn, settle: Settler) -> bytearray:
    args = _arguments(raw, settle, (str, bytes), str, least=0)
    if args and type(args[0]) is str:
        if args[1:] not in (("latin-1",), ("latin1",)):
            refuse(f"encodes a bytearray as {args[1:]!r}")
        return bytearray(args[0], "latin-1")
    return bytearray(*args)


def _fraction(*args: Any) -> fractions.Fraction:
    if type(args[0]) is str and (len(args) > 1 or not _FRACTION.match(args[0])):
        refuse("calls Fraction with a text that it would not write")
    return fractions.Fraction(*args)


def _instance_attributes(raw: StandIn, settle: Settler, made: Any) -> None:
    if raw.state is EMPTY or raw.state is None:
        return
    if not hasattr(made, "__dict__"):
        refuse(f"sets attributes of a {raw.global_name}")
    if type(raw.state) is not dict:
        refuse(f"sets a {raw.global_name} to a state of type {type(raw.state).__name__}")
    state = settle(raw.state)
    check_attributes(state, raw.global_name, type(made))
    vars(made).update(state)


def _attributes_of(make: Callable[[], Any]) -> Callable[[StandIn, Settler], Any]:
    """Builds an object that is nothing but its attributes."""

    def build(raw: StandIn, settle: Settler) -> Any:
        no_more_than(raw, state=True)
        if raw.args:
            refuse(f"calls {raw.global_name} with arguments")
        made = make()
        settle.remember(raw, made)
        _instance_attributes(raw, settle, made)
        return made

    return build


def _container_of(make: Callable[..., Any]) -> Callable[[StandIn, Settler], Any]:
    """Builds a dict or deque: `make` gets settled arguments, then come elements and attributes."""

    def build(raw: StandIn, settle: Settler) -> Any:
        no_more_than(raw, state=True, elements=make is _deque, pairs=make is not _deque)
        args = settle(raw.args)
        if make is _ordered_dict and args and type(args[0]) in (list, tuple):
            settle.keys([pair[0] for pair in args[0]])
        made = make(*args)
        settle.remember(raw, made)
        for element in raw.elements or ():
            made.append(settle(element))
        pairs = [(settle(key), value) for key, value in raw.pairs or ()]
        settle.keys([key for key, _ in pairs])
        for key, value in pairs:
            made[key] = settle(value)
        _instance_attributes(raw, settle, made)
        return made

    return build


def _dict(*args: Any) -> dict[Any, Any]:
    if args:
        refuse("calls dict with arguments, which no pickle of one does")
    return {}


def _ordered_dict(pairs: Any = ()) -> collections.OrderedDict[Any, Any]:
    if type(pairs) not in (tuple, list):
        refuse(f"calls OrderedDict with a {type(pairs).__name__}")
    return collections.OrderedDict(pairs)


def _counter(counts: Any = None) -> collections.Counter[Any]:
    if counts is not None and type(counts) is not dict:
        refuse(f"calls Counter with a {type(counts).__name__}")
    return collections.Counter(counts)


def _default_dict(factory: Any = None) -> collections.defaultdict[Any, Any]:
    # By identity: `in` would ask a user's class for __eq__.
    if factory is not None and not any(factory is known for known in _FACTORIES):
        refuse("calls defaultdict with a factory that is no builtin type")
    return collections.defaultdict(factory)


def _deque(elements: Any = (), maxlen: Any = None) -> collections.deque[Any]:
    if type(elements) not in (tuple, list) or type(maxlen) not in (type(None), int):
        refuse("calls deque with what is no sequence and length")
    return collections.deque(elements, maxlen)


# datetime's own constructor takes these bytes with hardly a check (day 255, hour 127); so they are
# taken apart here, and the constructor that checks every field is called.
def _stored_day(data: bytes) -> tuple[int, int, int]:
    return data[0] * 256 + data[1], data[2] & 0x7F, data[3]


def _stored_clock(data: bytes) -> tuple[int, int, int, int]:
    return data[0] & 0x7F, data[1], data[2], int.from_bytes(data[3:6], "big")


def _date(data: bytes) -> datetime.date:
    if len(data) != 4:
        refuse("calls date with other than 4 bytes")
    return datetime.date(*_stored_day(data))


def _datetime(data: bytes, zone: datetime.timezone | None = None) -> datetime.datetime:
    if len(data) != 10:
        refuse("calls datetime with other than 10 bytes")
    day, clock, fold = _stored_day(data), _stored_clock(data[4:]), data[2] >> 7
    return datetime.datetime(*day, *clock, zone, fold=fold)  # noqa: DTZ001


def _time(data: bytes, zone: datetime.timezone | None = None) -> datetime.time:
    if len(data) != 6:
        refuse("calls time with other than 6 bytes")
    return datetime.time(*_stored_clock(data), zone, fold=data[0] >> 7)


def _uuid(raw: StandIn, settle: Settler) -> uuid.UUID:
    no_more_than(raw, state=True)
    state = settle(raw.state) if type(raw.state) is dict else {}
    if raw.args or not set(state) <= {"int", "is_safe"} or type(state.get("int")) is not int:
        refuse("builds a UUID of other than its number")
    safety = uuid.SafeUUID(state.get("is_safe", uuid.SafeUUID.unknown.value))
    return uuid.UUID(int=state["int"], is_safe=safety)


def _bytes_io(raw: StandIn, settle: Settler) -> io.BytesIO:
    no_more_than(raw, state=True)
    state: tuple[Any, ...] = settle(raw.state) if type(raw.state) is tuple else ()
    if raw.args or len(state) != 3 or state[2] is not None:
        refuse("builds a BytesIO of other than its bytes and position")
    data, position, _ = state
    # From a position beyond the end, the owner's next write would fill the gap with zeros.
    if type(data) is not bytes or type(position) is not int or not 0 <= position <= len(data):
        refuse(f"builds a BytesIO of a {type(data).__name__} at {brief(position)}")
    made = io.BytesIO(data)
    made.seek(position)
    return made


def path_text(kind: type[pathlib.PurePath]) -> Callable[[StandIn, Settler], str]:
    """Builds the text of a path of this kind."""
    pure = pathlib.PureWindowsPath if kind is pathlib.PureWindowsPath else pathlib.PurePosixPath

    def build(raw: StandIn, settle: Settler) -> str:
        return str(pure(*_path_parts(raw, settle)))

    return build


def _path_parts(raw: StandIn, settle: Settler) -> Sequence[str]:
    """Returns the texts of a path, charged before they are joined: one may be there very often."""
    parts: Sequence[str] = _arguments(raw, settle, *[str] * len(raw.args))
    settle.charge(sum(map(len, parts)))
    return parts


def _path(cls: type[pathlib.PurePath]) -> Callable[[StandIn, Settler], Any]:
    # Making a Path never touches the disk; only text may be joined to one.
    def build(raw: StandIn, settle: Settler) -> Any:
        return cls(*_path_parts(raw, settle))

    return build


_UNCALLED = ("bool", "float", "int", "list", "str", "tuple")
_BUILDS: dict[tuple[str, str], Callable[[StandIn, Settler], Any]] = {
    ("_codecs", "encode"): _encode_latin1,
    ("_io", "BytesIO"): _bytes_io,
    ("argparse", "Namespace"): _attributes_of(argparse.Namespace),
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "bytes"): _calls(bytes),  # protocol 2: the empty one
    ("builtins", "complex"): _calls(complex, float, float),
    ("builtins", "dict"): _container_of(_dict),  # how subclasses are pickled as plain dicts
    ("builtins", "frozenset"): _set_of(frozenset),
    ("builtins", "getattr"): build_enum_member,
    ("builtins", "range"): _calls(range, int, int, int),
    ("builtins", "set"): _set_of(set),
    ("builtins", "slice"): _calls(slice, _SCALARS, _SCALARS, _SCALARS),
    **{("builtins", name): never_called for name in _UNCALLED},
    ("collections", "Counter"): _container_of(_counter),
    ("collections", "OrderedDict"): _container_of(_ordered_dict),
    ("collections", "defaultdict"): _container_of(_default_dict),
    ("collections", "deque"): _container_of(_deque),
    ("datetime", "date"): _calls(_date, bytes),
    ("datetime", "datetime"): _calls(_datetime, bytes, datetime.timezone, least=1),
    ("datetime", "time"): _calls(_time, bytes, datetime.timezone, least=1),
    ("datetime", "timedelta"): _calls(datetime.timedelta, int, int, int),
    ("datetime", "timezone"): _calls(datetime.timezone, datetime.timedelta, str, least=1),
    ("decimal", "Decimal"): _calls(decimal.Decimal, str),
    ("fractions", "Fraction"): _calls(_fraction, (int, str), int, least=1),
    ("types", "SimpleNamespace"): _attributes_of(types.SimpleNamespace),
    ("uuid", "UUID"): _uuid,
    **{key: _path(kind) for key, kind in PATHS.items()},
}

_VALUES = {("builtins", t.__name__): t for t in (*_FACTORIES, bytearray, complex, frozenset)}

PLAIN: GlobalTable = with_python2_names(
    {("builtins", "Ellipsis"): ...}
    | {
        key: stand_in(".".join(key), build, _VALUES.get(key, EMPTY))
        for key, build in _BUILDS.items()
    }
)
