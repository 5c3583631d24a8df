"""Are Python values of several ranks equal? Compares hashes of the values.

Pickles of equal values differ: by the order of a set, by which strings are one object. So this
module walks the values, of exact types that it knows: that runs no code of a user and changes
nothing. Any other value, and any that holds one, has no digest and is not compared: a tensor, an
object of a user's class (unless it is a dataclass that leaves pickling as it is), a string, bytes
or an array above 1 MiB (which would take long), a value that is too deep or holds itself, and all
after the first 100,000 values of a state (each KiB counts as one).
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import hashlib
import logging
import pathlib
import struct
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from torch_dcpx._text import counted
from torch_dcpx.errors import PlanError

logger = logging.getLogger("torch_dcpx")

_MAX_VALUES = 100_000  # looked at in one state: 0.2 s
_MAX_DEPTH = 100
_MAX_BYTES = 1 << 20  # of one string, bytes or array
_BYTES_A_VALUE = 1024  # hashed in the time of one value

_SEQUENCES = frozenset((list, tuple, collections.deque, torch.Size))
_SETS = frozenset((set, frozenset))
_MAPPINGS = frozenset((dict, collections.OrderedDict, collections.defaultdict, collections.Counter))
_FUNCTIONS = frozenset((type, types.FunctionType, types.BuiltinFunctionType))
# A class with one of these decides itself what is stored of its objects.
_PICKLING = frozenset(("__getstate__", "__reduce__", "__reduce_ex__", "__getnewargs_ex__"))
_TORCH_NAMES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
_ARRAY_KINDS = "biufcSUmM"  # all but objects and structures
_MAX_SHOWN = 5

VALUES, TENSORS = "Python values", "tensors"
_PER_RANK = "or in a manager's state a PerRank"
_WAYS = {  # out of a conflict, beside other names
    VALUES: ", or the same value",
    TENSORS: f", the same contents, {_PER_RANK}",
}


class _UnknownError(Exception):
    """A value that has no digest."""


def _float(value: float) -> bytes:
    """Equal floats have equal bytes, and all NaN: their sign depends on who made them."""
    return b"nan" if value != value else struct.pack("<d", value + 0.0)


def _decimal(value: decimal.Decimal) -> bytes:
    if sys.getsizeof(value) > _MAX_BYTES:
        raise _UnknownError
    sign, digits, exponent = value.as_tuple()
    if isinstance(exponent, str):
        return exponent.encode()
    text = "".join(map(str, digits)).lstrip("0")
    if not text:
        return b"0"
    kept = text.rstrip("0")
    return f"{sign} {kept} {exponent + len(text) - len(kept)}".encode()


def _time(value: datetime.time) -> bytes:
    return value.replace(tzinfo=None).isoformat().encode()


def _text(value: Any) -> bytes:
    return str(value).encode("utf-8", "surrogatepass")


# The bytes to hash of a value without parts.
_LEAVES: dict[type, Callable[[Any], bytes | bytearray]] = {
    type(None): lambda _: b"",
    type(...): lambda _: b"",
    bool: lambda value: b"1" if value else b"0",
    int: lambda value: hex(value).encode(),
    float: _float,
    complex: lambda value: _float(value.real) + b" " + _float(value.imag),
    **dict.fromkeys((str, *_TORCH_NAMES, *_PATHS), _text),
    bytes: lambda value: value,
    bytearray: lambda value: value,
    decimal.Decimal: _decimal,
    datetime.date: lambda value: value.isoformat().encode(),
    datetime.timedelta: lambda value: repr(value).encode(),
    datetime.timezone: lambda value: repr(value.utcoffset(None)).encode(),
    uuid.UUID: lambda value: hex(value.int).encode(),
}


class _Walk:
    """Over the values of one state."""

    def __init__(self) -> None:
        self._left = _MAX_VALUES
        self._path: set[int] = set()  # ids of the values that hold the one at hand

    def digest_of(self, value: Any) -> bytes:
        """Returns the digest of a value; b"" if it has none."""
        self._path.clear()
        try:
            return self._digest(value)
        except Exception:  # noqa: BLE001  (a value that another thread changes meanwhile)
            return b""

    def _digest(self, value: Any) -> bytes:
        kind = type(value)
        self._count(0)
        leaf = _LEAVES.get(kind)
        if leaf is not None:
            self._count(_size_of(value))
            return _hashed(kind.__name__, [leaf(value)])
        if kind in _FUNCTIONS:
            return _hashed("global", [f"{value.__module__}.{value.__qualname__}".encode()])
        if id(value) in self._path or len(self._path) >= _MAX_DEPTH:
            raise _UnknownError
        self._path.add(id(value))
        try:
            return self._whole(kind, value)
        finally:
            self._path.discard(id(value))

    def _whole(self, kind: type, value: Any) -> bytes:
        """Returns the digest of a value with parts."""
        if kind in _SEQUENCES:
            return _hashed(kind.__name__, map(self._digest, value))
        if kind in _SETS:
            return _hashed(kind.__name__, sorted(map(self._digest, value)))
        if kind in _MAPPINGS:
            return _hashed(kind.__name__, self._pairs(value))
        if kind in (datetime.datetime, datetime.time):
            return _hashed(kind.__name__, [_time(value), self._digest(value.tzinfo)])
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind is argparse.Namespace:
            return _hashed(name, self._pairs(vars(value)))
        if issubclass(kind, enum.Enum):
            return _hashed(name, [object.__getattribute__(value, "_name_").encode()])
        if kind.__module__ == "numpy":
            return _hashed(name, self._array(kind, value))
        if _leaves_pickling(kind):
            if "_fields" in vars(kind) and kind.__bases__ == (tuple,):  # a named tuple
                return _hashed(name, map(self._digest, tuple.__iter__(value)))
            if "__dataclass_fields__" in vars(kind):
                return _hashed(name, self._pairs(object.__getattribute__(value, "__dict__")))
        raise _UnknownError

    def _pairs(self, mapping: Mapping[Any, Any]) -> list[bytes]:
        return sorted(self._digest(key) + self._digest(value) for key, value in mapping.items())

    def _array(self, kind: type, value: Any) -> list[bytes]:
        """Returns the bytes to hash of a numpy array or scalar."""
        numpy: Any = sys.modules["numpy"]
        if kind is not numpy.ndarray and kind not in numpy.sctypeDict.values():
            raise _UnknownError
        dtype = value.dtype
        real_size = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
        # Some bytes of a long double belong to no number.
        if dtype.kind not in _ARRAY_KINDS or (dtype.kind in "fc" and real_size > 8):
            raise _UnknownError
        self._count(value.nbytes)
        array = numpy.array(value, order="C")
        if dtype.kind in "fc":
            parts = array.reshape(-1).view(f"{dtype.byteorder}f{real_size}")
            parts += 0  # makes -0 0
            parts[parts != parts] = numpy.nan
        return [dtype.str.encode(), repr(array.shape).encode(), array.tobytes()]

    def _count(self, nbytes: int) -> None:
        if nbytes > _MAX_BYTES:
            raise _UnknownError
        self._left -= nbytes // _BYTES_A_VALUE if nbytes else 1
        if self._left < 0:
            raise _UnknownError


def _size_of(value: Any) -> int:
    """Returns about how many bytes of a value without parts are hashed."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    return value.bit_length() // 4 if isinstance(value, int) else 0


