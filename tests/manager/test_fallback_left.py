"""A resume that passes over a damaged checkpoint leaves nothing of it in what the older one lacks.

`Grown` is saved at step 2 with values that step 1 lacks, and step 2 is damaged behind them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainings import Called, Held, damage, large, manager_of

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


def optimizer_of(model: nn.Module, *, is_stepped: bool = True) -> torch.optim.Adam:
    """An optimizer with a state of equal numbers, or none."""
    optimizer = torch.optim.Adam(model.parameters())
    if is_stepped:
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad = one.detach().clone()
        optimizer.step()
    return optimizer


def parts_of(model: nn.Module) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer_of(model)}


def saved(root: Path, one: dict[str, Any], two: dict[str, Any]) -> Path:
    """Saves both steps; the second is damaged."""
    manager = manager_of(root)
    manager.save(1, **one)
    manager.save(2, **two)
    damage(root / "step-2")
    return root


def lacks(root: Path, name: str, **how: Any) -> str:
    """Resumes, and is told of what the older one lacks."""
    with pytest.raises(CorruptionError, match=rf"step-2.* does not hold .*{name}") as info:
        manager_of(root).resume(**how)
    assert info.value.path is not None and "step-2" in info.value.path
    return str(info.value)


def renamed(name: str) -> str:
    return name.replace("old_", "")


def headless(name: str) -> str | None:
    return None if "head" in name else name


HEAD = {"allow_missing": ["model.head.*"]}
NO_HEAD = KeyMap({"head.weight": None, "head.bias": None})
SAME = KeyMap({"body.weight": "body.weight"})


def test_part_of_a_model_that_only_the_damaged_one_holds(tmp_path: Path) -> None:
    root = saved(tmp_path, {"model": Grown(1, has_head=False)}, {"model": Grown(2)})
    not_strict = {"strict": False}
    for more in ({}, not_strict, {"translate": renamed}, {"translate": SAME}):
        lacks(root, r"model\.head\.", model=Grown(0), **HEAD, **more)
    lacks(root, r"model\.head\.", model=Grown(0), strict=False)


def test_part_that_the_damaged_one_holds_under_another_name(tmp_path: Path) -> None:
    """Of a wrapped model: what is stored of it comes without the wrapper's part of a name."""
    own = Grown(0)
    own.top = nn.Sequential()
    own.top.add_module("_orig_mod", own.head)
    del own.head
    root = saved(tmp_path, parts_of(Grown(1, has_head=False)), parts_of(Grown(2)))
    told = lacks(
        root,
        r"model\.top\.",
        **parts_of(own),
        translate=lambda name: name.replace("head.", "top."),
        allow_missing=["model.top.*", "optimizer.state.top.*"],
    )
    assert "optimizer.state.top." in told


def test_what_neither_holds_or_the_rules_leave_out_of_both_is_as_it_was(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", {"model": Grown(1)}, {"model": Grown(2)})
    bare = [{"model": Grown(value, has_head=False)} for value in (1, 2)]
    small = saved(tmp_path / "small", *bare)
    for root, how in (
        (whole, {**HEAD, "translate": headless}),
        (whole, {**HEAD, "translate": NO_HEAD}),
        (whole, {"strict": False, "translate": NO_HEAD}),
        (small, HEAD),
        (small, {**HEAD, "translate": renamed}),
    ):
        model = Grown(0)
        assert manager_of(root).resume(model=model, **how).tag == "step-1"
        assert model.head.weight.unique().tolist() == [0]
        assert model.body.weight.unique().tolist() == [1]


STATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "b": ({"a": large(1)}, {"a": large(2), "b": large(2)}),
    "n.b": ({"n": {"a": large(1)}}, {"n": {"a": large(2), "b": large(2)}}),
    "n.c": ({"n": {"a": large(1)}}, {"n": {"a": large(2), "c": 2}}),
    "n.1": ({"n": [large(1)]}, {"n": [large(2), large(2)]}),
    "a.y": ({"a": Held(x=large(0))}, {"a": Held(x=large(0), y=large(0))}),
}


@pytest.mark.parametrize("name", STATES)
def test_part_of_the_state_that_only_the_damaged_one_holds(tmp_path: Path, name: str) -> None:
    one, two = STATES[name]
    root = saved(tmp_path, {"state": one}, {"state": two})
    lacks(root, f"state.{name}", state=two, allow_missing=[f"state.{name}"])


