"""Extra states of modules are handed over as they were saved, whatever their length; an optimizer
that a state holds trains on as before, whatever the layout of its states.
"""

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


@pytest.mark.parametrize("door", ["manager", "not strict", "stateful"])
def test_extra_states_are_handed_over_as_they_were_saved(tmp_path: Path, door: str) -> None:
    first, again = (
        torch.nn.ModuleDict(
            {name: Scaled(pair[side]) for name, pair in copy.deepcopy(EXTRA).items()}
        )
        for side in (0, 1)
    )
    if door == "stateful":
        dcpx.save({"m": first}, tmp_path, no_dist=True)
        dcpx.load({"m": again}, tmp_path, no_dist=True)
    else:
        with CheckpointManager(tmp_path / "r", no_dist=True, async_save=False) as manager:
            manager.save(1, model=first)
            manager.resume(model=again, strict=door == "manager")
    found: Any = dict(again.items())
    wrong = [name for name in EXTRA if not is_same(found[name].held, EXTRA[name][0])]
    assert not wrong


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


# ---- Optimizers ----------------------------------------------------------------------------------


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict())


def training(kind: Any, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, kind(model.parameters(), lr=0.1, **options)


@pytest.mark.parametrize("door", ["state", "save"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})],
)
def test_fused_optimizers_of_channels_last_models_train_on_as_before(
    tmp_path: Path, door: str, kind: Any, options: dict[str, Any]
) -> None:
    model, optimizer = training(kind, fused=True, **options)
    trained(model, optimizer, 3)
    other, fresh = training(kind, fused=True, **options)
    if door == "save":
        dcpx.save({"m": model, "o": optimizer}, tmp_path, no_dist=True)
        dcpx.load({"m": other, "o": fresh}, tmp_path, no_dist=True)
    else:
        with CheckpointManager(tmp_path, no_dist=True, async_save=False) as manager:
            manager.save(1, model=model, state={"o": optimizer})
            manager.resume(model=other, state={"o": fresh})
    wanted, found = trained(model, optimizer, 3), trained(other, fresh, 3)
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
