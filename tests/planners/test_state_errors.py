"""States that have no names: one that contains itself, values of one name. Named, nothing done."""

from __future__ import annotations

import collections
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager, OptionError, PlanError


def in_itself() -> dict[str, Any]:
    return {"a": [torch.ones(1), looped({"w": torch.ones(1)})]}


def looped(state: dict[str, Any]) -> dict[str, Any]:
    state["again"] = state
    return state


def deep(levels: int) -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.ones(1)}
    for _ in range(levels):
        state = {"x": state}
    return state


def endless_list() -> dict[str, Any]:
    values: list[Any] = [torch.ones(1)]
    values.append(values)
    return {"values": values}


def calls(root: Path) -> dict[str, Callable[[dict[str, Any]], Any]]:
    return {
        "save": lambda state: dcpx.save(state, root / "out"),
        "async_save": lambda state: dcpx.async_save(state, root / "out").result(),
        "prewarm": dcpx.prewarm,
        "load": lambda state: dcpx.load(state, root / "good"),
        "export": lambda state: dcpx.export(state, root / "artifact"),
        "manager": lambda state: CheckpointManager(root / "run").save(1, state=state),
    }


CALLS = sorted(calls(Path()))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("make", "where"),
    [(in_itself, "a.1"), (endless_list, "values"), (lambda: {"top": looped({})}, "top")],
)
def test_state_that_contains_itself_is_refused_with_the_path(
    call: str, make: Any, where: str, tmp_path: Path
) -> None:
    dcpx.save({"w": torch.ones(1)}, tmp_path / "good")
    before = sorted(tmp_path.rglob("*"))
    where = f"state.{where}" if call == "manager" else where
    with pytest.raises(OptionError, match="contains itself") as raised:
        calls(tmp_path)[call](make())
    text = str(raised.value)
    assert f"'{where}.1'" in text or f"'{where}.again'" in text
    assert f"that is '{where}' again; leave it out" in text and "\n" not in text
    if call == "manager":  # the root has its lock by now
        shutil.rmtree(tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("call", CALLS)
def test_state_that_is_too_deep_or_has_two_values_of_one_name_is_refused(
    call: str, tmp_path: Path
) -> None:
    dcpx.save({"w": torch.ones(1)}, tmp_path / "good")
    with pytest.raises(OptionError, match="nested deeper than Python can follow"):
        calls(tmp_path)[call](deep(50_000 if call == "save" else 2_000))
    if call == "manager":
        shutil.rmtree(tmp_path / "run")
    state = {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}
    with pytest.raises(PlanError, match=r"duplicated flatten key .*a\.b: two values") as raised:
        calls(tmp_path)[call](state)
    assert raised.value.fqn == ("state.a.b" if call == "manager" else "a.b")


def test_state_that_holds_one_dict_twice_is_saved(tmp_path: Path) -> None:
    part = collections.OrderedDict(w=torch.ones(1))
    dcpx.save({"a": part, "b": [part, part]}, tmp_path)
    assert sorted(dcpx.load_tensors(tmp_path)) == ["a.w", "b.0.w", "b.1.w"]
