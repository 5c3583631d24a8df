"""Optimizers that have no state yet when a checkpoint is loaded, and groups of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import assert_same
from trainings import Log, Patch, Training, manager_of

from torch_dcpx import MismatchError, StorageError, load, save
from torch_dcpx.manager import resume
from torch_dcpx.manager.optimizer_part import OptimizerPart


def adamw(*layers: Any, **kwargs: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for layer in layers for p in layer.parameters()], **kwargs)


def test_refused_resume_leaves_a_new_optimizer_stateless(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    training = Training()
    training.train(1)
    saves = manager_of(tmp_path)
    saves.save(1, model=training.model)
    other, beside = Training(5), Training(5)
    with pytest.raises(MismatchError, match=r"optimizer\.param_groups"):
        saves.resume(model=other.model, optimizer=other.optimizer)
    assert not other.optimizer.state

    def failing(_: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        target["optimizer"].state_dict()
        raise StorageError("read")

    monkeypatch.setattr(resume, "load_by", failing)
    with pytest.raises(StorageError, match="read"):
        saves.resume(model=other.model, optimizer=other.optimizer)
    assert not other.optimizer.state
    assert [other.train(i) for i in range(3)] == [beside.train(i) for i in range(3)]


def test_of_several_optimizers_those_that_were_not_saved_stay_without_state(tmp_path: Path) -> None:
    training = Training()
    first = adamw(training.model[0])
    training.gradients(1)
    first.step()
    for own in ({"a": first}, [first]):
        manager_of(tmp_path).save(1, model=training.model, optimizer=own)
        model = Training(5).model
        both = {"a": adamw(model[0]), "b": adamw(model[1])}
        given = both if isinstance(own, dict) else list(both.values())
        manager_of(tmp_path).resume(model=model, optimizer=given, strict=False)
        assert_same(first.state_dict(), both["a"].state_dict())
        assert not both["b"].state
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for one in both.values():
            one.param_groups[0]["lr"] = 0.1 + len(one.state)
            one.step()
        manager_of(tmp_path).save(2, model=model, optimizer=given)
        again = [adamw(layer) for layer in model]
        its = dict(zip("ab", again, strict=True)) if isinstance(own, dict) else again
        manager_of(tmp_path).resume(model=model, optimizer=its)
        assert_same(
            [one.state_dict() for one in both.values()], [one.state_dict() for one in again]
        )


def test_gradients_do_not_keep_a_new_optimizer_from_its_state(tmp_path: Path) -> None:
    training = Training()
    training.train(1)
    manager_of(tmp_path).save(1, **training.parts)
    other = Training(5)
    other.gradients(1)
    gradients = [p.grad for p in other.model.parameters()]
    info = manager_of(tmp_path).resume(**other.parts)
    assert info.report is not None and info.report.unexpected == ()
    assert all(p.grad is g for p, g in zip(other.model.parameters(), gradients, strict=True))
    assert [other.train(i) for i in (2, 3)] == [training.train(i) for i in (2, 3)]


def test_groups_without_parameters_keep_settings_beside_named_ones(tmp_path: Path) -> None:
    def stage(lr: float) -> tuple[Any, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 2)
        empty = [{"params": [], "lr": lr}, {"params": list(model.parameters())}]
        optimizer = torch.optim.AdamW([*empty, {"params": []}], lr=2 * lr)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = stage(0.5)
    part = OptimizerPart(model, optimizer, has_named_groups=True)
    save({"optimizer": part}, tmp_path)
    other, others = stage(3.0)
    load({"optimizer": OptimizerPart(other, others, has_named_groups=True)}, tmp_path)
    assert [group["lr"] for group in others.param_groups] == [3.0, 1.0, 6.0]
    assert [len(group["params"]) for group in others.param_groups] == [0, 2, 0]
    assert_same(optimizer.state_dict()["state"], others.state_dict()["state"])
    others.step()


def test_settings_that_are_tensors_are_told_apart_by_parameter(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    rates = (torch.tensor(0.1), torch.tensor(0.2))
    parameters = zip(model.parameters(), rates, strict=True)
    groups = [{"params": [one], "lr": rate} for one, rate in parameters]
    apart = torch.optim.AdamW(groups, foreach=False)
    part = OptimizerPart(model, apart, has_named_groups=True)
    save({"optimizer": part}, tmp_path)
    together = adamw(model, lr=torch.tensor(9.0), foreach=False)
    with pytest.raises(MismatchError, match="one group of the optimizer"):
        load({"optimizer": OptimizerPart(model, together, has_named_groups=True)}, tmp_path)
    load({"optimizer": part}, tmp_path)
    assert [group["lr"].item() for group in apart.param_groups] == pytest.approx([0.1, 0.2])


def of_groups(seed: int, *groups: str, kind: Any = torch.optim.SGD) -> tuple[Any, Any]:
    """Returns a model, and an optimizer with groups of its layers by number; rates are as these."""
    model = Training(seed).model
    made = [
        {"params": [p for at in each for p in model[int(at)].parameters()], "lr": 1.0 + at}
        for at, each in enumerate(groups)
    ]
    return model, kind(made, lr=9.0)


def rates(model: Any, optimizer: Any) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: g["lr"] for g in optimizer.param_groups for p in g["params"]}


def fall(epoch: int) -> float:
    return 0.5**epoch


class Wrapped:
    """A scheduler that shows no optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.inner = torch.optim.lr_scheduler.LambdaLR(optimizer, fall)
        self.state_dict, self.load_state_dict = self.inner.state_dict, self.inner.load_state_dict


