"""What was another optimizer's, or of other groups, is refused before anything is applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import assert_same
from trainings import Training, manager_of, on_disk

from torch_dcpx import MismatchError, OptionError

optim = torch.optim


def saved_with(root: Path, kind: Any, **kwargs: Any) -> Any:
    """A manager with a checkpoint of a training by an optimizer of that class."""
    training, manager = Training(), manager_of(root)
    training.optimizer = kind(training.model.parameters(), lr=0.1, **kwargs)
    training.gradients(1)
    training.optimizer.step()
    manager.save(1, model=training.model, optimizer=training.optimizer)
    return manager


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (optim.Adam, optim.Adamax),
        (optim.AdamW, optim.Adamax),
        (optim.NAdam, optim.Adamax),
        (optim.RAdam, optim.Adamax),
        (optim.Adam, optim.RAdam),
    ],
)
def test_state_of_another_class_of_optimizer_is_refused_and_nothing_applied(
    tmp_path: Path, saved: Any, now: Any
) -> None:
    manager, other = saved_with(tmp_path, saved), Training(1)
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    optimizer = now(other.model.parameters(), lr=0.3)
    with pytest.raises(MismatchError, match=f"is {now.__name__}, and {saved.__name__} was saved"):
        manager.resume(model=other.model, optimizer=optimizer)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.3
    assert_same(before, other.model.state_dict())
    manager.resume(model=other.model, optimizer=optimizer, load_optimizer=False)
    manager.resume(model=other.model, optimizer=optimizer, strict=False)
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


def test_settings_that_an_optimizer_adds_as_it_steps_do_not_make_it_another(tmp_path: Path) -> None:
    training, manager = Training(), manager_of(tmp_path)
    training.optimizer.param_groups[0]["step"] = 3
    manager.save(1, model=training.model, optimizer=training.optimizer)
    optimizer = optim.AdamW(training.model.parameters())
    manager.resume(model=training.model, optimizer=optimizer)


def test_list_of_optimizers_that_share_a_parameter_is_refused_and_a_dict_is_not(
    tmp_path: Path,
) -> None:
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
def test_parameters_of_one_group_that_were_saved_with_different_settings_are_refused(
    tmp_path: Path, count: int
) -> None:
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


def test_parameters_of_several_groups_with_the_same_settings_become_one_group(
    tmp_path: Path,
) -> None:
    training, other, manager = Training(), Training(1), manager_of(tmp_path)
    optimizer = of_layers(training, 0.1, 0.1)
    optimizer.param_groups[1]["extra"] = {"a": torch.ones(2), "b": [1]}
    manager.save(1, model=training.model, optimizer=optimizer)
    optimizer = optim.AdamW(other.model.parameters(), lr=0.5)
    manager.resume(model=other.model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_parameters_whose_group_stood_behind_those_that_are_left_find_its_settings(
    tmp_path: Path,
) -> None:
    training, other, manager = Training(), Training(1), manager_of(tmp_path)
    manager.save(1, model=training.model, optimizer=of_layers(training, 0.1, 0.01))
    optimizer = optim.AdamW(other.model[1].parameters(), lr=0.5)
    other.model[0].requires_grad_(False)
    manager.resume(model=other.model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.01


class Wrapper(optim.Optimizer):
    """Shows what is another's, and makes nothing of its own, as wrappers of frameworks do."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner = inner

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


@pytest.mark.parametrize("steps", [0, 1])
def test_wrapper_that_only_shows_another_optimizers_state_is_saved_and_resumed(
    tmp_path: Path, steps: int
) -> None:
    training, other, manager = Training(), Training(1), manager_of(tmp_path)
    training.model.bfloat16()
    training.optimizer.register_step_pre_hook(lambda *_: called.append(1))
    called: list[int] = []
    for _ in range(steps):
        for parameter in training.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        training.optimizer.step()
        training.optimizer.zero_grad()
    for state in training.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-6
    manager.save(1, model=training.model, optimizer=Wrapper(training.optimizer))
    assert len(called) == steps
    assert all(parameter.grad is None for parameter in training.model.parameters())
    other.model.bfloat16()
    manager.resume(model=other.model, optimizer=Wrapper(other.optimizer))
    assert_same(training.optimizer.state_dict(), other.optimizer.state_dict())
