"""Optimizers in a dict: under keys that are no texts, and some of those that were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim
from trainings import Training, manager_of

from torch_dcpx import KeyMap, MismatchError


def parts(*keys: Any, seed: int = 0, make: Any = optim.Adam) -> dict[str, Any]:
    model = Training(seed).model
    layers = zip(keys, model, strict=False)
    return {"model": model, "optimizer": {key: make(one.parameters()) for key, one in layers}}


def step(given: dict[str, Any]) -> None:
    for parameter in given["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    for one in given["optimizer"].values():
        one.step()


@pytest.mark.parametrize("keys", [(0, 1), ("0", "1"), ("", "x")])
def test_states_under_every_key_are_translated(tmp_path: Path, keys: tuple[Any, Any]) -> None:
    given, other = parts(*keys), parts(*keys, seed=1)
    step(given)
    manager_of(tmp_path).save(1, **given)
    other["model"] = torch.nn.Sequential(torch.nn.Identity(), *other["model"])
    rules = KeyMap((r"^1\.", "2."), (r"^0\.", "1."))
    manager_of(tmp_path).resume(**other, translate=rules)
    assert [len(one.state) for one in other["optimizer"].values()] == [2, 2]


@pytest.mark.parametrize("key", [0, "0", ""])
def test_what_a_group_under_every_key_has_no_more_is_told(tmp_path: Path, key: Any) -> None:
    given, other = parts(key, 1), parts(key, 1, seed=1)
    step(given)
    manager_of(tmp_path).save(1, **given)
    bias = other["model"][0].bias.requires_grad_(False)
    other["optimizer"][key] = optim.Adam([other["model"][0].weight])
    for strict in (True, False):
        with pytest.raises(MismatchError, match=r"nothing here takes: .*0\.bias.*add_param_gr"):
            manager_of(tmp_path).resume(**other, strict=strict)
    assert bias not in other["optimizer"][key].state


@pytest.mark.parametrize("make", [optim.Adam, optim.SGD])
def test_an_optimizer_that_is_not_given_is_told(tmp_path: Path, make: Any) -> None:
    given = parts("a", "b", make=make)
    step(given)
    manager_of(tmp_path).save(1, **given)
    other = parts("a", seed=1, make=make)
    before = other["model"][0].weight.clone()
    with pytest.raises(MismatchError, match=r"'optimizer\.b\..*; give each optimizer") as caught:
        manager_of(tmp_path).resume(**other)
    assert caught.value.left and "allow_missing" in str(caught.value)
    assert other["model"][0].weight.equal(before) and not other["optimizer"]["a"].state
    manager_of(tmp_path).resume(**other, allow_missing=["optimizer.b.*"])
    manager_of(tmp_path).resume(**other, strict=False)
    manager_of(tmp_path).resume(**other, load_optimizer=False)
    manager_of(tmp_path).resume(model=other["model"])
    assert len(other["optimizer"]["a"].state) == (2 if make is optim.Adam else 0)
