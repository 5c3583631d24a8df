"""Loaded values lie under the state's own keys, whatever their type."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_dcpx as dcpx
from torch_dcpx import DcpxLoadPlanner, DcpxReader, PlanError


class Color(enum.Enum):
    RED = 1


KEYS = [1, -1, True, 0.5, None, (1, "a"), b"a", Color.RED, torch.float32, frozenset({1})]


class Own(DcpxLoadPlanner):
    """A planner that sees the bytes."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        super().load_bytes(read_item, value)


LOADS: dict[str, Any] = {
    "dcpx": lambda state, path: dcpx.load(state, path, no_dist=True),
    "dcp": lambda state, path: dcp.load(
        state, storage_reader=DcpxReader(path), planner=DcpxLoadPlanner(), no_dist=True
    ),
    "dcp, stock's planner": lambda state, path: dcp.load(
        state, storage_reader=DcpxReader(path), no_dist=True
    ),
    "dcp, stock's reader": lambda state, path: dcp.load(
        state, checkpoint_id=path, planner=DcpxLoadPlanner(), no_dist=True
    ),
    "own hook": lambda state, path: dcp.load(
        state, storage_reader=DcpxReader(path), planner=Own(), no_dist=True
    ),
}


def counting(pairs: dict[Any, int]) -> defaultdict[Any, int]:
    return defaultdict(int, pairs)


KINDS: list[Any] = [OrderedDict, Counter, counting]


@pytest.mark.parametrize("number", range(len(KEYS)))
def test_value_lies_under_the_key_that_the_state_has(tmp_path: Path, number: int) -> None:
    key = KEYS[number]
    for made in (dict, KINDS[number % len(KINDS)]):
        path = tmp_path / made.__name__
        saved: dict[Any, Any] = {"h": made({key: 5, "t": 6}), "d": {key: {key: [{key: 7}]}}}
        dcpx.save(saved, path, no_dist=True)
        for name, load in LOADS.items():
            state: dict[Any, Any] = {"h": made({key: 0, "t": 0}), "d": {key: {key: [{key: 0}]}}}
            load(state, path)
            assert state == saved and list(state["h"]) == [key, "t"], (name, key)
            assert type(state["h"]) is type(saved["h"]), (name, key)


def test_keys_of_the_state_itself_may_be_numbers(tmp_path: Path) -> None:
    saved: dict[Any, Any] = {1: 5, 2: torch.ones(2)}
    dcpx.save(saved, tmp_path, no_dist=True)
    for name, load in LOADS.items():
        state: dict[Any, Any] = {1: 0, 2: torch.zeros(2)}
        load(state, tmp_path)
        assert list(state) == [1, 2] and state[1] == 5 and bool(state[2].all()), name


def test_two_keys_of_one_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"duplicated flatten key a\.1"):
        dcpx.save({"a": {1: 1, "1": 2}}, tmp_path, no_dist=True)
    dcpx.save({"a": {"1": 5}}, tmp_path, no_dist=True)
    state = {"a": {1: 0, "1": 0}}
    with pytest.raises(PlanError, match=r"duplicated flatten key a\.1"):
        dcpx.load(state, tmp_path, no_dist=True)
    assert state == {"a": {1: 0, "1": 0}}


def test_list_with_empty_dicts_is_loaded(tmp_path: Path) -> None:
    dcpx.save({"l": [{}, {"a": 1}]}, tmp_path, no_dist=True)
    state: dict[str, Any] = {"l": [{}, {"a": 0}]}
    dcpx.load(state, tmp_path, no_dist=True)
    assert state == {"l": [{}, {"a": 1}]}


def test_stock_reads_what_has_a_record(tmp_path: Path) -> None:
    dcpx.save({"a": {1: 5, "x": torch.ones(2)}}, tmp_path, no_dist=True)
    state: dict[str, Any] = {"a": {"1": 0, "x": torch.zeros(2)}}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["a"]["1"] == 5 and bool(state["a"]["x"].all())