def _leaves_pickling(kind: type) -> bool:
    """Returns whether a class leaves the pickling of its objects to Python."""
    bases = (base for base in kind.__mro__ if base not in (object, tuple))
    return all(_PICKLING.isdisjoint(vars(base)) for base in bases)


def _hashed(kind: str, parts: Iterable[bytes | bytearray]) -> bytes:
    whole = hashlib.blake2b(kind.encode(), digest_size=8)
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.digest()


def digests_of(objects: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the digests of a state's Python values by name, as far as they have any: 8 bytes,
    the same for equal values of equal types on any rank.
    """
    walk = _Walk()
    return {name: digest for name, value in objects.items() if (digest := walk.digest_of(value))}


def shared_digests(objects: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns `digests_of` these values if other ranks can compare them, else none."""
    dist = torch.distributed
    has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return digests_of(objects) if has_others else {}


def conflicting_names(digests: Iterable[Mapping[str, bytes]]) -> dict[str, list[int]]:
    """Returns the names whose values differ, and the first rank of each of their values. The
    digests are those of each rank, by the names of its values.
    """
    ranks_of: dict[str, dict[bytes, int]] = {}
    before: Mapping[str, bytes] | None = None
    for rank, own in enumerate(digests):
        if own == before:  # nearly always: all ranks have the same values
            continue
        before = own
        for name, digest in own.items():
            ranks_of.setdefault(name, {}).setdefault(digest, rank)
    return {name: sorted(own.values()) for name, own in ranks_of.items() if len(own) > 1}


def report_conflicts(
    digests: Iterable[Mapping[str, bytes]], on_conflict: str, logged: set[str]
) -> set[str]:
    """Returns the names of `conflicting_names`; logs or raises as `report_differing`."""
    return report_differing(conflicting_names(digests), VALUES, on_conflict, logged)


def report_differing(
    found: Mapping[str, list[int]], what: str, on_conflict: str, logged: set[str]
) -> set[str]:
    """Returns the names of what differs, given with the first rank of each sort; logs them if some
    are not `logged` yet.

    `what` is VALUES or TENSORS. Raises PlanError: some differ, with `on_conflict="error"`; else it
    is "warn".
    """
    is_error = on_conflict == "error"
    if not found or (logged.issuperset(found) and not is_error):
        return set(found)
    shown = ", ".join(
        f"'{name}' (ranks {', '.join(map(str, ranks[:_MAX_SHOWN]))} of the group)"
        for name, ranks in list(found.items())[:_MAX_SHOWN]
    )
    more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    text = (
        f"{len(found)} {what} differ over the ranks under one name, of which a checkpoint "
        f"keeps one: {shown}{more}; give each rank a name of its own{_WAYS[what]}"
    )
    if is_error:
        raise PlanError(text, fqn=next(iter(found)))
    logger.warning("%s; the lowest rank's is kept", text)
    logged.update(found)
    return set(found)


def report_nested(
    paths: Sequence[Mapping[str, tuple[Any, ...]]], on_conflict: str, logged: set[str]
) -> None:
    """Logs once each name that is a value on one rank and holds other names on another.

    `paths` are those of each rank's names. Raises PlanError: with `on_conflict="error"`.
    """
    names: dict[tuple[Any, ...], str] = {}
    for own in paths:
        names.update((path, name) for name, path in own.items())
    found = {
        names[path[:end]]: name
        for path, name in names.items()
        for end in range(1, len(path))
        if path[:end] in names
    }
    if not found or (logged.issuperset(found) and on_conflict != "error"):
        return
    ranks = {name: rank for rank, own in reversed(list(enumerate(paths))) for name in own}
    shown = "; ".join(
        f"'{name}' is a value on rank {ranks[name]} of the group and holds '{within}' on rank "
        f"{ranks[within]}"
        for name, within in list(found.items())[:_MAX_SHOWN]
    )
    text = (
        f"{counted(len(found), 'name')} of values on one rank hold other names on another: {shown};"
        " a checkpoint keeps both, and a manager's strict resume refuses it; give each rank a name "
        f"of its own, {_PER_RANK}"
    )
    if on_conflict == "error":
        raise PlanError(text, fqn=next(iter(found)))
    logger.warning("%s", text)
    logged.update(found)
