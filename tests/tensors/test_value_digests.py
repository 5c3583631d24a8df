"""Digests of Python values: the same for equal values, none for what is not known."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import io
import math
import tracemalloc
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from torch_dcpx.tensors.digests import conflicting_names, digests_of


def digest_of(value: Any) -> bytes:
    return digests_of({"a": value}).get("a", b"")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass
class Settings:
    rate: float
    names: list[str]


@dataclasses.dataclass
class Secretive:
    rate: float

    def __getstate__(self) -> dict[str, Any]:
        raise AssertionError("asked how it is stored")


class Text(str):
    __slots__ = ()


NAN = float("nan")
OTHER_NAN = -NAN


EQUAL: list[tuple[Any, Any]] = [
    (NAN, OTHER_NAN),
    (NAN, math.inf - math.inf),
    (0.0, -0.0),
    ([complex(NAN, 0.0)], [complex(OTHER_NAN, -0.0)]),
    (np.float32(NAN), np.float32(OTHER_NAN)),
    (np.float64(0.0), np.float64(-0.0)),
    (np.array([NAN, 0.0, 1.0]), np.array([OTHER_NAN, -0.0, 1.0])),
    (np.array([complex(0.0, NAN)]), np.array([complex(-0.0, OTHER_NAN)])),
    (np.arange(6)[::2], np.array([0, 2, 4])),
    (np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(6).reshape(2, 3)),
    (decimal.Decimal("1.50"), decimal.Decimal("1.5")),
    (decimal.Decimal("100"), decimal.Decimal("1E+2")),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (collections.Counter("abb"), collections.Counter("bba")),
]


def test_equal_values_have_one_digest() -> None:
    for one, other in EQUAL:
        assert digest_of(one) == digest_of(other) != b"", (one, other)


UTC_NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone.utc)
NOW = UTC_NOW.replace(tzinfo=None)
DIFFERENT = [
    None,
    True,
    1,
    2**70,
    1.0,
    math.inf,
    -math.inf,
    NAN,
    1j,
    "a",
    "\ud800",
    b"a",
    bytearray(b"a"),
    [1],
    (1,),
    {1},
    frozenset({1}),
    {1: 2},
    collections.OrderedDict({1: 2}),
    collections.defaultdict(list, {1: 2}),
    collections.Counter({1: 2}),
    collections.deque([1]),
    torch.Size([1]),
    torch.float32,
    torch.device("cpu"),
    torch.device("meta"),
    NOW,
    UTC_NOW,
    NOW.date(),
    NOW.time(),
    datetime.timedelta(1),
    datetime.timezone.utc,
    decimal.Decimal("1"),
    decimal.Decimal("10"),
    decimal.Decimal("-1"),
    decimal.Decimal("NaN"),
    Path("a"),
    uuid.UUID(int=1),
    Colour.RED,
    Colour.BLUE,
    np.float64(1.0),
    np.float32(1.0),
    np.array([1.0]),
    np.array([[1.0]]),
    np.array([1]),
    np.array(["a"]),
    argparse.Namespace(a=1),
    argparse.Namespace(a=2),
    Point(1, 2.0),
    Point(1, 3.0),
    Settings(0.1, ["a"]),
    Settings(0.1, ["b"]),
    print,
    Settings,
]


def test_values_that_differ_have_different_digests() -> None:
    digests = [digest_of(value) for value in DIFFERENT]
    assert all(digests)
    assert len(set(digests)) == len(DIFFERENT)


UNKNOWN: list[Any] = [
    torch.ones(2),
    io.BytesIO(b"a"),
    ValueError("a"),
    object(),
    Text("a"),
    Secretive(0.1),
    np.array([{}], dtype=object),
    np.longdouble(1),
    np.zeros(2).view(np.matrix),
]


def test_value_of_a_type_that_is_not_known_has_none() -> None:
    for value in UNKNOWN:
        assert digest_of(value) == digest_of([value]) == digest_of({"x": (value,)}) == b"", value


def test_value_that_holds_itself_has_none_and_leaves_its_neighbours_theirs() -> None:
    loop: list[Any] = []
    for _ in range(40):
        loop.append([loop])
    found = digests_of({"loop": loop, "a": 1})
    assert found.keys() == {"a"}


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda n: "a" * n, np.zeros])
def test_large_value_has_none_and_is_not_copied(kind: Any) -> None:
    assert digest_of(kind(1000))
    value = kind((1 << 20) + 1)
    tracemalloc.start()
    assert digest_of(value) == digest_of([value]) == b""
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 18
    assert digest_of(1 << (1 << 24)) == b""


def test_state_of_many_values_is_walked_up_to_a_bound() -> None:
    state = {f"k{i}": list(range(1000)) for i in range(120)}
    found = digests_of(state)
    assert list(found) == list(state)[: len(found)]
    assert 90 < len(found) < 100
    assert len(digests_of({f"k{i}": bytes(1 << 20) for i in range(120)})) < 100


def test_names_that_one_rank_knows_nothing_of_are_no_conflict() -> None:
    assert conflicting_names([{"a": b"1"}, {}, {"a": b"1"}]) == {}
    assert conflicting_names([{"a": b"1"}, {}, {"a": b"2"}]) == {"a": [0, 2]}
