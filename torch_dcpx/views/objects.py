"""Python objects of two checkpoints: where they differ first, and short texts of them.

No code of a user's class runs but for objects that a reader was told to make (`safe_globals`).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import pickle
import reprlib
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torch_dcpx._text import printable

_MOST_CHARS = 60
# Of these modules no value holds others, or it prints few of them.
_LEAVES_OF = frozenset(
    ("builtins", "datetime", "decimal", "fractions", "numpy", "pathlib", "torch", "uuid")
)
_KINDS_OF_BYTES = "biufcSU"  # of numpy: equal values of one shape and dtype have equal bytes
_ABSENT = object()  # stands where one side has nothing


class Tolerance(NamedTuple):
    """Bounds the gap of two floats: |a - b| <= atol + rtol * |b|, as of `torch.isclose`."""

    rtol: float = 0.0
    atol: float = 0.0

    def __bool__(self) -> bool:
        return self.rtol > 0 or self.atol > 0

    def takes(self, a: float, b: float) -> bool:
        """Returns whether two floats are equal: the same bits, two NaNs, or near enough."""
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        if a == b:
            return bool(self) or math.copysign(1, a) == math.copysign(1, b)
        return math.isfinite(a - b) and abs(a - b) <= self.atol + self.rtol * abs(b)


class Place(NamedTuple):
    """The first place where two objects differ."""

    path: str  # such as "['betas'][0]"; empty: they are no containers
    a: str
    b: str


def first_difference(a: Any, b: Any, tolerance: Tolerance) -> Place | None:
    """Returns where two objects differ first; None if they are equal.

    They are equal if their classes and values are, at every place: the keys 1 and True differ, and
    so do the orders of OrderedDicts, but not those of plain dicts. A NaN equals a NaN. What can
    not be compared differs.
    """
    seen: set[tuple[int, int]] = set()  # containers may hold themselves, or one thing many times
    left = [("", iter([(_ABSENT, a, b)]))]  # one walk a level: of a long list no more is held
    while left:
        path, pairs = left[-1]
        for key, one, two in pairs:
            if one is two or (id(one), id(two)) in seen:
                continue
            parts = _parts(one, two)
            if parts is not None:
                seen.add((id(one), id(two)))
                left.append((_joined(path, _step(key, one)), parts))
                break
            if not _are_equal(one, two, tolerance):
                return Place(_joined(path, _step(key, one)), short(one), short(two))
        else:
            left.pop()
    return None


def _step(key: Any, value: Any) -> str:
    """Returns how one gets to a part of a container; nothing leads to the whole."""
    if key is _ABSENT:
        return ""
    return ".keys()" if type(value) is _Order else f"[{short(key)}]"


def _joined(path: str, step: str) -> str:
    whole = path + step
    return whole if len(whole) <= _MOST_CHARS else f"...{whole[3 - _MOST_CHARS :]}"


def short(value: Any, most: int = _MOST_CHARS) -> str:
    """Returns a value as one line of at most so many characters."""
    if value is _ABSENT:
        return ""
    if type(value) is _Order:
        return f"order {short(value.keys, most)}"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (bytes, bytearray)):
        more = "..." if len(value) > most // 2 else ""
        text = f"{value[: most // 2]!r}{more}"
    else:
        try:
            text = _short_repr(most).repr(value)
        except (ValueError, RecursionError):  # an int of more digits than Python prints
            text = type(value).__name__
    text = printable(" ".join(text.split("\n")))
    return text if len(text) <= most else f"{text[: most - 3]}..."


class _ShortRepr(reprlib.Repr):
    """Makes texts whose length, and time, no depth and no shared part of a value can raise."""

    def repr_instance(self, x: Any, level: int) -> str:
        """Returns the text of what `reprlib` knows no better."""
        name = type(x).__name__
        for kind in (dict, list, tuple, set, frozenset):
            if isinstance(x, kind):
                return f"{name}({getattr(self, f'repr_{kind.__name__}')(x, level)})"
        if isinstance(x, (argparse.Namespace, types.SimpleNamespace)):
            return f"{name}({self.repr_dict(vars(x), level)})"
        if type(x).__module__ not in _LEAVES_OF:
            return f"{name}(...)"
        return super().repr_instance(x, level)


@functools.cache
def _short_repr(most: int) -> _ShortRepr:
    made = _ShortRepr()
    made.maxlevel = 3
    for kind in ("dict", "list", "tuple", "set", "frozenset", "deque", "array"):
        setattr(made, f"max{kind}", most // 12)
    made.maxstring = made.maxother = made.maxlong = most
    return made


def _parts(a: Any, b: Any) -> Iterator[tuple[Any, Any, Any]] | None:
    """Yields (key, part of a, part of b); None: these are no two containers of one class."""
    if type(a) is not type(b):
        return None
    if isinstance(a, dict):
        return _items(a, b)
    if isinstance(a, (list, tuple)):
        return _elements(a, b)
    return None


def _items(a: dict[Any, Any], b: dict[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    twins = {_tagged(key): key for key in b}
    for key, value in a.items():
        twin = twins.pop(_tagged(key), _ABSENT)
        yield key, value, _ABSENT if twin is _ABSENT else b[twin]
    for key in twins.values():
        yield key, _ABSENT, b[key]
    if isinstance(a, OrderedDict):
        yield None, _Order(a), _Order(b)


def _elements(a: Any, b: Any) -> Iterator[tuple[Any, Any, Any]]:
    for number, (one, two) in enumerate(itertools.zip_longest(a, b, fillvalue=_ABSENT)):
        yield number, one, two


class _Order:
    """The keys of an OrderedDict, in order."""

    def __init__(self, source: dict[Any, Any]) -> None:
        self.keys = list(source)
        self._keys = list(map(_tagged, source))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Order) and self._keys == other._keys

    def __hash__(self) -> int:
        return hash(tuple(self._keys))


def _tagged(key: Any) -> Any:
    """Returns a key that is equal to keys of the same classes alone: 1, 1.0 and True differ."""
    if type(key) in (tuple, frozenset):
        return type(key), type(key)(map(_tagged, key))
    if type(key) is float:
        return float, "nan" if math.isnan(key) else (key, math.copysign(1, key))
    return type(key), key


def _are_equal(a: Any, b: Any, tolerance: Tolerance) -> bool:
    """Compares two values that are no containers, or not of one class."""
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return tolerance.takes(a, b)
    if type(a) is complex:
        return tolerance.takes(a.real, b.real) and tolerance.takes(a.imag, b.imag)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _are_close(a, b, tolerance)
    if type(a).__module__ == "numpy" and getattr(a, "dtype", None) is not None:
        is_alike = a.dtype == b.dtype and a.shape == b.shape
        if not is_alike or a.dtype.kind in _KINDS_OF_BYTES:
            return is_alike and bool(a.tobytes() == b.tobytes() or _are_near(a, b, tolerance))
    if type(a) in (set, frozenset):
        return set(map(_tagged, a)) == set(map(_tagged, b))
    if type(a) in (int, bool, str, bytes, type(None), _Order):
        return bool(a == b)
    try:
        return pickle.dumps(a) == pickle.dumps(b)
    except Exception:  # noqa: BLE001  (a class may raise anything; these two stay unlike)
        return False


def _are_close(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> bool:
    if torch.equal(_bytes_of(a), _bytes_of(b)):
        return True
    if not tolerance:
        return False
    one, two = (each.float() if each.dtype.itemsize == 1 else each for each in (a, b))
    return bool(torch.isclose(one, two, *tolerance, equal_nan=True).all())


def _are_near(a: Any, b: Any, tolerance: Tolerance) -> bool:
    """Compares numbers of numpy within tolerances, as torch does; integers are no floats."""
    if not tolerance or a.dtype.kind not in "fc":
        return False
    import numpy as np

    return bool(np.isclose(a, b, *tolerance, equal_nan=True).all())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)
