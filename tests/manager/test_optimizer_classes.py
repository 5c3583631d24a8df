"""Another optimizer, or other groups, are refused before anything is applied; dicts of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import assert_same
from trainings import Patch, Training, manager_of, on_disk

from torch_dcpx import KeyMap, MismatchError, OptionError
from torch_dcpx.manager.state import Parts
from torch_dcpx.manager.translate import NAMED_GROUPS

optim = torch.optim


def saved_with(root: Path, kind: Any, **kwargs: Any) -> Any:
    """A manager with a checkpoint of a training by an optimizer of that class."""
    training, manager = Training(), manager_of(root)
    training.optimizer = kind(training.model.parameters(), lr=0.1, **kwargs)
    training.gradients(1)
    training.optimizer.step()
    manager.save(1, model=training.model, optimizer=training.optimizer)
    return manager


def test_state_of_another_class_of_optimizer_is_refused_and_nothing_applied(tmp_path: Path) -> None:
    for saved, now in (
        (optim.AdamW, optim.Adamax),
        (optim.RAdam, optim.Adamax),
        (optim.Adam, optim.RAdam),
    ):
        manager, other = saved_with(tmp_path / saved.__name__, saved), Training(1)
        before = {name: value.clone() for name, value in other.model.state_dict().items()}
        optimizer = now(other.model.parameters(), lr=0.3)
        parts = {"model": other.model, "optimizer": optimizer}
        text = f"is {now.__name__}, and {saved.__name__} was saved"
        with pytest.raises(MismatchError, match=text):
            manager.resume(**parts)
        assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.3
        assert_same(before, other.model.state_dict())
        manager.resume(**parts, load_optimizer=False)
        manager.resume(**parts, strict=False)
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_of_several_optimizers_by_name_the_one_of_another_class_is_named(tmp_path: Path) -> None:
    training, manager = Training(), manager_of(tmp_path)
    first, second = (list(layer.parameters()) for layer in training.model)
    own = {"a": optim.SGD(first, lr=0.1), "a.b": optim.Adam(second, lr=0.1)}
    manager.save(1, model=training.model, optimizer=own)
    manager.resume(model=training.model, optimizer=own)
    own["a.b"] = optim.Adamax(second, lr=0.1)
    with pytest.raises(MismatchError, match=r"'a\.b' is Adamax, and Adam was saved"):
        manager.resume(model=training.model, optimizer=own)
    own["a"] = optim.Adam(first, lr=0.1)
    with pytest.raises(MismatchError, match=r"'a' is Adam, and SGD was saved"):
        manager.resume(model=training.model, optimizer=own)


def test_class_of_another_name_goes_on_where_it_has_all_settings(tmp_path: Path) -> None:
    class Own(optim.AdamW):
        pass

    manager, other = saved_with(tmp_path / "a", optim.Adam, amsgrad=True), Training(1)
    for kind in (optim.AdamW, Own):
        optimizer = kind(other.model.parameters())
        manager.resume(model=other.model, optimizer=optimizer)
        assert len(optimizer.state) == 4
    manager = saved_with(tmp_path / "m", optim.SGD, momentum=0.9)
    optimizer = optim.SGD(other.model.parameters())
    manager.resume(model=other.model, optimizer=optimizer)
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_list_of_optimizers_that_share_a_parameter_is_refused(tmp_path: Path) -> None:
    training, manager = Training(), manager_of(tmp_path)
    every, last = training.model.parameters(), list(training.model[1].parameters())
    several = [optim.AdamW(every, lr=0.1), optim.SGD(last, lr=0.2, momentum=0.9)]
    refused = r"0 and 1 .*'1\.weight'.* as a dict by name"
    with pytest.raises(OptionError, match=refused):
        manager.save(1, model=training.model, optimizer=several)
    assert not on_disk(tmp_path)
    own = dict(zip("ab", several, strict=True))
    manager.save(1, model=training.model, optimizer=own)
    for one in several:
        one.param_groups[0]["lr"] = 0.7
    with pytest.raises(OptionError, match=refused):
        manager.resume(model=training.model, optimizer=several)
    manager.resume(model=training.model, optimizer=several, load_optimizer=False)
    manager.resume(model=training.model, optimizer=own)
    assert [one.param_groups[0]["lr"] for one in several] == [0.1, 0.2]


def of_layers(training: Training, first: float, second: float) -> Any:
    groups = zip(training.model, (first, second), strict=True)
    return optim.AdamW([{"params": layer.parameters(), "lr": rate} for layer, rate in groups])


@pytest.mark.parametrize("count", [1, 2], ids=["fewer groups", "moved"])
def test_one_group_of_what_had_different_settings_is_refused(tmp_path: Path, count: int) -> None:
    training, other, manager = Training(), Training(1), manager_of(tmp_path)
    manager.save(1, model=training.model, optimizer=of_layers(training, 0.1, 0.01))
    first, *rest = other.model.parameters()
    groups = [{"params": [first]}, {"params": rest}] if count == 2 else [{"params": [first, *rest]}]
    optimizer = optim.AdamW(groups, lr=0.5)
    refused = rf"'1\.weight' are one group of the optimizer \({count - 1}\).*lr=0\.1 and lr=0\.01"
    with pytest.raises(
        MismatchError, match=rf"{refused}; .* last one whose number is below {count}"
    ):
        manager.resume(model=other.model, optimizer=optimizer)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    manager.resume(model=other.model, optimizer=optimizer, strict=False)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01][:count]


def test_groups_with_the_same_settings_become_one(tmp_path: Path) -> None:
    training, other, manager = Training(), Training(1), manager_of(tmp_path)
    optimizer = of_layers(training, 0.1, 0.1)
    optimizer.param_groups[1]["extra"] = {"a": torch.ones(2), "b": [1]}
    manager.save(1, model=training.model, optimizer=optimizer)
    optimizer = optim.AdamW(other.model.parameters(), lr=0.5)
    manager.resume(model=other.model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_parameters_of_a_group_behind_the_last_find_its_settings(tmp_path: Path) -> None:
    training, other, manager = Training(), Training(1), manager_of(tmp_path)
    manager.save(1, model=training.model, optimizer=of_layers(training, 0.1, 0.01))
    optimizer = optim.AdamW(other.model[1].parameters(), lr=0.5)
    other.model[0].requires_grad_(False)
    manager.resume(model=other.model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.01


def by_key(*keys: Any, seed: int = 0, make: Any = optim.Adam) -> dict[str, Any]:
    model = Training(seed).model
    layers = zip(keys, model, strict=False)
    return {"model": model, "optimizer": {key: make(one.parameters()) for key, one in layers}}


def step(given: dict[str, Any]) -> None:
    for parameter in given["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    for one in given["optimizer"].values():
        one.step()


@pytest.mark.parametrize("key", [0, "0", ""])
def test_states_under_every_key_are_translated_and_not_left_out(tmp_path: Path, key: Any) -> None:
    given, other = by_key(key, 1), by_key(key, 1, seed=1)
    step(given)
    manager_of(tmp_path).save(1, **given)
    other["model"] = torch.nn.Sequential(torch.nn.Identity(), *other["model"])
    rules = KeyMap((r"^1\.", "2."), (r"^0\.", "1."))
    manager_of(tmp_path).resume(**other, translate=rules)
    assert [len(one.state) for one in other["optimizer"].values()] == [2, 2]
    other = by_key(key, 1, seed=1)
    bias = other["model"][0].bias.requires_grad_(False)
    other["optimizer"][key] = optim.Adam([other["model"][0].weight])
    for strict in (True, False):
        with pytest.raises(MismatchError, match=r"nothing here takes: .*0\.bias.*add_param_gr"):
            manager_of(tmp_path).resume(**other, strict=strict)
    assert bias not in other["optimizer"][key].state


@pytest.mark.parametrize("make", [optim.Adam, optim.SGD])
def test_an_optimizer_that_is_not_given_is_told(tmp_path: Path, make: Any) -> None:
    given = by_key("a", "b", make=make)
    step(given)
    manager_of(tmp_path).save(1, **given)
    other = by_key("a", seed=1, make=make)
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
    tmp_path: Path, monkeypatch: Patch, *, is_by_parameter: bool
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


def test_names_in_groups_are_the_new_ones_under_translate_and_a_split(tmp_path: Path) -> None:
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
