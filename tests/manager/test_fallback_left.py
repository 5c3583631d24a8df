"""A resume that passes over a damaged checkpoint leaves nothing of it in what the older one lacks.

`Grown` is saved at step 2 with values that step 1 lacks, and step 2 is damaged behind them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainings import damage, large, manager_of

from torch_dcpx import CorruptionError, KeyMap, MismatchError, PerRank


class Grown(nn.Module):
    """A body, and a head that came later. `value` fills both."""

    def __init__(self, value: float, *, has_head: bool = True) -> None:
        super().__init__()
        if has_head:
            self.head = nn.Linear(300, 100)
        self.body = nn.Linear(300, 100)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)


def optimizer_of(model: nn.Module, *, is_stepped: bool) -> torch.optim.Adam:
    """An optimizer with a state of equal numbers, or none."""
    optimizer = torch.optim.Adam(model.parameters())
    if is_stepped:
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad = one.detach().clone()
        optimizer.step()
    return optimizer


def saved(root: Path, one: dict[str, Any], two: dict[str, Any]) -> Path:
    """Saves both steps; the second is damaged."""
    manager = manager_of(root)
    manager.save(1, **one)
    manager.save(2, **two)
    damage(root / "step-2")
    return root


def renamed(name: str) -> str:
    return name.replace("old_", "")


HEAD = {"allow_missing": ["model.head.*"]}
FORGIVEN: dict[str, dict[str, Any]] = {
    "globs": HEAD,
    "not strict": {"strict": False},
    "both": {"strict": False, **HEAD},
    "globs behind a function": {**HEAD, "translate": renamed},
    "globs behind a map": {**HEAD, "translate": KeyMap({"body.weight": "body.weight"})},
}


@pytest.mark.parametrize("forgiven", FORGIVEN.values(), ids=FORGIVEN)
def test_part_of_a_model_that_only_the_damaged_one_holds(
    tmp_path: Path, forgiven: dict[str, Any]
) -> None:
    older, newer = Grown(1, has_head=False), Grown(2)
    root = saved(tmp_path, {"model": older}, {"model": newer})
    with pytest.raises(CorruptionError, match=r"step-2.* does not hold model\.head\.") as info:
        manager_of(root).resume(model=Grown(0), **forgiven)
    assert info.value.path is not None and "step-2" in info.value.path


def test_part_that_the_damaged_one_holds_under_another_name(tmp_path: Path) -> None:
    """Of a wrapped model: what is stored of it comes without the wrapper's part of a name."""
    older, newer, own = Grown(1, has_head=False), Grown(2), Grown(0)
    own.top = nn.Sequential()
    own.top.add_module("_orig_mod", own.head)
    del own.head
    root = saved(
        tmp_path,
        {"model": older, "optimizer": optimizer_of(older, is_stepped=True)},
        {"model": newer, "optimizer": optimizer_of(newer, is_stepped=True)},
    )
    with pytest.raises(CorruptionError, match=r"does not hold model\.top\.") as info:
        manager_of(root).resume(
            model=own,
            optimizer=optimizer_of(own, is_stepped=True),
            translate=lambda name: name.replace("head.", "top."),
            allow_missing=["model.top.*", "optimizer.state.top.*"],
        )
    assert "optimizer.state.top." in str(info.value)


@pytest.mark.parametrize(
    "forgiven",
    [
        {"allow_missing": ["model.head.*"], "translate": lambda n: None if "head" in n else n},
        {
            "allow_missing": ["model.head.*"],
            "translate": KeyMap({"head.weight": None, "head.bias": None}),
        },
        {"strict": False, "translate": KeyMap({"head.weight": None, "head.bias": None})},
    ],
    ids=["function", "map", "not strict"],
)
def test_what_the_rules_leave_out_of_both_is_as_it_was(
    tmp_path: Path, forgiven: dict[str, Any]
) -> None:
    root = saved(tmp_path, {"model": Grown(1)}, {"model": Grown(2)})
    model = Grown(0)
    assert manager_of(root).resume(model=model, **forgiven).tag == "step-1"
    assert model.head.weight.unique().tolist() == [0]
    assert model.body.weight.unique().tolist() == [1]


@pytest.mark.parametrize("forgiven", [HEAD, {**HEAD, "translate": renamed}], ids=["", "renamed"])
def test_what_neither_holds_is_as_it_was(tmp_path: Path, forgiven: dict[str, Any]) -> None:
    root = saved(
        tmp_path,
        {"model": Grown(1, has_head=False)},
        {"model": Grown(2, has_head=False)},
    )
    model = Grown(0)
    assert manager_of(root).resume(model=model, **forgiven).tag == "step-1"
    assert model.head.weight.unique().tolist() == [0]


class Live:
    """Gives its own tensor and dict, and counts what it was handed."""

    def __init__(self, *names: str) -> None:
        self.values = {name: large(0) for name in names}
        self.handed = 0

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.handed += 1


STATES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tensor": ({"a": large(1)}, {"a": large(2), "b": large(2)}, "b"),
    "nested tensor": ({"n": {"a": large(1)}}, {"n": {"a": large(2), "b": large(2)}}, "n.b"),
    "nested number": ({"n": {"a": large(1)}}, {"n": {"a": large(2), "b": 2}}, "n.b"),
    "list": ({"n": [large(1)]}, {"n": [large(2), large(2)]}, "n.1"),
    "Stateful": ({"a": Live("x")}, {"a": Live("x", "y")}, "a.y"),
}


