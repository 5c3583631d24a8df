"""Optimizers in a dict: under keys that are no texts, and some of those that were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim
from trainings import Training, manager_of

from torch_dcpx import KeyMap, MismatchError
from torch_dcpx.manager.state import Parts
from torch_dcpx.manager.translate import NAMED_GROUPS


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
    with pytest.raises(MismatchError, match=r"`optimizer\.b\..*; give each optimizer") as caught:
        manager_of(tmp_path).resume(**other)
    assert caught.value.left and "allow_missing" in str(caught.value)
    assert other["model"][0].weight.equal(before) and not other["optimizer"]["a"].state
    manager_of(tmp_path).resume(**other, allow_missing=["optimizer.b.*"])
    manager_of(tmp_path).resume(**other, strict=False)
    manager_of(tmp_path).resume(**other, load_optimizer=False)
    manager_of(tmp_path).resume(model=other["model"])
    assert len(other["optimizer"]["a"].state) == (2 if make is optim.Adam else 0)


def names_of(given: dict[str, Any]) -> list[Any]:
    return [group.get("param_names") for group in given["optimizer"].param_groups]


def with_names(*order: int, has_names: bool = True, seed: int = 0) -> dict[str, Any]:
    model = Training(seed).model
    named = [(f"{at}.weight", model[at].weight) for at in order]
    optimizer = optim.AdamW(named if has_names else [one for _, one in named], lr=0.1 + seed)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("is_by_parameter", [False, True])
def test_names_of_parameters_in_groups_are_those_that_the_groups_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_by_parameter: bool
) -> None:
    given = with_names(0, 1)
    if is_by_parameter:  # as ranks with other groups save
        record = Parts.record

        def named(*arguments: Any) -> Any:
            made = record(*arguments)
            return made._replace(parts=(*made.parts, NAMED_GROUPS))

        monkeypatch.setattr(Parts, "record", named)
    manager_of(tmp_path).save(1, **given)
    other = with_names(1, 0, seed=1)
    manager_of(tmp_path).resume(**other)
    assert names_of(other) == [["1.weight", "0.weight"]]
    assert other["optimizer"].param_groups[0]["lr"] == 0.1
    bare = with_names(0, 1, has_names=False, seed=1)
    manager_of(tmp_path).resume(**bare)
    assert names_of(bare) == [None]


def test_names_of_parameters_in_groups_are_the_new_ones_under_translate_and_a_split(
    tmp_path: Path,
) -> None:
    manager_of(tmp_path).save(1, **with_names(0, 1))
    other = with_names(0, 1, seed=1)
    other["model"] = torch.nn.ModuleDict({"x": other["model"][0], "y": other["model"][1]})
    both = [("x.weight", other["model"].x.weight), ("y.weight", other["model"].y.weight)]
    other["optimizer"] = optim.AdamW(both, lr=1.0)
    manager_of(tmp_path).resume(**other, translate=KeyMap((r"^0\.", "x."), (r"^1\.", "y.")))
    assert names_of(other) == [["x.weight", "y.weight"]]
    assert other["optimizer"].param_groups[0]["lr"] == 0.1
    split = with_names(0, seed=1)
    split["optimizer"].add_param_group({"params": [("1.weight", split["model"][1].weight)]})
    manager_of(tmp_path).resume(**split, strict=False)
    assert names_of(split) == [["0.weight"], ["1.weight"]]
