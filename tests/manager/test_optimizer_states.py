"""States of optimizers, also of those within others: what is there is kept, nothing is made up."""

from __future__ import annotations

import copy
import types
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from classes import described
from support.states import assert_same
from torch import optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from trainings import Patch, Training, manager_of

from torch_dcpx import DcpxReader, KeyMap, MismatchError, UnsupportedError


class Partial(Training):
    """A training with a layer that nothing uses, and one that is frozen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.model.add_module("head", torch.nn.Linear(3, 2))
        self.model.add_module("frozen", torch.nn.Linear(3, 2).requires_grad_(False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])

    def gradients(self, step: int) -> float:
        x = torch.rand(4, 5, generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        loss = self.model[1](self.model[0](x)).square().sum()
        loss.backward()
        return loss.item()


def stored_states(path: Path) -> set[str]:
    names = DcpxReader(path).read_metadata().state_dict_metadata
    return {name.split(".")[2] for name in names if ".state." in name}


def go_on_alike(one: Training, other: Training, *steps: int) -> None:
    assert [one.train(step) for step in steps] == [other.train(step) for step in steps]


def test_parameters_without_a_state_are_saved_and_resumed_without(tmp_path: Path) -> None:
    training, other, manager = Partial(), Partial(1), manager_of(tmp_path)
    training.train(1)
    manager.save(1, **training.parts)
    assert stored_states(tmp_path / "step-1") == {"0", "1"}
    info = manager.resume(**other.parts)
    assert info.report is not None and info.report.is_whole
    assert len(other.optimizer.state) == 4
    go_on_alike(training, other, 2, 3)


def test_save_before_the_first_step_is_resumed_without_a_state(tmp_path: Path) -> None:
    training, other, manager = Training(), Training(1), manager_of(tmp_path)
    manager.save(0, **training.parts)
    assert not training.optimizer.state
    assert not stored_states(tmp_path / "step-0")
    other.train(1)
    manager.resume(**other.parts)
    assert not other.optimizer.state
    go_on_alike(training, other, 1, 2)


def test_neither_save_nor_resume_steps_an_optimizer_or_calls_its_hooks(tmp_path: Path) -> None:
    training, manager = Partial(), manager_of(tmp_path)
    steps: list[Any] = []
    training.optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    state, gradient = training.optimizer.state, torch.ones(7)
    training.model[0].bias.grad = gradient
    manager.save(0, **training.parts)
    assert training.optimizer.state is state
    manager.resume(**training.parts)
    assert not steps
    assert training.model[0].bias.grad is gradient


def test_state_that_failed_to_be_had_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    training = Training()
    state = training.optimizer.state
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(UnsupportedError, match=r"parameter 0, of sizes \(1,\), is not the model's"):
        manager_of(tmp_path).save(0, model=training.model, optimizer=[training.optimizer, stranger])
    assert training.optimizer.state is state
    assert not stranger.state and type(stranger.state) is type(state)


def test_parameter_that_was_in_no_saved_optimizer_is_refused(tmp_path: Path) -> None:
    training, other, manager = Partial(), Partial(1), manager_of(tmp_path)
    used = [*training.model[0].parameters(), *training.model[1].parameters()]
    optimizer = torch.optim.AdamW(used, lr=0.3)
    training.gradients(1)
    optimizer.step()
    manager.save(1, model=training.model, optimizer=optimizer)

    other.optimizer = torch.optim.AdamW(other.model.parameters(), lr=0.1)
    parts = {"model": other.model, "optimizer": other.optimizer}
    with pytest.raises(MismatchError, match=r"2 parameters .*'head\.weight', 'head\.bias'"):
        manager.resume(**parts)
    assert not other.optimizer.state
    assert other.optimizer.param_groups[0]["lr"] == 0.1
    head = other.model.head.weight
    own = {name: torch.ones_like(head) for name in ("exp_avg", "exp_avg_sq")}
    other.optimizer.state[head] = {"step": torch.tensor(5.0), **own}
    manager.resume(**parts, strict=False)
    assert other.optimizer.state[head]["step"] == 5
    assert len(other.optimizer.state) == 5
    other.model.head.requires_grad_(False)  # frozen ones need no state
    manager.resume(**parts)
    assert other.optimizer.param_groups[0]["lr"] == 0.3


def test_stock_reads_a_managers_states_and_a_manager_those_of_stock(tmp_path: Path) -> None:
    """Both save a fresh optimizer with a state of zeros and step 1."""
    training, other, fresh = Training(), Training(1), Training(2)
    training.train(1)
    manager_of(tmp_path).save(1, **training.parts)
    target = {"optimizer": get_optimizer_state_dict(other.model, other.optimizer)}
    dcp.load(target, checkpoint_id=tmp_path / "step-1", no_dist=True)
    saved = get_optimizer_state_dict(training.model, training.optimizer)
    assert_same(saved["state"], target["optimizer"]["state"])
    optimizer = get_optimizer_state_dict(fresh.model, fresh.optimizer)
    state = {"model": fresh.model.state_dict(), "optimizer": optimizer}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    manager_of(tmp_path).resume(tag="stock", model=other.model, optimizer=other.optimizer)
    assert {int(one["step"]) for one in other.optimizer.state.values()} == {1}


def test_hooks_of_an_optimizers_load_see_the_states_as_they_are_and_stay(tmp_path: Path) -> None:
    training, other = Training(), Training(1)
    training.train(1)
    manager_of(tmp_path).save(1, **training.parts)
    seen, its = [], other.optimizer
    its.register_load_state_dict_pre_hook(lambda *_: seen.append("before"))
    its.register_load_state_dict_post_hook(lambda one: seen.append(f"{len(one.state)} behind"))
    for _ in range(2):
        manager_of(tmp_path).resume(**other.parts)
    assert seen == ["before", "4 behind"] * 2
    assert len(its._optimizer_load_state_dict_pre_hooks) == 1
    assert len(its._optimizer_load_state_dict_post_hooks) == 1


def test_states_that_are_there_are_filled_in_place(tmp_path: Path) -> None:
    training = Training()
    training.train(1)
    manager_of(tmp_path).save(1, **training.parts)
    moments = [one["exp_avg"] for one in training.optimizer.state.values()]
    expected = [one.clone() for one in moments]
    training.train(2)
    manager_of(tmp_path).resume(**training.parts)
    now = [one["exp_avg"] for one in training.optimizer.state.values()]
    assert all(a is b for a, b in zip(moments, now, strict=True))
    assert_same(expected, now)


def test_groups_find_their_settings_where_they_stand_elsewhere_now(tmp_path: Path) -> None:
    def made(order: tuple[int, int]) -> tuple[Any, Any]:
        torch.manual_seed(sum(order))
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        groups = [{"params": list(model[at].parameters()), "lr": 1.0 + at} for at in order]
        return model, torch.optim.SGD([*groups, {"params": [], "lr": 9.0}], momentum=0.9)

    model, optimizer = made((0, 1))
    optimizer.param_groups[2]["lr"] = 5.0
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    manager_of(tmp_path).save(1, model=model, optimizer=optimizer)
    other, swapped = made((1, 0))
    for group in swapped.param_groups:
        group["lr"] = 7.0
    manager_of(tmp_path).resume(model=other, optimizer=swapped)
    assert [group["lr"] for group in swapped.param_groups] == [2.0, 1.0, 5.0]
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(optimizer.state[mine], swapped.state[theirs])


def test_state_of_a_parameter_that_is_frozen_now_comes_back(tmp_path: Path) -> None:
    training, other = Training(), Training(1)
    training.train(1)
    for one in (training, other):
        one.model[0].requires_grad_(False)
    training.train(2)
    manager_of(tmp_path).save(2, **training.parts)
    manager_of(tmp_path).resume(**other.parts)
    for one in (training, other):
        one.model[0].requires_grad_(True)
    go_on_alike(training, other, 3, 4)


def test_renamed_parameters_without_a_state_stay_without_one(tmp_path: Path) -> None:
    training, other = Partial(), Partial(1)
    training.train(1)
    manager_of(tmp_path).save(1, **training.parts)
    calls: list[str] = []

    def renamed(name: str) -> str:
        calls.append(name)
        return name.replace("head.", "tail.")

    other.model.add_module("tail", other.model.head)
    del other.model.head
    manager_of(tmp_path).resume(**other.parts, translate=KeyMap(renamed))
    assert len(other.optimizer.state) == 4
    assert len(calls) == len(set(calls))  # each name once
    go_on_alike(training, other, 2, 3)


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
