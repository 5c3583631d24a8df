"""Optimizers that hand their loads to one within them get what was saved, as it was."""

from __future__ import annotations

import copy
import types
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from classes import described
from torch import optim
from trainings import Patch, manager_of

from torch_dcpx import UnsupportedError


class Masters(optim.Optimizer):
    """Has float32 states of bfloat16 parameters, and texts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"master": parameter.float().clone(), "mode": "a"}
                    state["more"] = {"set": {"b"}, "last": deque([1.0, "c"], maxlen=2)}
                state["master"] -= 0.0003 * parameter.grad.float()
                parameter.copy_(state["master"])


class Made(optim.Optimizer):
    """Makes itself as torch does, and shows the state of the one within."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups = inner, inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state if "inner" in self.__dict__ else self.__dict__["_own"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["_own"] = value

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class Stale(Made):
    """Keeps the dicts that the one within had when it was made."""

    state: Any = None

    def __init__(self, inner: Any) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.state, self.param_groups = inner.state, inner.param_groups

    def step(self, closure: Any = None) -> None:  # not the one that torch's `__init__` wraps
        self.inner.step()


class Stateless(Stale):
    """Has no `state` of its own."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.defaults, self.param_groups = inner, inner.defaults, inner.param_groups


class ReadOnly(Stateless):
    """Shows a state that takes no entries."""

    state = property(lambda self: types.MappingProxyType(self.inner.state))


class Copies(Stateless):
    """Shows copies."""

    def state_dict(self) -> Any:
        return copy.deepcopy(self.inner.state_dict())


def parts(make: Any, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 3).bfloat16()
    return {"model": model, "optimizer": make(Masters(model.parameters()))}


def train(given: dict[str, Any], *steps: int) -> None:
    for number in steps:
        for parameter in given["model"].parameters():
            parameter.grad = torch.ones_like(parameter) * number
        given["optimizer"].step()


def inner_states(given: dict[str, Any]) -> Any:
    one = getattr(given["optimizer"], "inner", given["optimizer"])
    return [
        described(state) | {"last": state["more"]["last"].maxlen} for state in one.state.values()
    ]


@pytest.mark.parametrize("make", [lambda one: one, Made, Stale, ReadOnly, Stateless])
def test_states_of_the_one_within_come_back_as_they_were(tmp_path: Path, make: Any) -> None:
    given, other = parts(make, 0), parts(make, 1)
    train(given, 1, 2, 3)
    manager_of(tmp_path).save(1, **given)
    for has_states in (False, True):
        if has_states:
            train(other, 9)
        manager_of(tmp_path).resume(**other)
        assert inner_states(other) == inner_states(given)
    for one in (given, other):
        train(one, *range(4, 40))
    assert other["model"].weight.equal(given["model"].weight)


@pytest.mark.parametrize("make", [Stale, Stateless])
def test_wrapped_optimizer_that_has_not_stepped_does_not_step(tmp_path: Path, make: Any) -> None:
    given, other, called = parts(make, 0), parts(make, 1), list[int]()
    given["optimizer"].inner.register_step_pre_hook(lambda *_: called.append(1))
    manager_of(tmp_path).save(1, **given)
    train(other, 9)
    manager_of(tmp_path).resume(**other)
    assert not called and inner_states(other) == inner_states(given) == []
    assert all(parameter.grad is None for parameter in given["model"].parameters())


def test_a_cast_that_nothing_can_put_back_is_told(tmp_path: Path) -> None:
    given = parts(Copies, 0)
    train(given, 1)
    manager_of(tmp_path).save(1, **given)
    with pytest.raises(UnsupportedError, match=r"Copies has other dtypes .* of 2 parameters than"):
        manager_of(tmp_path).resume(**parts(Copies, 1))
    manager_of(tmp_path).resume(**parts(Copies, 1), load_optimizer=False)


def test_plain_optimizers_are_not_asked_after_a_load(tmp_path: Path, monkeypatch: Patch) -> None:
    given = parts(lambda one: one, 0)
    train(given, 1)
    manager_of(tmp_path).save(1, **given)
    calls: list[int] = []
    shown, other = Masters.state_dict, parts(lambda one: one, 1)
    monkeypatch.setattr(Masters, "state_dict", lambda one: (calls.append(1), shown(one))[1])
    manager_of(tmp_path).resume(**other)
    assert len(calls) == 1


def test_states_of_a_removed_group_are_told(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3).bfloat16()
    given = {
        "model": model,
        "optimizer": Masters([{"params": [one]} for one in model.parameters()]),
    }
    train(given, 1)
    manager_of(tmp_path).save(1, **given)
    del given["optimizer"].param_groups[1]
    with pytest.raises(UnsupportedError, match=r"Masters has no .* 1 entry of parameters that are"):
        manager_of(tmp_path).save(2, **given)
    with pytest.raises(UnsupportedError, match="1 entry of parameters that are in no group"):
        manager_of(tmp_path).resume(**given)
    del given["optimizer"].state[model.bias]
    manager_of(tmp_path).save(2, **given)


class Broken(Masters):
    """Raises a KeyError that is not of states."""

    def state_dict(self) -> Any:
        raise KeyError("mine")


def test_another_error_of_a_state_dict_is_raised_as_it_is(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    with pytest.raises(Exception, match="mine"):
        manager_of(tmp_path).save(1, model=model, optimizer=Broken(model.parameters()))