def test_state_that_is_kept_is_none_of_the_damaged_one(tmp_path: Path) -> None:
    older, name, missing = Grown(1), r"optimizer\.state\.head\.", ["optimizer.state.head.*"]
    alone = {"model": older, "optimizer": optimizer_of(older.body)}
    root = saved(tmp_path, alone, parts_of(Grown(2)))
    lacks(root, name, **parts_of(Grown(0)), allow_missing=missing)
    lacks(root, name, **parts_of(Grown(0)), allow_missing=missing, translate=renamed)
    lacks(root, name, **parts_of(Grown(0)), strict=False)
    model = Grown(0)
    optimizer = optimizer_of(model, is_stepped=False)
    info = manager_of(root).resume(model=model, optimizer=optimizer, allow_missing=missing)
    assert info.tag == "step-1"
    assert {id(one) for one in optimizer.state} == {id(p) for p in model.body.parameters()}


def test_state_that_the_older_one_says_was_none_goes(tmp_path: Path) -> None:
    older, model = Grown(1), Grown(0)
    optimizer = optimizer_of(older, is_stepped=False)
    older.body.weight.grad = older.body.weight.detach().clone()
    optimizer.step()
    root = saved(tmp_path, {"model": older, "optimizer": optimizer}, parts_of(Grown(2)))
    optimizer = optimizer_of(model)
    assert manager_of(root).resume(model=model, optimizer=optimizer).tag == "step-1"
    assert [id(one) for one in optimizer.state] == [id(model.body.weight)]


def test_setting_that_is_a_tensor_is_none_of_the_damaged_one(tmp_path: Path) -> None:
    """The optimizer gives its tensor itself, and a load fills it."""
    older, newer, own = (parts_of(Grown(value)) for value in (1, 2, 0))
    newer["optimizer"].param_groups[0]["extra"] = torch.tensor(2.0)
    own["optimizer"].param_groups[0]["extra"] = torch.tensor(0.0)
    extra = "optimizer.param_groups.0.extra"
    lacks(saved(tmp_path, older, newer), extra, **own, allow_missing=[extra])


def test_small_part_that_the_damaged_one_has_given_is_not_forgiven(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    manager.save(1, state={"x": large(1)}, dataloader=Held(epoch=1))
    own = {"x": large(2), "rank": PerRank(2)}
    manager.save(2, state=own, dataloader=Held(epoch=2), lr_scheduler=Held(epoch=2))

    def reads_its_own_file(state: dict[str, Any]) -> None:  # which comes too late
        if state["epoch"] == 2:
            raise CorruptionError("my own file", path=str(tmp_path / "step-2" / "mine"))

    loader = Called(lambda: {"epoch": 0}, reads_its_own_file)
    parts = {"dataloader": loader, "lr_scheduler": Held(epoch=0)}
    missing = ["lr_scheduler", "state.rank"]
    asked = {"x": large(0), "rank": PerRank(0)}
    with pytest.raises(CorruptionError, match=r"does not hold lr_scheduler") as info:
        manager_of(tmp_path).resume(state=asked, **parts, allow_missing=missing)
    assert "state.rank" not in str(info.value)  # it comes behind the data loader


def test_small_part_that_a_damaged_read_has_not_given_may_be_missing(tmp_path: Path) -> None:
    more = {"lr_scheduler": Held(epoch=2), "dataloader": Held(epoch=2)}
    root = saved(tmp_path, {"state": {"x": large(1)}}, {"state": {"x": large(2)}, **more})
    scheduler, loader, asked = Held(epoch=0), Held(epoch=0), {"x": large(0)}
    parts = {"state": asked, "lr_scheduler": scheduler, "dataloader": loader}
    with pytest.raises(CorruptionError) as info:
        manager_of(root).resume(**parts)
    assert isinstance(info.value.__cause__, MismatchError)
    found = manager_of(root).resume(**parts, allow_missing=["lr_scheduler", "dataloader"])
    assert (found.tag, scheduler.taken, loader.taken) == ("step-1", [], [])
    assert asked["x"].unique().tolist() == [1]
