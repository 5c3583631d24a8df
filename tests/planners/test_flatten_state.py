"""States taken apart by C++ as torch takes them apart."""

from __future__ import annotations

import collections
import types
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support.machine import points
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from torch_dcpx.planners.cache import flattened

TENSOR = torch.ones(2)


class _List(list[Any]):
    pass


class _Name(str):
    def __str__(self) -> str:
        return "said " + str.__str__(self)


class _Int(int):
    pass


LEAVES = st.sampled_from(
    [TENSOR, torch.nn.Parameter(TENSOR), 3, 0.5, "s", None, b"b", object(), {1}]
)
KEYS = st.sampled_from(
    ["a", "b", "a.b", "", "0", "é", "\U0001f600", _Name("n"), 0, 1, None, _Int(7)]
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts, lists = st.dictionaries(KEYS, inner, max_size=4), st.lists(inner, max_size=4)
    return st.one_of(
        dicts,
        dicts.map(collections.OrderedDict),
        dicts.map(types.MappingProxyType),
        lists,
        lists.map(_List),
        lists.map(tuple),
    )


STATES = st.dictionaries(KEYS, st.recursive(LEAVES, _containers, max_leaves=20), max_size=5)


def _result(function: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, str]:
    """Returns what a function returns, or its ValueError's text."""
    try:
        return (*function(*args, **kwargs)[:2], "")
    except ValueError as error:
        return {}, {}, str(error)


@settings(max_examples=points(300), deadline=None)
@given(STATES)
def test_state_has_the_names_paths_and_order_of_torchs(state: dict[Any, Any]) -> None:
    wanted, wanted_paths, text = _result(flatten_state_dict, state)
    found, paths, own_text = _result(flattened, state, is_flat=True, has_flat_shards=True)
    assert (
        own_text.removesuffix(": two values of the state have this name; rename one of them")
        == text
    )
    assert list(found) == list(wanted)
    assert all(found[name] is wanted[name] for name in wanted)
    assert list(paths.items()) == list(wanted_paths.items())
    assert all(
        list(map(type, paths[name])) == list(map(type, wanted_paths[name])) for name in wanted
    )


def test_order_of_an_ordered_dict_is_its_own() -> None:
    state = collections.OrderedDict(a=1, b=2, c=3)
    state.move_to_end("a")
    found, *_ = flattened({"m": state}, is_flat=True, has_flat_shards=True)
    assert list(found) == ["m.b", "m.c", "m.a"]


def test_state_that_changes_while_it_is_read_is_an_error_as_with_torch() -> None:
    class Adding:
        def __str__(self) -> str:
            state["new"] = 1
            return "adding"

    state: dict[Any, Any] = {Adding(): 1, "b": 2}
    with pytest.raises(RuntimeError, match="changed size during iteration"):
        flattened(state, is_flat=True, has_flat_shards=True)
