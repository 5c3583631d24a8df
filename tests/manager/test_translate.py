"""`resume(translate=)`: a training goes on under other names, model and optimizers alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import assert_same
from trainings import Training, manager_of, save_steps

from torch_dcpx import (
    _C,
    KeyMap,
    Merge,
    MismatchError,
    NotCommittedError,
    OptionError,
    PlanError,
    Split,
    StorageError,
    Transpose,
    UnsupportedError,
)
from torch_dcpx.checkpoint.same_call import told_rules
from torch_dcpx.manager.translate import groups_by_parameter

RENAMES = KeyMap((r"^0\.", "first."), (r"^1\.", "net.module.last."))


class Renamed(torch.nn.Module):
    """The model of Training under other names; one is what wrappers put into names."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(5, 7)
        self.net = torch.nn.ModuleDict({"module": torch.nn.ModuleDict()})
        self.net["module"]["last"] = torch.nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net["module"]["last"](self.first(x))
        return y


def function(name: str) -> str:
    return name.replace("0.", "first.").replace("1.", "net.module.last.")


def training_of(model: Any) -> Training:
    training = Training(3)
    training.model = model
    training.optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    training.scheduler = torch.optim.lr_scheduler.MultiStepLR(training.optimizer, [2, 4])
    return training


@pytest.fixture
def saved(tmp_path: Path) -> Training:
    training = Training()
    for step in (1, 2):
        training.train(step)
    manager_of(tmp_path).save(2, **training.parts, user_content={"module.a": 1})
    return training


@pytest.mark.parametrize("translate", [RENAMES, function], ids=["map", "function"])
def test_renamed_training_goes_on_to_the_bit(
    tmp_path: Path, saved: Training, translate: Any
) -> None:
    other = training_of(Renamed())
    info = manager_of(tmp_path).resume(**other.parts, translate=translate)
    assert info.user_content == {"module.a": 1}
    assert info.report is not None and info.report.is_whole
    assert info.report.unexpected == ()
    assert [other.train(step) for step in (3, 4)] == [saved.train(step) for step in (3, 4)]
    assert_same(list(saved.model.parameters()), list(other.model.parameters()))