@pytest.mark.parametrize(("one", "two", "name"), STATES.values(), ids=STATES)
def test_part_of_the_state_that_only_the_damaged_one_holds(
    tmp_path: Path, one: dict[str, Any], two: dict[str, Any], name: str
) -> None:
    root = saved(tmp_path, {"state": one}, {"state": two})
    with pytest.raises(CorruptionError, match=f"does not hold state.{name}"):
        manager_of(root).resume(state=two, allow_missing=[f"state.{name}"])


# ---- Optimizers ----------------------------------------------------------------------------------


def grown_optimizers(
    root: Path, *, is_stepped: bool = True, in_older: bool = False
) -> tuple[Path, Grown, torch.optim.Adam]:
    """Returns a root where only step 2 has states of the head, and what is to be resumed.

    With `in_older` step 1 has the head in its optimizer, too, without a state.
    """
    older, newer, own = Grown(1), Grown(2), Grown(0)
    alone = optimizer_of(older if in_older else older.body, is_stepped=not in_older)
    if in_older:
        older.body.weight.grad = older.body.weight.detach().clone()
        alone.step()
    saved(
        root,
        {"model": older, "optimizer": alone},
        {"model": newer, "optimizer": optimizer_of(newer, is_stepped=True)},
    )
    return root, own, optimizer_of(own, is_stepped=is_stepped)


@pytest.mark.parametrize(
    "forgiven",
    [
        {"allow_missing": ["optimizer.state.head.*"]},
        {"strict": False},
        {"allow_missing": ["optimizer.state.head.*"], "translate": renamed},
    ],
    ids=["globs", "not strict", "renamed"],
)
def test_state_that_is_kept_is_none_of_the_damaged_one(
    tmp_path: Path, forgiven: dict[str, Any]
) -> None:
    root, model, optimizer = grown_optimizers(tmp_path)
    with pytest.raises(CorruptionError, match=r"does not hold optimizer\.state\.head\."):
        manager_of(root).resume(model=model, optimizer=optimizer, **forgiven)


def test_optimizer_without_a_state_has_none_of_the_damaged_one(tmp_path: Path) -> None:
    root, model, optimizer = grown_optimizers(tmp_path, is_stepped=False)
    forgiven = {"allow_missing": ["optimizer.state.head.*"]}
    info = manager_of(root).resume(model=model, optimizer=optimizer, **forgiven)
    assert info.tag == "step-1"
    assert {id(one) for one in optimizer.state} == {id(p) for p in model.body.parameters()}


def test_state_that_the_older_one_says_was_none_goes(tmp_path: Path) -> None:
    root, model, optimizer = grown_optimizers(tmp_path, in_older=True)
    assert manager_of(root).resume(model=model, optimizer=optimizer).tag == "step-1"
    assert [id(one) for one in optimizer.state] == [id(model.body.weight)]


def test_setting_that_is_a_tensor_is_none_of_the_damaged_one(tmp_path: Path) -> None:
    """The optimizer gives its tensor itself, and a load fills it."""
    older, newer, own = Grown(1), Grown(2), Grown(0)
    optimizers = [optimizer_of(model, is_stepped=True) for model in (older, newer, own)]
    for value, optimizer in zip((2.0, 0.0), optimizers[1:], strict=True):
        optimizer.param_groups[0]["extra"] = torch.tensor(value)
    root = saved(
        tmp_path,
        {"model": older, "optimizer": optimizers[0]},
        {"model": newer, "optimizer": optimizers[1]},
    )
    extra = "optimizer.param_groups.0.extra"
    with pytest.raises(CorruptionError, match=f"does not hold {extra}"):
        manager_of(root).resume(model=own, optimizer=optimizers[2], allow_missing=[extra])


# ---- Small values, which a load hands over at its end --------------------------------------------


class Scheduler:
    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class Reading(Scheduler):
    """A data loader that finds its own file in the checkpoint damaged, which comes too late."""

    damaged: str = ""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.damaged and state["epoch"] == 2:
            raise CorruptionError("my own file is damaged", path=self.damaged)
        super().load_state_dict(state)


def test_small_part_that_the_damaged_one_has_given_is_not_forgiven(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    manager.save(1, state={"x": large(1)}, dataloader=Reading(1))
    own = {"x": large(2), "rank": PerRank(2)}
    manager.save(2, state=own, dataloader=Reading(2), lr_scheduler=Scheduler(2))
    loader, scheduler = Reading(), Scheduler()
    asked = {"x": large(0), "rank": PerRank(0)}
    loader.damaged = str(tmp_path / "step-2" / "mine")
    with pytest.raises(CorruptionError, match=r"does not hold lr_scheduler") as info:
        manager_of(tmp_path).resume(
            state=asked,
            dataloader=loader,
            lr_scheduler=scheduler,
            allow_missing=["lr_scheduler", "state.rank"],
        )
    assert "state.rank" not in str(info.value)  # it comes behind the data loader


def test_small_part_that_a_damaged_read_has_not_given_may_be_missing(tmp_path: Path) -> None:
    root = saved(
        tmp_path,
        {"state": {"x": large(1)}},
        {"state": {"x": large(2)}, "lr_scheduler": Scheduler(2), "dataloader": Scheduler(2)},
    )
    scheduler, loader, asked = Scheduler(), Scheduler(), {"x": large(0)}
    parts = {"state": asked, "lr_scheduler": scheduler, "dataloader": loader}
    with pytest.raises(CorruptionError) as info:
        manager_of(root).resume(**parts)
    assert isinstance(info.value.__cause__, MismatchError)
    found = manager_of(root).resume(**parts, allow_missing=["lr_scheduler", "dataloader"])
    assert (found.tag, scheduler.epoch, loader.epoch) == ("step-1", 0, 0)
    assert asked["x"].unique().tolist() == [1]
