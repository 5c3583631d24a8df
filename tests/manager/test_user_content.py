"""Small values: exactly what was saved comes back; the rest is refused by its path."""

from __future__ import annotations

import collections
import datetime
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.states import assert_same
from trainings import Held, manager_of

from torch_dcpx import MismatchError, OptionError, PerRank, UnsupportedError, load
from torch_dcpx.manager.content import (
    check_mergeable,
    decode_content,
    encode_content,
    merged,
    split_content,
    with_own,
)

SHARED = torch.arange(1000.0)
CONTENT: dict[str, Any] = {
    "none": None,
    "numbers": [True, -(1 << 80), 1.5, float("inf"), 2j, -0.0],
    "text": "déjà vu\0",
    "bytes": [b"\0\xff", bytearray(b"x")],
    "tuple": (1, (), ((2,), [])),
    "empty": {"list": [], "dict": {}, "tuple": ()},
    "keys": {1: "int", "1": "str", (1, 2): "tuple", None: 0, 2.5: 1},
    "sets": [{1, 2}, frozenset({"a"})],
    "collections": [collections.OrderedDict(b=1, a=2), collections.Counter("aab")],
    "tensors": [torch.arange(6).reshape(2, 3), SHARED[10:13], torch.tensor(3.0).bfloat16()],
    "torch": [torch.Size([1, 2]), torch.float16, torch.device("cpu")],
    "arrays": [np.arange(4, dtype=np.int16).reshape(2, 2), np.array(["a", "bc"]), np.zeros(0)],
    "scalars": [np.float32(1.5), np.int64(3), np.bool_(True)],
    "python rng": random.Random(1).getstate(),
    "numpy rng": np.random.RandomState(1).get_state(),
}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_every_allowed_type_comes_back_as_itself(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    manager.save(1, user_content=CONTENT)
    found = manager.resume().user_content
    for name, value in CONTENT.items():
        assert same(value, found[name]), name
    assert found["tensors"][1].untyped_storage().nbytes() == 12  # not what it is a view of
    target: dict[str, Any] = {"dcpx": {"manager": "", "user_content": b""}}
    load(target, tmp_path / "step-1")  # byte items that the allow-list takes
    assert target["dcpx"]["manager"].startswith('{"format":1,"tag":"step-1"')


def test_content_may_be_any_value(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    for content in (None, 0, "", [], {}, (), b"", torch.zeros(0)):
        manager.save(1, user_content=content, state={"x": 1})
        assert same(content, manager.resume().user_content), content


def test_content_is_what_it_was_at_the_call(tmp_path: Path) -> None:
    content = {"list": [1], "tensor": torch.zeros(3)}
    with manager_of(tmp_path, async_save=True) as manager:
        manager.save(1, user_content=content)
        content["list"].append(2)
        content["tensor"].fill_(9)
    assert_same({"list": [1], "tensor": torch.zeros(3)}, manager_of(tmp_path).resume().user_content)


class Own:
    pass


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
Pair = collections.namedtuple("Pair", "a b")


REFUSED: list[tuple[Any, str]] = [
    (Own(), "user_content"),
    ({"a": [0, {"b": Own()}]}, "user_content.a.1.b"),
    ({"f": print}, "user_content.f"),
    ({"when": datetime.datetime(2024, 1, 1)}, "user_content.when"),  # noqa: DTZ001
    ({"pair": Pair(1, 2)}, "user_content.pair"),
    ({"p": torch.nn.Parameter(torch.zeros(1))}, "user_content.p"),
    ({"o": np.array([Own()])}, "user_content.o"),
    ({"m": torch.zeros(1, device="meta")}, "user_content.m"),
    ({"c": CYCLE}, "user_content.c"),
    ({"r": PerRank({"x": PerRank(1)})}, "user_content.r.x"),
    ({"k": {"__dcpx_per_rank__": 1}}, "user_content.k"),
    ({"s": {PerRank(1)}}, r"user_content.s.\(element\)"),
    ({Own: 1}, r"user_content.\(key\)"),
]


def test_what_cannot_be_loaded_safely_is_refused_by_its_path(tmp_path: Path) -> None:
    for content, path in REFUSED:
        with pytest.raises(UnsupportedError, match=f"keep '{path}"):
            manager_of(tmp_path / "root").save(1, user_content=content)
    assert not (tmp_path / "root").exists()


def test_what_each_rank_has_of_its_own_is_told_apart_by_the_types_of_its_keys() -> None:
    keys = [1, "1", (1, 2), "(1, 2)", None, "None", "True", "a.b", "x'", 1.5]
    content = {
        **{key: PerRank(number) for number, key in enumerate(keys)},
        "a": {"b": PerRank("nested"), "5": PerRank("text"), 5: PerRank("number")},
        2: {5: PerRank("2, then 5")},
        2.5: PerRank("2.5"),
    }
    shared, own = split_content(content, "c")
    assert len(own) == len(keys) + 5
    found = with_own(decode_content(encode_content(shared), "c", "p", None), own)
    assert [found[key] for key in keys] == list(range(len(keys)))
    assert found["a"] == {"b": "nested", "5": "text", 5: "number"}
    assert (found[2], found[2.5]) == ({5: "2, then 5"}, "2.5")


def test_what_each_rank_has_of_its_own_needs_a_merge_where_ranks_changed() -> None:
    names = ["dataloader", "user_content.rng"]
    check_mergeable(names, None, 2, 2, "ckpt")
    with pytest.raises(
        MismatchError, match=r"'dataloader', 'user_content.rng' .* of 2 ranks"
    ) as info:
        check_mergeable(names, None, 2, 3, "ckpt")
    assert info.value.missing == tuple(names)
    calls: list[Any] = []

    def merge(values: list[Any], rank: int, world_size: int) -> Any:
        calls.append((values, rank, world_size))
        return sum(values)

    with pytest.raises(MismatchError, match=r"'user_content\.rng'"):
        check_mergeable(names, {"dataloader": merge}, 2, 3, "ckpt")
    check_mergeable(names, merge, 2, 3, "ckpt")
    stored = [{"dataloader": 1, "other": 0}, {"dataloader": 2, "other": 0}]
    assert merged(stored, ["dataloader"], {"dataloader": merge}, 2, 3) == {"dataloader": 3}
    assert calls == [([1, 2], 2, 3)]


def test_random_content_equals_itself(tmp_path: Path, seed: int) -> None:
    """A twin that builds values by a seed, and what each rank has of its own among them."""
    rng = random.Random(seed)

    def made(depth: int) -> tuple[Any, Any]:
        """Returns a value, and what comes back of it."""
        kind = rng.randrange(8 if depth else 4)
        if kind == 0:
            value = rng.choice([None, True, 3, -2.5, "x", b"y", 1 << 70])
            return value, value
        if kind == 1:
            tensor = torch.randint(0, 99, (rng.randrange(4),))
            return tensor, tensor
        if kind == 2:
            array = np.arange(rng.randrange(4))
            return array, array
        if kind == 3:
            own = rng.choice([1, [2], {"a": ()}])
            return PerRank(own), own
        pairs = [made(depth - 1) for _ in range(rng.randrange(4))]
        if kind < 6:
            build: Any = list if kind == 4 else tuple
            return build(p[0] for p in pairs), build(p[1] for p in pairs)
        keys = rng.sample(
            [1, "1", "a.b", (1, 2), "(1, 2)", None, "None", "x'", 1.5, "True"], len(pairs)
        )
        named = dict(zip(keys, pairs, strict=True))
        return {k: p[0] for k, p in named.items()}, {k: p[1] for k, p in named.items()}

    for _ in range(60):
        value, expected = made(4)
        shared, own = split_content(value, "c")
        found = with_own(decode_content(encode_content(shared), "c", "p", None), own)
        assert same(expected, found)
    manager = manager_of(tmp_path)
    manager.save(1, user_content=[value, {5: PerRank(None), "5": (PerRank(b"x"), 1)}])
    assert same([expected, {5: None, "5": (b"x", 1)}], manager.resume().user_content)


def test_what_was_each_ranks_own_is_told_where_given_otherwise(tmp_path: Path) -> None:
    manager_of(tmp_path).save(1, state={"rng": PerRank({"a": 2}), "x": torch.ones(2)})
    for now in ({}, None, {"a": 1}, Held()):
        given = {"rng": now, "x": torch.zeros(2)}
        with pytest.raises(MismatchError, match=r"state\.rng was saved as a PerRank: give PerRank"):
            manager_of(tmp_path).resume(state=given)
        assert not given["x"].any() and given["rng"] is now
        if not isinstance(now, Held):
            for allowed in ({"allow_missing": ["state.rng*"]}, {"strict": False}):
                manager_of(tmp_path).resume(state=given, **allowed)
                assert given["rng"] == now and given["x"].all()
        given["rng"] = PerRank(None)
        manager_of(tmp_path).resume(state=given)
        assert given["rng"].value == {"a": 2}


@pytest.mark.parametrize("is_async", [False, True])
def test_object_with_a_state_within_a_value_is_refused(tmp_path: Path, is_async: bool) -> None:
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    deep = {"a": [{"b": collections.OrderedDict(c=module)}]}
    with manager_of(tmp_path, async_save=is_async) as manager:
        before = sorted(tmp_path.rglob("*"))
        for value, text in (
            ([module, module], r"k\.0 is a Linear within a list, .*give it a key of its own in st"),
            ((1, module), r"k\.1 is a Linear within a tuple"),
            ({"sched": scheduler}, r"k\.sched is a StepLR within a dict"),
            ({"opt": optimizer}, r"k\.opt is an? SGD within a dict"),
            (deep, r"k\.a\.0\.b\.c is a Linear within an OrderedDict"),
            (collections.deque([module]), r"k\.0 is a Linear within a deque"),
        ):
            with pytest.raises(UnsupportedError, match=rf"state\.{text}"):
                manager.save(1, state={"t": torch.ones(1), "k": value})
        assert sorted(tmp_path.rglob("*")) == before
        assert manager.latest() is None


def test_other_objects_are_kept_as_before(tmp_path: Path) -> None:
    class Counts(dict[str, int]):
        """Is a dict, so that its entries are saved, whatever else it has."""

        state_dict = load_state_dict = dict.copy

    endless: dict[str, Any] = {"classes": [torch.nn.Linear, datetime.date], "n": [1]}
    state = {
        "module": torch.nn.Linear(1, 1),
        "counts": [Counts(a=1)],
        "day": {"d": [datetime.date(2020, 1, 1), ...]},
        "again": [endless, endless],
    }
    with manager_of(tmp_path) as manager:
        manager.save(1, state=state)
        assert manager.latest() is not None
        endless["self"] = endless
        with pytest.raises(OptionError, match="contains itself"):
            manager.save(2, state=state)