def test_names_that_two_parameters_swap_take_their_states_along(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.ParameterDict({"a": torch.rand(3), "b": torch.rand(3)})
        groups = [{"params": [model["a"]], "lr": 1.0}, {"params": [model["b"]], "lr": 2.0}]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        (model["a"].sum() + 5 * model["b"].sum()).backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(0)
    manager_of(tmp_path).save(1, model=model, optimizer={"x.state": optimizer})
    other, swapped = made(1)
    manager_of(tmp_path).resume(
        model=other, optimizer={"x.state": swapped}, translate=KeyMap({"a": "b", "b": "a"})
    )
    assert torch.equal(other["a"], model["b"]) and torch.equal(other["b"], model["a"])
    buffers = [swapped.state[other[name]]["momentum_buffer"] for name in "ab"]
    assert_same(buffers, [optimizer.state[model[name]]["momentum_buffer"] for name in "ba"])
    # Groups are numbered: the parameter that is named "a" now had the settings of the second one.
    assert [group["lr"] for group in swapped.param_groups] == [2.0, 1.0]


RESHAPED = [
    Split(r"0\.weight", ["a", "b"], sizes=[3, 4]),
    Merge([r"0\.bias", r"1\.bias"], "bias"),
    Transpose(r"1\.weight"),
]


def test_what_changes_shapes_is_taken_without_an_optimizer(tmp_path: Path, saved: Training) -> None:
    for rule in RESHAPED:
        other = Training(1)
        before = {name: value.clone() for name, value in other.model.state_dict().items()}
        with pytest.raises(UnsupportedError, match=r"translate reshapes '.*load_optimizer=False"):
            manager_of(tmp_path).resume(**other.parts, translate=KeyMap(rule))
        assert_same(before, other.model.state_dict())
        moments = [value["exp_avg"] for value in other.optimizer.state.values()]
        assert not any(one.any() for one in moments)
        model: Any = torch.nn.Module()
        mapped = KeyMap(rule).resolve({n: tuple(v.shape) for n, v in before.items()})
        for name, entry in mapped.items():
            model.register_buffer(name.replace(".", "_"), torch.zeros(entry.sizes))
        rules = KeyMap(rule, lambda name: name.replace(".", "_"))
        info = manager_of(tmp_path).resume(model=model, optimizer=None, translate=rules)
        assert info.report is not None and info.report.is_whole
        total = sum(value.double().sum() for value in saved.model.state_dict().values())
        torch.testing.assert_close(sum(b.double().sum() for b in model.buffers()), total)


def test_what_is_missing_is_told_by_the_models_names(tmp_path: Path, saved: Training) -> None:
    other = Renamed()
    kept = other.first.bias.detach().clone()
    rules = KeyMap({"0.bias": None}, *RENAMES.rules)
    manager = manager_of(tmp_path)
    with pytest.raises(MismatchError) as raised:
        manager.resume(model=other, translate=rules)
    assert raised.value.missing == ("model.first.bias",)
    info = manager.resume(model=other, translate=rules, strict=False)
    assert info.report is not None
    assert info.report.missing == ("model.first.bias",)
    assert "model.0.bias" in info.report.unexpected
    assert torch.equal(other.first.bias, kept)
    assert torch.equal(other.first.weight, saved.model[0].weight)


def test_rules_that_do_not_fit_are_refused_first(tmp_path: Path, saved: Training) -> None:
    other = Training(1)
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    wrong: list[tuple[Any, Any, str]] = [
        (OptionError, 5, "translate must be a KeyMap, a function"),
        (OptionError, {"0.bias": "x"}, "got a dict"),
        (PlanError, KeyMap({"none": "x"}), "matches no stored name: 'none'"),
        (PlanError, KeyMap({"0.bias": "1.bias"}), "both become '1.bias'"),
        (PlanError, lambda _: 5, "makes 5 of '0.weight'"),
    ]
    for kind, translate, text in wrong:
        with pytest.raises(kind, match=text):
            manager_of(tmp_path).resume(**other.parts, translate=translate)
        assert_same(before, other.model.state_dict())
    with pytest.raises(OptionError, match="no model is given"):
        manager_of(tmp_path).resume(state={"x": 1}, translate=RENAMES)


def test_dry_run_shows_what_resume_would_do(tmp_path: Path, saved: Training) -> None:
    manager = manager_of(tmp_path)
    shown = "0.weight -> first.weight\n0.bias -> first.bias\n"
    shown += "1.weight -> net.module.last.weight\n1.bias -> net.module.last.bias"
    for tag in (None, 2, "step-2"):
        assert str(manager.dry_run(RENAMES, tag)) == shown
    names = ("0.weight", "0.bias", "1.weight", "1.bias")
    assert manager.dry_run(lambda _: None).dropped == names
    with pytest.raises(PlanError, match="matches no stored name"):
        manager.dry_run(KeyMap({"none": "x"}))
    with pytest.raises(StorageError, match="step-7"):
        manager.dry_run(RENAMES, 7)
    with pytest.raises(NotCommittedError, match="nothing lies"):
        manager_of(tmp_path / "none").dry_run(RENAMES)
    with pytest.raises(OptionError):
        manager.dry_run(None)  # type: ignore[arg-type]


def test_identity_costs_a_resume_no_call_and_no_byte(tmp_path: Path, saved: Training) -> None:
    counts = []
    for translate in (None, None, KeyMap(), KeyMap(lambda name: name)):  # the first warms caches
        other = Training(1)
        manager = manager_of(tmp_path)
        before = _C.call_counts()
        info = manager.resume(**other.parts, translate=translate)
        calls = {name: n - before.get(name, 0) for name, n in _C.call_counts().items()}
        assert info.report is not None and info.report.read is not None
        counts.append((calls, info.report.nbytes, info.report.items, info.report.read.read_bytes))
        assert_same(saved.model.state_dict(), other.model.state_dict())
    assert counts[1] == counts[2] == counts[3]


def test_ranks_compare_all_of_a_map_but_what_functions_do() -> None:
    maps = [
        KeyMap(), KeyMap(wrappers=False), KeyMap({"a": "b"}), KeyMap({"a": None}),
        KeyMap(("a", "b")), KeyMap(Split("a", ["b"])), KeyMap(Split("a", ["b"], 1)),
        KeyMap(function), None,
    ]  # fmt: skip
    assert len({told_rules(one) for one in maps}) == len(maps)
    long = [KeyMap((re.compile("x" * 300 + end), "y")) for end in "ab"]  # type: ignore[arg-type]
    assert told_rules(long[0]) != told_rules(long[1])
    assert told_rules(KeyMap(Split("a", ["b"]))) == told_rules(KeyMap(Split("a", ("b",))))
    assert told_rules(KeyMap(str)) == told_rules(KeyMap(function))
    assert told_rules(KeyMap({"a": "b", "c": None})) == told_rules(KeyMap({"c": None, "a": "b"}))


def test_fresh_start_needs_no_names(tmp_path: Path) -> None:
    assert manager_of(tmp_path).resume(model=Renamed(), translate=RENAMES).is_fresh
    save_steps(manager_of(tmp_path), 1)
    with pytest.raises(PlanError, match="matches no stored name"):
        manager_of(tmp_path).resume(model=Renamed(), translate=RENAMES)


def test_group_of_frozen_tensors_that_are_split_keeps_its_settings(tmp_path: Path) -> None:
    training = Training()
    training.model[1].requires_grad_(False)
    groups = [{"params": training.model[0].parameters()}, {"params": [training.model[1].weight]}]
    training.optimizer = torch.optim.AdamW([groups[0], {**groups[1], "lr": 0.7}], lr=0.1)
    training.gradients(1)
    training.optimizer.step()
    manager_of(tmp_path).save(1, model=training.model, optimizer=training.optimizer)
    layers, parts = training.model, [torch.nn.Parameter(torch.zeros(n, 7), False) for n in (1, 2)]
    other = torch.nn.ParameterDict({"a": parts[0], "b": parts[1], "bias": layers[1].bias})
    model = torch.nn.ModuleDict({"0": layers[0], "1": other})
    optimizer = torch.optim.AdamW(
        [{"params": layers[0].parameters()}, {"params": parts, "lr": 5.0}], lr=9.0
    )
    rules = KeyMap(Split(r"1\.weight", ["1.a", "1.b"], sizes=[1, 2]))
    manager_of(tmp_path).resume(model=model, optimizer=optimizer, translate=rules)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.7]
    assert_same(layers[1].weight, torch.nn.Parameter(torch.cat(parts), False))
    optimizer.step()


def test_settings_by_parameter_may_be_tensors_of_several_elements() -> None:
    scales = {name: {"scales": torch.ones(3), "of": {"x": torch.ones(2)}} for name in "ab"}
    (group,) = groups_by_parameter(scales, [["a", "b"]])
    assert group["params"] == ["a", "b"]
    scales["b"]["of"]["x"][1] = 2
    with pytest.raises(MismatchError, match="'a' and 'b' are one group of the optimizer"):
        groups_by_parameter(scales, [["a", "b"]])
