"""Extra states of modules are handed over as they were saved, whatever their length."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from grown import is_same, tensor

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager


class Scaled(torch.nn.Linear):
    """A layer with an extra state."""

    def __init__(self, held: Any) -> None:
        super().__init__(2, 2)
        self.held = held

    def get_extra_state(self) -> Any:
        return self.held

    def set_extra_state(self, state: Any) -> None:
        self.held = state


EXTRA: dict[str, tuple[Any, Any]] = {
    "longer": (torch.arange(5, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)),
    "of another dtype": (tensor(1, 3), torch.empty(1, dtype=torch.uint8)),
    "dict for an empty one": ({"scale": 1, 2: tensor(3)}, {}),
    "dict for a tensor": ({"scale": 1, "n": {"k": 2}}, tensor(0)),
    "dict for None": ({"scale": 1}, None),
    "tensor for None": (tensor(3), None),
    "tensor for a dict": (tensor(3), {}),
    "text for a tensor": ("text", tensor(0)),
    "list for an empty one": ([tensor(1), tensor(2)], []),
    "empty ones": ({"a": {}, "b": {"c": [{}], 1: 2}}, {}),
    "empty ones alone": ({"a": {"b": {}}}, {}),
    "shorter list": ([tensor(1)], [tensor(2), tensor(3), tensor(4)]),
    "smaller dict": ({"a": tensor(1), 1: 2}, {"a": tensor(0), "b": 3, 1: 0}),
    "value for a dict": (None, {"a": tensor(0)}),
    "text for a list": ("s", [tensor(0), {"a": 1}]),
    "empty list for a longer one": ([], [tensor(0), {"a": 1}]),
    "empty dict for one with entries": ({}, {"a": 1}),
    "empty dict for None": ({}, None),
    "empty dict for a tensor": ({}, tensor(0)),
    "empty dict for a list": ({}, [tensor(0)]),
    "OrderedDict for a list": (OrderedDict(b=tensor(1), a={}), [tensor(0)]),
    "strides": ([torch.rand(3, 4).t()], []),
}


@pytest.mark.parametrize("name", EXTRA)
@pytest.mark.parametrize("door", ["manager", "not strict", "stateful"])
def test_extra_state_is_handed_over_as_it_was_saved(tmp_path: Path, door: str, name: str) -> None:
    saved, fresh = copy.deepcopy(EXTRA[name])
    first, again = torch.nn.Sequential(Scaled(saved)), torch.nn.Sequential(Scaled(fresh))
    if door == "stateful":
        dcpx.save({"m": first}, tmp_path, no_dist=True)
        dcpx.load({"m": again}, tmp_path, no_dist=True)
    else:
        with CheckpointManager(tmp_path / "r", no_dist=True, async_save=False) as manager:
            manager.save(1, model=first)
            manager.resume(model=again, strict=door == "manager")
    assert is_same(again[0].held, EXTRA[name][0])


@pytest.mark.parametrize("name", ["longer", "of another dtype", "tensor for None"])
@pytest.mark.parametrize("door", ["dict", "pretrained"])
def test_extra_state_of_another_length_is_taken(tmp_path: Path, door: str, name: str) -> None:
    saved, fresh = copy.deepcopy(EXTRA[name])
    again = torch.nn.Sequential(Scaled(fresh))
    dcpx.save({"model": torch.nn.Sequential(Scaled(saved)).state_dict()}, tmp_path, no_dist=True)
    if door == "dict":
        state = {"model": again.state_dict()}
        dcpx.load(state, tmp_path, no_dist=True)
        again.load_state_dict(state["model"])
    else:
        dcpx.load_pretrained(again, tmp_path, no_dist=True)
    assert is_same(again[0].held, saved)
