"""Paths whose list indices no name fills: a load would make lists as long as they say."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.saves import load, raises_one, save
from support.states import assert_same
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import torch_dcpx
from torch_dcpx import CorruptionError, DcpxReader, PlanError
from torch_dcpx.metadata.file import decode_metadata, encode_metadata
from torch_dcpx.metadata.lazy import have_full_lists

STATE = {"a": [torch.ones(3), torch.zeros(2)], "b": {"c": torch.ones(1)}}


def with_path(path: Path, writer: str, change: Callable[[dict[str, Any]], None]) -> None:
    """A checkpoint of STATE whose planner_data was changed, checksums and all."""
    save(STATE, path, writer.split(",")[0])
    file = path / ".metadata"
    if writer == "ours":
        decoded = decode_metadata(file.read_bytes(), str(file))
        paths = dict(decoded.metadata.planner_data)
        change(paths)
        changed = dataclasses.replace(decoded.metadata, planner_data=paths)
        with mock.patch("torch_dcpx.metadata.encode.have_full_lists", return_value=True):
            file.write_bytes(encode_metadata(changed, list(decoded.files.values()), "id"))
    else:
        metadata = pickle.loads(file.read_bytes())
        change(metadata.planner_data)
        file.write_bytes(pickle.dumps(metadata, 2 if writer == "stock, protocol 2" else 4))


def load_all(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=DcpxReader(path), planner=planner, no_dist=True)
    return state


def set_path(name: str, path: tuple[Any, ...]) -> Callable[[dict[str, Any]], None]:
    return lambda paths: paths.update({name: path})


BOMBS = {
    "one index": set_path("a.1", ("a", 2_000_000_000)),
    "a million": set_path("a.1", ("a", 1_000_000)),
    "beyond 32 bits": set_path("a.1", ("a", 1 << 62)),
    "negative": set_path("a.1", ("a", -1)),
    "inner list": set_path("a.1", ("a", 1, 2_000_000_000, "x")),
}


@pytest.mark.parametrize("writer", ["ours", "stock", "stock, protocol 2"])
@pytest.mark.parametrize("bomb", BOMBS)
def test_index_that_no_name_fills_is_corruption(tmp_path: Path, writer: str, bomb: str) -> None:
    with_path(tmp_path, writer, BOMBS[bomb])
    with raises_one(CorruptionError) as raised:
        load_all(tmp_path)
    assert "list index that" in str(raised.error)
    assert raised.error.path == str(tmp_path / ".metadata")
    report = torch_dcpx.verify(tmp_path)
    assert any(fault.file == ".metadata" for fault in report.faults)


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_long_lists_and_lists_with_gaps_are_none(tmp_path: Path, writer: str) -> None:
    long = {"a": [torch.ones(1) * at for at in range(1000)]}
    save(long, tmp_path / "long", writer)
    assert_same(long, load_all(tmp_path / "long"))
    # Flatten leaves empty dicts out. Torch cannot load that, but by its flat names.
    save({"a": [*({} for _ in range(5000)), {"x": torch.ones(2)}]}, tmp_path / "gap", writer)
    assert_same({"a.5000.x": torch.ones(2)}, load({"a.5000.x": torch.ones(2)}, tmp_path / "gap"))


@pytest.mark.parametrize("writer", ["ours", "stock", "stock, protocol 2"])
@pytest.mark.parametrize("path", [(3_000_000_000,), (1 << 40, 5), ("s", -1), [1 << 33]])
def test_numbers_of_a_planner_s_own_are_no_lists(tmp_path: Path, writer: str, path: Any) -> None:
    with_path(tmp_path, writer, lambda paths: paths.update({"seed": path}))
    assert_same(STATE, load_all(tmp_path))
    assert torch_dcpx.verify(tmp_path).ok
    assert DcpxReader(tmp_path).read_metadata().planner_data["seed"] == path


def test_save_refuses_lists_that_no_load_takes_and_keeps_what_was_there(tmp_path: Path) -> None:
    save(STATE, tmp_path, "ours")
    before = sorted(one.name for one in tmp_path.iterdir())
    with pytest.raises(PlanError, match="lists of the state"):
        torch_dcpx.save({"a": [*({} for _ in range(1 << 17)), torch.ones(1)]}, tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == before
    assert_same(STATE, load_all(tmp_path))


def are_full(paths: list[Any]) -> bool:
    return have_full_lists(dict(enumerate(paths)), range(len(paths)))


def test_many_long_lists_are_counted_together() -> None:
    longest = 1 << 16
    assert are_full([("a", longest - 1)])
    assert are_full([("a", longest // 2), ("a", 5, longest // 3), ("b", 0)])
    assert not are_full([("a", longest // 2), ("a", 5, longest // 2), ("a", 6, 999)])
    assert not are_full([(name, longest - 1) for name in "abc"])
    assert are_full([("a", at) for at in range(1 << 17)])
    assert not are_full([("a", 0, 1e12)])  # no key of flatten's, and a list index to torch
    assert are_full([None, 3, "text", ("a", "b"), ("a", None, 1 << 40)])
