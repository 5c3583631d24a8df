"""Each entry of an optimizer comes back as what it was: class, sharding, strides, keys, values."""

from __future__ import annotations

import copy
import json
from collections import deque, namedtuple
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from classes import EveryClass, Lookahead, described
from torch import optim
from trainings import Training, manager_of

from torch_dcpx import CorruptionError, KeyMap, MismatchError, UnsupportedError
from torch_dcpx.manager.optimizer_kinds import KindRecord, record_of
from torch_dcpx.storage.names import root_lock_number


def made(kind: Any, seed: int) -> Training:
    training = Training(seed)
    training.optimizer = kind(training.model.parameters())
    return training


def train(training: Training, *steps: int) -> dict[str, Any]:
    for step in steps:
        training.gradients(step)
        training.optimizer.step()
    return described(dict(training.model.named_parameters()))


def parts(training: Training) -> dict[str, Any]:
    return {"model": training.model, "optimizer": training.optimizer}


KINDS = {
    "every class": EveryClass,
    "own entries": lambda parameters: Lookahead(optim.AdamW(list(parameters), lr=0.1)),
    "a key with a dot": lambda parameters: Lookahead(optim.SGD(list(parameters), 0.1), "a.b"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_entries_come_back_as_they_were(tmp_path: Path, kind: str) -> None:
    for has_state in (False, True):
        training, other = made(KINDS[kind], 0), made(KINDS[kind], 1)
        train(training, 1, 2, 3)
        if has_state:
            train(other, 7)
        manager_of(tmp_path).save(3, **parts(training))
        manager_of(tmp_path).resume(**parts(other))
        held = [described(one.optimizer.state_dict()) for one in (training, other)]
        assert held[0] == held[1], has_state
        assert train(training, 4, 5, 6) == train(other, 4, 5, 6)


def test_states_of_renamed_parameters_come_back_as_they_were(tmp_path: Path) -> None:
    training, other = made(EveryClass, 0), made(EveryClass, 1)
    train(training, 1)
    manager_of(tmp_path).save(1, **parts(training))
    renamed = torch.nn.Sequential()
    renamed.add_module("zero", other.model[0])
    renamed.add_module("one", other.model[1])
    names = {"0": "zero", "1": "one"}
    other.model = renamed
    other.optimizer = EveryClass(renamed.parameters())  # type: ignore[assignment]
    translate = KeyMap(lambda name: names[name[0]] + name[1:])
    manager_of(tmp_path).resume(**parts(other), translate=translate)
    held = [described(one.optimizer.state_dict()["state"]) for one in (training, other)]
    assert held[0] == held[1]


def test_usual_states_need_no_record() -> None:
    for kind in (optim.AdamW, optim.Adagrad, optim.Adafactor, optim.Rprop):
        training = made(kind, 0)
        training.model.to(memory_format=torch.channels_last)
        train(training, 1, 2)
        own = training.optimizer.state_dict()
        names = dict(enumerate(training.model.parameters()))
        assert record_of(own, names).as_items() == {}  # type: ignore[arg-type]


class Color(Enum):
    RED = 1


def test_key_that_only_its_owner_can_make_is_refused_unless_it_is_there(tmp_path: Path) -> None:
    class Keyed(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for one in group["params"]:
                    self.state[one].setdefault("by", {Color.RED: 0})[Color.RED] += 1

    training, other = made(Keyed, 0), made(Keyed, 1)
    train(training, 1, 2)
    manager_of(tmp_path).save(1, **parts(training))
    with pytest.raises(MismatchError, match=r"key 'Color.RED', a .*Color, which only"):
        manager_of(tmp_path).resume(**parts(other))
    assert not other.optimizer.state
    train(other, 1)
    manager_of(tmp_path).resume(**parts(other))
    assert [own["by"] for own in other.optimizer.state.values()] == [{Color.RED: 2}] * 4


class Nested(Lookahead):
    def state_dict(self) -> Any:
        return {"base": self.inner.state_dict()}


class Global(optim.SGD):
    def state_dict(self) -> Any:
        own = super().state_dict()
        own["state"]["seen"] = {"n": 1}
        return own


class Bare(optim.SGD):
    def state_dict(self) -> Any:
        own = super().state_dict()
        own["state"][0] = torch.ones(2)
        return own


REFUSED: list[tuple[Any, str]] = [
    (Bare, "a parameter's state is a Tensor, not a dict"),
    (lambda parameters: Nested(optim.SGD(list(parameters), 0.1)), "has 'base', not 'state'"),
    (Global, "its state has 'seen', which is of no parameter"),
    (
        lambda parameters: [Lookahead(optim.SGD([one], 0.1)) for one in parameters],
        "has 'lookahead' besides, not under a list of optimizers: give a dict by name",
    ),
]


def test_what_no_resume_could_give_back_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    for kind, text in REFUSED:
        training = made(kind, 0)
        with pytest.raises(UnsupportedError, match=text):
            manager_of(tmp_path).save(1, **parts(training))
        files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
        assert [name for name in files if root_lock_number(name) is None] == []


READ_AS = {
    "a.state.0.weight": "state",
    "a.state.1.bias.x": "state",
    "a.param_groups.0": "param_groups",
    "a.dcpx_kinds": "dcpx_kinds",
    "a.lookahead": "lookahead",
    **dict.fromkeys(("a.param_groups", "a.state", "a.state.x", "a.b", "as"), ""),
}


@pytest.mark.parametrize("other", READ_AS)
def test_optimizer_that_would_be_read_as_another_is_refused(tmp_path: Path, other: str) -> None:
    def given(seed: int) -> dict[str, Any]:
        training = Training(seed)
        both = [optim.SGD(training.model.parameters(), 0.1, momentum=0.9) for _ in range(2)]
        training.gradients(1)
        both[1].step()
        return {"model": training.model, "optimizer": {"a": Lookahead(both[0]), other: both[1]}}

    if kind := READ_AS[other]:
        with pytest.raises(UnsupportedError, match=f"read '{other}' as the {kind} of 'a'; give"):
            manager_of(tmp_path).save(1, **given(0))
        assert not list(tmp_path.rglob("step*"))
        return
    saved, now = given(0), given(1)
    manager_of(tmp_path).save(1, **saved)
    manager_of(tmp_path).resume(**now)
    states = [described(one["optimizer"][other].state_dict()) for one in (saved, now)]
    assert states[0] == states[1]


def holding(value: Any, seed: int = 0, place: str = "state") -> Training:
    """Returns a training whose optimizer has a value in a state, or among its settings."""
    training = made(lambda parameters: optim.SGD(parameters, 0.1), seed)
    value = value() if callable(value) else value
    group = training.optimizer.param_groups[0]
    held = group if place == "param_groups" else training.optimizer.state[group["params"][0]]
    held["v"] = value
    return training


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


Pair = namedtuple("Pair", "a b")


VALUES: list[tuple[Any, str, str]] = [
    (quantized, "state", r"'state\.0\.weight\.v' is a quantized Tensor \(torch\.qint8\)"),
    (lambda: [{"x": quantized()}], "param_groups", r"'param_groups\.0\.v\.0\.x' is a quantized"),
    (numpy.arange(3), "state", r"SGD has a numpy\.ndarray in the state 'v'"),
    ({"x": [1, (numpy.array(2.0),)]}, "state", r"SGD has a numpy\.ndarray in the state 'v'"),
    (range(3), "state", r"a builtins\.range in"),
    (Pair(1, 2), "state", r"a .*\.Pair in"),
]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_values_that_no_load_makes_anew_are_refused_at_the_save(tmp_path: Path) -> None:
    for value, place, text in VALUES:
        with pytest.raises(UnsupportedError, match=text):
            manager_of(tmp_path).save(1, **parts(holding(value, 0, place)))
        assert not list(tmp_path.rglob("step*"))


def test_values_that_an_optimizers_own_load_takes_are_saved(tmp_path: Path) -> None:
    class Own(optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            self.taken = state_dict["state"][0]["v"]

    training, other = made(lambda p: Own(p, 0.1), 0), made(lambda p: Own(p, 0.1), 1)
    training.optimizer.state[training.model[0].weight] = {"v": numpy.arange(3)}
    manager_of(tmp_path).save(1, **parts(training))
    manager_of(tmp_path).resume(**parts(other))
    assert other.optimizer.taken.tolist() == [0, 1, 2]  # type: ignore[attr-defined]


def marked(value: Any) -> Any:
    """As `described`, with classes and marks of tensors, and what sets and deques hold."""
    if isinstance(value, torch.Tensor):
        return type(value), value.requires_grad, value.is_leaf, value.dtype, value.tolist()
    if isinstance(value, (list, dict)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return type(value), [(key, marked(one)) for key, one in pairs]
    return type(value), value, getattr(value, "maxlen", None)


NO_LEAF = "no leaf"
KEPT = {
    "requires grad": torch.ones(3, requires_grad=True),
    NO_LEAF: torch.ones(3, requires_grad=True) * 2,
    "parameter": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
    "frozen": torch.nn.Parameter(torch.ones(3), requires_grad=False),
    "within": {"z": [torch.nn.Parameter(torch.ones(2)), 1], "a": 2, 5: {"x": torch.ones(1)}},
    "texts in a set": {"a", "b"},
    "deque": deque(["a", 1], maxlen=3),
}


@pytest.mark.parametrize("place", ["state", "param_groups"])
def test_marks_of_tensors_and_texts_in_sets_come_back(tmp_path: Path, place: str) -> None:
    for name, kept in KEPT.items():
        is_no_leaf = name == NO_LEAF
        if is_no_leaf and place == "param_groups":
            continue  # torch copies settings, and no tensor that is no leaf
        manager_of(tmp_path).save(1, **parts(holding(kept, 0, place)))
        now = torch.zeros(3) if is_no_leaf else copy.deepcopy(kept)
        wanted = kept.detach().requires_grad_() if is_no_leaf else kept
        for other in (holding(now, 1, place), made(lambda p: optim.SGD(p, 0.1), 1)):
            manager_of(tmp_path).resume(**parts(other))
            group = other.optimizer.param_groups[0]
            held = group if place == "param_groups" else other.optimizer.state[group["params"][0]]
            assert marked(held["v"]) == marked(wanted), name


def test_own_entries_that_an_optimizer_has_not_are_refused(tmp_path: Path) -> None:
    training = made(KINDS["own entries"], 0)
    train(training, 1)
    manager_of(tmp_path).save(1, **parts(training))
    plain = made(lambda parameters: optim.AdamW(parameters, lr=0.1), 1)
    with pytest.raises(MismatchError, match=r"had 'lookahead' beside .* AdamW has no such"):
        manager_of(tmp_path).resume(**parts(plain))
    assert not plain.optimizer.state
    manager_of(tmp_path).resume(**parts(plain), strict=False)
    assert len(plain.optimizer.state) == 4


def test_own_entries_that_were_not_saved_are_missing_by_name(tmp_path: Path) -> None:
    plain = made(lambda parameters: optim.AdamW(parameters, lr=0.1), 0)
    train(plain, 1)
    manager_of(tmp_path).save(1, **parts(plain))
    other = made(KINDS["own entries"], 1)
    with pytest.raises(MismatchError, match=r"optimizer\.lookahead\.calls"):
        manager_of(tmp_path).resume(**parts(other))
    manager_of(tmp_path).resume(**parts(other), allow_missing=["optimizer.lookahead.*"])
    assert len(other.optimizer.state) == 4


GOOD = {"format": 1, "kinds": [], "keys": {}, "empty": [], "extras": []}


def test_record_that_is_none_is_refused() -> None:
    assert KindRecord.decoded({"x": json.dumps(GOOD)}) == KindRecord()
    lies: list[dict[str, Any]] = [
        {"format": 2}, {"kinds": 1}, {"kinds": [[["T", [0], None, [0, 0], "cpu"], ["a"]]]},
        {"kinds": [[["T", [-1], None, None, "cpu"], ["a"]]]}, {"kinds": [[[1], ["a"]]]},
        {"kinds": [[["T", None, [None, ["x"], 1], None, "cpu"], ["a"]]]},
        {"kinds": [[["T", None, None, [64], "cpu"], ["a"]]]}, {"keys": {"a": [[1, 2]]}},
        {"keys": {"a": [["x", {"bytes": "zz"}]]}}, {"keys": {"a": [["x", {"a": 1, "b": 2}]]}},
        {"keys": {"a": [["x", [1]]]}}, {"empty": [[]]}, {"empty": [[None]]}, {"extras": [1]},
        {"grads": [1]}, {"parameters": 1},
    ]  # fmt: skip
    texts = ["", "[]", "{}", "null", "[" * 100_000, *(json.dumps(GOOD | lie) for lie in lies)]
    for wrong in texts:
        with pytest.raises(CorruptionError, match="describes no optimizer's state"):
            KindRecord.decoded({"x": wrong})


def of_both(training: Training, *, has_second: bool) -> Any:
    groups = [{"params": training.model[0].parameters(), "lr": 0.2}]
    groups += [{"params": training.model[1].parameters(), "lr": 0.1}] * has_second
    return optim.AdamW(groups)


def test_states_of_a_parameter_that_is_in_no_group_are_not_left_out(tmp_path: Path) -> None:
    training = Training(0)
    training.optimizer = of_both(training, has_second=True)
    train(training, 1)
    manager_of(tmp_path).save(1, **parts(training))
    for strict in (True, False):
        other = Training(1)
        other.optimizer = of_both(other, has_second=False)
        before = described(dict(other.model.named_parameters()))
        with pytest.raises(MismatchError, match=r"`optimizer\.state\.1\..*add_param_gr") as caught:
            manager_of(tmp_path).resume(**parts(other), strict=strict)
        assert len(caught.value.left or ()) == 6
        assert described(dict(other.model.named_parameters())) == before
        allowed = ["optimizer.state.1.*"]
        manager_of(tmp_path).resume(**parts(other), strict=strict, allow_missing=allowed)
        assert len(other.optimizer.state) == 2


def test_parameters_of_a_larger_model_are_not_left_out_unless_allowed(tmp_path: Path) -> None:
    training, other = Training(0), Training(1)
    train(training, 1)
    manager_of(tmp_path).save(1, **parts(training))
    other.model = other.model[:1]
    other.optimizer = optim.AdamW(other.model.parameters(), lr=0.1)
    with pytest.raises(MismatchError, match="8 names of what was saved that nothing here takes"):
        manager_of(tmp_path).resume(**parts(other))
    manager_of(tmp_path).resume(model=other.model, translate=lambda n: None if n[0] == "1" else n)
    manager_of(tmp_path).resume(**parts(other), strict=False)
    assert len(other.optimizer.state) == 2


def test_settings_that_training_added_to_a_group_come_back(tmp_path: Path) -> None:
    training, other = Training(0), Training(1)
    more = {
        "initial_lr": 0.7, "step": torch.tensor(4), "more": {"x": [1, torch.ones(2)], "none": {}}
    }  # fmt: skip
    training.optimizer.param_groups[0] |= more
    manager_of(tmp_path).save(1, **parts(training))
    manager_of(tmp_path).resume(**parts(other))
    group = other.optimizer.param_groups[0]
    assert described({key: group[key] for key in more}) == described(more)