DOORS: dict[str, Any] = {
    "alone": lambda one: {"lr_scheduler": one},
    "by name": lambda one: {"lr_scheduler": {"x": one}},
    "in state": lambda one: {"state": {"x": one}},
    "wrapped": lambda one: {"lr_scheduler": Wrapped(one.optimizer)},
}


def under(door: str, optimizer: Any) -> dict[str, Any]:
    """Returns the arguments that give a scheduler of an optimizer to a manager."""
    given: dict[str, Any] = DOORS[door](torch.optim.lr_scheduler.LambdaLR(optimizer, fall))
    return given


@pytest.mark.parametrize("door", DOORS)
def test_scheduled_groups_that_moved_are_refused(tmp_path: Path, door: str, caplog: Log) -> None:
    model, optimizer = of_groups(0, "0", "1")
    manager_of(tmp_path).save(1, model=model, optimizer=optimizer, **under(door, optimizer))
    model, optimizer = of_groups(1, "1", "0")
    parts = {"model": model, "optimizer": optimizer, **under(door, optimizer)}
    text = r"'1\.weight' is in group 0 and was in 1, '0\.weight' .*make the groups in the saved"
    with pytest.raises(MismatchError, match=text):
        manager_of(tmp_path).resume(**parts)
    manager_of(tmp_path).resume(model=model, optimizer=optimizer)  # its settings find them
    assert not [one for one in caplog.records if one.levelname == "WARNING"]
    manager_of(tmp_path).resume(**parts, strict=False)
    (warning,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "stand elsewhere than they were saved" in warning.getMessage()
    model, optimizer = of_groups(2, "0", "1")
    manager_of(tmp_path).resume(model=model, optimizer=optimizer, **under(door, optimizer))


def test_groups_without_a_scheduler_may_move_beside_one_that_has_it(tmp_path: Path) -> None:
    def parts(seed: int, *groups: str) -> dict[str, Any]:
        model, optimizer = of_groups(seed, *groups)
        free = torch.optim.SGD(model.parameters(), lr=7.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(free, fall)
        both = {"free": free, "held": optimizer}
        return {"model": model, "optimizer": both, "lr_scheduler": scheduler}

    manager_of(tmp_path).save(1, **parts(0, "0", "1"))
    now = parts(1, "1", "0")
    manager_of(tmp_path).resume(**now)
    wanted = {"1.weight": 2.0, "1.bias": 2.0, "0.weight": 1.0, "0.bias": 1.0}
    assert rates(now["model"], now["optimizer"]["held"]) == wanted


WEIGHTS = ("state.1.weight", "state.1.bias")


def test_what_saved_groups_had_and_no_group_has_is_refused(tmp_path: Path) -> None:
    for saved, now, names, glob in (
        (("0", "1"), ("0",), WEIGHTS, "optimizer.state.1.*"),
        (("0", "1"), ("0", ""), WEIGHTS, "optimizer.param_groups.1.*"),
        (("01",), ("0",), WEIGHTS, "optimizer.state.1.*"),
        (("01", ""), ("01",), ("param_groups.1",), "optimizer.param_groups.1"),
        (("", "01"), ("01",), ("param_groups.0",), "optimizer.param_groups.0.*"),
        (("", "0", "1"), ("0", "", "1"), ("param_groups.0",), "*"),
    ):
        model, optimizer = of_groups(0, *saved)
        manager_of(tmp_path).save(1, model=model, optimizer=optimizer)
        model, optimizer = of_groups(1, *now)
        parts = {"model": model, "optimizer": optimizer}
        text = "in none of its groups now.*add_param_group"
        with pytest.raises(MismatchError, match=text) as caught:
            manager_of(tmp_path).resume(**parts)
        assert caught.value.left == tuple(f"optimizer.{name}" for name in names), (saved, now)
        manager_of(tmp_path).resume(**parts, allow_missing=[glob])
        manager_of(tmp_path).resume(**parts, strict=False)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_parameters_frozen_or_in_no_model_need_no_group(tmp_path: Path, is_wrapped: bool) -> None:
    model, optimizer = of_groups(0, "0", "1")
    manager_of(tmp_path).save(1, model=model, optimizer=optimizer)
    model, optimizer = of_groups(1, "0")
    held = torch.compile(model, backend="eager") if is_wrapped else model
    with pytest.raises(MismatchError, match=r"'optimizer\.state\.1\.weight'"):
        manager_of(tmp_path).resume(model=held, optimizer=optimizer)
    model[1].requires_grad_(False)
    manager_of(tmp_path).resume(model=held, optimizer=optimizer)
    smaller = {"model": model[:1], "optimizer": optimizer}
    manager_of(tmp_path).resume(**smaller, translate=lambda name: name if name[0] == "0" else None)
    manager_of(tmp_path).resume(**smaller, allow_missing=["model.1.*"])


def test_log_and_report_tell_which_settings_followed_parameters(
    tmp_path: Path, caplog: Log
) -> None:
    model, optimizer = of_groups(0, "01")
    optimizer.param_groups[0]["lr"] = 5.0
    manager_of(tmp_path).save(1, model=model, optimizer=optimizer)
    model, optimizer = of_groups(1, "0", "1")
    optimizer.param_groups[1]["mine"] = 1
    parts = {"model": model, "optimizer": optimizer}
    report = manager_of(tmp_path).resume(**parts, strict=False).report
    assert rates(model, optimizer) == dict.fromkeys(rates(model, optimizer), 5.0)
    stayed, followed = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "1 name, which stays as it was: `optimizer.param_groups.1.mine`" in stayed
    assert "which follow other names: " in followed and "`optimizer.param_groups.1.*`" in followed
    assert report is not None and report.missing == ("optimizer.param_groups.1.mine",)


def test_settings_that_only_a_group_here_has_stay_with_it(tmp_path: Path) -> None:
    model, optimizer = of_groups(0, "0", "1")
    manager_of(tmp_path).save(1, model=model, optimizer=optimizer)
    model, optimizer = of_groups(1, "1", "0")
    optimizer.param_groups[0]["mine"] = 1
    manager_of(tmp_path).resume(model=model, optimizer=optimizer, allow_missing=["*.mine"])
    assert [(group["lr"], group.get("mine")) for group in optimizer.param_groups] == [
        (2, 1),
        (1, None),
    ]
