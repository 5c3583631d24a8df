"""What C++ asks of a load's targets, against what Python asks of them one by one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from support.machine import points
from support.saves import save
from support.states import assert_same
from test_flatten_state import STATES
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import torch_dcpx
from torch_dcpx import DcpxLoadPlanner, DcpxReader, PlanError, ReadOptions
from torch_dcpx.checkpoint.load_checks import LoadRules, compare
from torch_dcpx.metadata.lazy import StoredEntries
from torch_dcpx.planners.load_planner import flattened_target, unlike_names, whole_rows

STRICT = LoadRules.of(True, (), "error")


class Own(torch.Tensor):
    """A tensor of another class."""


class Name(str):
    """A name that is no plain str."""

    __slots__ = ()


def stored() -> dict[str, Any]:
    return {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(4, dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 2),
        "bytes": {1, 2},
    }


@pytest.fixture
def entries(tmp_path: Path) -> StoredEntries:
    save(stored(), tmp_path)
    found = DcpxReader(tmp_path).read_metadata().state_dict_metadata
    assert isinstance(found, StoredEntries)
    return found


def hooked() -> torch.Tensor:
    tensor = torch.zeros(2, 3)
    tensor.__create_chunk_list__ = list  # type: ignore[attr-defined]
    return tensor


# ---- Which values are as they are stored ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "is_whole", "is_alike"),
    [
        ("a", torch.zeros(2, 3), True, True),
        ("a", torch.nn.Parameter(torch.zeros(2, 3)), True, True),
        ("a", torch.zeros(3, 2).T, True, True),
        ("a", torch.zeros(2, 3, dtype=torch.float64), True, False),
        ("a", torch.zeros(3, 2), False, False),
        ("a", torch.zeros(2, 3, 1), False, False),
        ("a", torch.zeros(6), False, False),
        ("a", torch.zeros(2, 3).as_subclass(Own), False, False),
        ("a", hooked(), False, False),
        ("a", 3.5, False, False),
        ("a", [torch.zeros(2, 3)], False, False),
        ("scalar", torch.tensor(0.0), True, True),
        ("scalar", torch.zeros(1), False, False),
        ("empty", torch.empty(0, 2), True, True),
        ("empty", torch.empty(2, 0), False, False),
        ("bytes", torch.zeros(2, 3), False, False),
        ("none such", torch.zeros(2, 3), False, False),
        (Name("a"), torch.zeros(2, 3), False, False),
    ],
)
def test_whole_plain_tensors_are_told_from_all_else(
    entries: StoredEntries, name: str, value: Any, is_whole: bool, is_alike: bool
) -> None:
    state = {"b": torch.zeros(4, dtype=torch.bfloat16), name: value}
    rows, others = whole_rows(state, entries)
    assert list(others) == ([] if is_whole else [(1, name)])
    number = dict.__getitem__(entries, "b")
    assert rows[0] == ("b", (4,), number, (4,))
    assert isinstance(rows[0][1], torch.Size)
    assert (rows[1] is not None) == is_whole
    assert list(unlike_names(state, entries, has_dtypes=True)) == ([] if is_alike else [name])
    assert list(unlike_names(state, entries, has_dtypes=False)) == ([] if is_whole else [name])


def test_entry_that_somebody_has_seen_is_left_to_python(entries: StoredEntries) -> None:
    state = {name: torch.zeros(2, 3) for name in ("a",)}
    assert not list(unlike_names(state, entries, has_dtypes=True))
    entries["a"].size = torch.Size([7])  # it may have changed
    assert list(unlike_names(state, entries, has_dtypes=True)) == ["a"]
    assert whole_rows(state, entries) == ([None], [(0, "a")])


def test_entries_of_no_columns_are_all_left_to_python(entries: StoredEntries) -> None:
    state = {"a": torch.zeros(2, 3)}
    list(entries.values())
    assert entries.columns is None
    for given_ in (entries, dict(entries)):
        assert list(unlike_names(state, given_, has_dtypes=True)) == ["a"]
        rows, others = whole_rows(state, given_)
        assert (rows, list(others)) == ([None], [(0, "a")])


VALUES = st.sampled_from(
    [
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.int8),
        torch.nn.Parameter(torch.zeros(2, 3)),
        torch.zeros(2, 3).as_subclass(Own),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.tensor(1.0),
        torch.empty(0, 2),
        {1},
        3,
        None,
    ]
)


@settings(max_examples=points(200), deadline=None)
@given(st.dictionaries(st.sampled_from([*stored(), "more", Name("a")]), VALUES))
def test_differences_are_those_that_python_finds(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]
) -> None:
    directory = tmp_path_factory.getbasetemp() / "differences"
    if not directory.exists():
        save(stored(), directory)
    found = DcpxReader(directory).read_metadata().state_dict_metadata
    plain = dict(DcpxReader(directory).read_metadata().state_dict_metadata)
    for is_dtype_known in (True, False):
        own = compare(state, found, STRICT, is_dtype_known=is_dtype_known)
        assert own == compare(state, plain, STRICT, is_dtype_known=is_dtype_known)


def test_mode_that_changes_the_state_meanwhile_does_no_harm(entries: StoredEntries) -> None:
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}

    class Emptying(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, *args: Any) -> Any:
            state.clear()
            return function(*args[1], **(args[2] if len(args) > 2 else {}))

    with Emptying():
        rows, others = whole_rows(state, entries)
    assert [row[0] for row in rows] == ["a", "b"]
    assert not others


def test_load_of_whole_tensors_makes_no_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"t{i}": torch.full((5,), float(i)) for i in range(50)}
    save(state, tmp_path)
    asked: list[str] = []
    outline = StoredEntries.outline
    monkeypatch.setattr(
        StoredEntries, "outline", lambda self, name: asked.append(name) or outline(self, name)
    )
    target = {name: torch.zeros(5) for name in state}
    torch_dcpx.load(target, tmp_path, no_dist=True)
    assert_same(state, target)
    assert asked == []
    torch_dcpx.load(
        {"t3": torch.zeros(5, dtype=torch.float64)}, tmp_path, no_dist=True, cast="allow"
    )
    assert set(asked) == {"t3"}


# ---- The state taken apart -----------------------------------------------------------------------

WAY_OUT = ": two values of the state have this name; rename one of them"


def taken_apart(planner: DefaultLoadPlanner, state: Any) -> Any:
    try:
        planner.set_up_planner(copy.copy(state), None, True)
    # Two values of one name, one in the other, or what stock itself cannot take apart.
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, PlanError):  # stock's ValueError, with its way out
            return ValueError, str(error).removesuffix(WAY_OUT)
        return type(error), str(error)
    found, paths = planner.state_dict, planner.mappings
    values = [id(one) if isinstance(one, torch.Tensor) else repr(one) for one in found.values()]
    return list(found), values, paths, planner.flatten_state_dict


@pytest.mark.slow
@settings(max_examples=points(300), deadline=None)
@given(STATES, st.booleans(), st.booleans())
def test_state_is_taken_apart_as_by_stocks_planner(
    state: dict[Any, Any], is_flat: bool, is_sharded_flat: bool
) -> None:
    own = taken_apart(DcpxLoadPlanner(is_flat, is_sharded_flat), state)
    stock = taken_apart(DefaultLoadPlanner(is_flat, is_sharded_flat), state)
    if is_flat:  # else stock makes new containers, which differ by identity only
        assert own == stock
    else:
        assert own[0] == stock[0]


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"a": [{}, torch.ones(2)]}, id="gap"),
        pytest.param({"a": {1: torch.ones(2), "1": torch.zeros(2)}}, id="two keys of one text"),
        pytest.param({"a": [torch.ones(2), {}]}, id="gap at the end"),
        pytest.param({"0": torch.ones(2), 0: {"a": torch.ones(2)}}, id="one name in another"),
        pytest.param({"a": {3: torch.ones(2)}}, id="key that is no text"),
    ],
)
def test_what_stock_makes_anew_is_left_to_it(state: dict[str, Any]) -> None:
    assert flattened_target(state, has_flat_shards=True) is None
    assert taken_apart(DcpxLoadPlanner(), state) == taken_apart(DefaultLoadPlanner(), state)


def test_flags_and_the_callers_state_are_as_stock_leaves_them() -> None:
    state = {"a": {"b": torch.ones(2)}}
    planner = DcpxLoadPlanner()
    planner.set_up_planner(state, None, True)
    assert planner.flatten_state_dict
    assert planner.flatten_sharded_tensors
    assert planner.original_state_dict is state
    assert planner.state_dict == {"a.b": state["a"]["b"]}
    with pytest.raises(AttributeError):
        planner.set_up_planner(None, None, True)  # type: ignore[arg-type]
    assert planner.flatten_state_dict


class Moving(DcpxLoadPlanner):
    """Gives the tensors that were not read yet other memory when it takes an object."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        super().load_bytes(read_item, value)
        for name, target in self.state_dict.items():
            if isinstance(target, torch.Tensor) and name[0] > read_item.dest_index.fqn[0]:
                target.data = torch.zeros(1000)


def test_planner_that_takes_objects_may_give_tensors_other_memory(tmp_path: Path) -> None:
    names = [f"{i}.{kind}" for i in range(4) for kind in ("a", "b")]
    state = {n: b"x" * (1800 << 10) if n[-1] == "a" else torch.full((1000,), 7.0) for n in names}
    save(state, tmp_path)
    target = {n: None if n[-1] == "a" else torch.zeros(1000) for n in names}
    options = ReadOptions(host_memory_bytes=2 << 20, workers=1)  # a window an object
    dcp.load(
        target,
        storage_reader=DcpxReader(tmp_path, options=options),
        planner=Moving(),
        no_dist=True,
    )
    assert_same(state, target)
