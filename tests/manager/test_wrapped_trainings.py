"""A manager saves and resumes wrapped models whose submodules are called as wrappers' are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.wrapped import MODELS, WRAPS, Tree, filled, group_of_one, held
from torch import nn
from trainings import manager_of

import torch_dcpx as dcpx
from torch_dcpx import KeyMap

# What the wrapper makes first comes first in the state: DCP's functions then swap the two.
MODELS_IN_ORDER = {
    **{name: MODELS[name] for name in ("norms", "both", "parameters")},
    "module first": lambda: Tree(module=Tree(a=nn.Linear(2, 2)), a=nn.Linear(2, 2)),
}
KINDS = ("none", "DDP", "compile", "DDP(compile)")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with group_of_one():
        yield


def training(name: str, wrap: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model and its optimizer, after a step in which no two gradients are equal."""
    model = WRAPS[wrap](filled(MODELS_IN_ORDER[name](), seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, seed + number)
    optimizer.step()
    return model, optimizer


def assert_equal(mine: tuple[Any, Any], its: tuple[Any, Any]) -> None:
    for a, b in zip(held(mine[0]), held(its[0]), strict=True):
        assert torch.equal(a, b)
    for p, q in zip(mine[0].parameters(), its[0].parameters(), strict=True):
        assert torch.equal(mine[1].state[p]["exp_avg"], its[1].state[q]["exp_avg"])
    assert mine[1].param_groups[0]["lr"] == its[1].param_groups[0]["lr"]


def some_pairs(*, every: bool) -> list[tuple[str, str]]:
    """Returns who has saved and who resumes: each with each, or with itself and the next one."""
    after = 4 if every else 2
    return [(KINDS[a], KINDS[(a + b) % 4]) for a in range(4) for b in range(after)]


@pytest.mark.parametrize("name", MODELS_IN_ORDER)
def test_any_wrapper_resumes_what_any_has_saved(tmp_path: Path, name: str) -> None:
    sources = {}
    for saved in KINDS:
        source = sources[saved] = training(name, saved, 1)
        manager = manager_of(tmp_path / saved)
        manager.save(1, model=source[0], optimizer=source[1])
        manager.export(1, tmp_path / "out", overwrite=True)
        model = filled(MODELS_IN_ORDER[name](), 9)
        dcpx.load_pretrained(model, tmp_path / "out")
        for mine, its in zip(held(model), held(source[0]), strict=True):
            assert torch.equal(mine, its)
    for translate in (None, KeyMap()):
        for saved, wrap in some_pairs(every=translate is None):
            model, optimizer = training(name, wrap, 5)
            parts = {"model": model, "optimizer": optimizer}
            manager_of(tmp_path / saved).resume(**parts, translate=translate)
            assert_equal((model, optimizer), sources[saved])


@pytest.mark.parametrize("name", MODELS_IN_ORDER)
def test_wrappers_within_a_model_mix_no_names(tmp_path: Path, name: str) -> None:
    def within(wrap: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = training(name, wrap, seed)
        return nn.Sequential(nn.Identity(), model), optimizer

    for saved, wrap in some_pairs(every=False):
        source, other = within(saved, 1), within(wrap, 5)
        manager = manager_of(tmp_path / saved)
        manager.save(1, model=source[0], optimizer=source[1])
        manager.resume(model=other[0], optimizer=other[1])
        assert_equal(other, source)


def test_translate_renames_a_submodule_that_is_called_module(tmp_path: Path) -> None:
    model, optimizer = training("norms", "DDP", 1)
    manager = manager_of(tmp_path)
    manager.save(1, model=model, optimizer=optimizer)
    other = Tree(a=nn.Linear(2, 2), norms=nn.ModuleList([Tree(norm=nn.BatchNorm1d(2))]))
    its = torch.optim.AdamW(other.parameters(), lr=9.0)
    names = KeyMap((r"\.module\.", ".norm."))
    manager.resume(model=other, optimizer=its, translate=names)
    assert_equal((other, its), (model, optimizer))


@pytest.mark.parametrize("wrap", KINDS)
def test_states_under_the_names_of_ddp_follow_their_parameters(tmp_path: Path, wrap: str) -> None:
    """As of a training that saved `ddp.state_dict()`, with the optimizer by those names."""
    model, optimizer = training("norms", "none", 1)
    names = [f"module.{name}" for name, _ in model.named_parameters()]
    own = optimizer.state_dict()
    state = {
        "model": {f"module.{name}": value for name, value in model.state_dict().items()},
        "optimizer": {
            "state": {names[number]: one for number, one in own["state"].items()},
            "param_groups": [{**own["param_groups"][0], "params": names}],
        },
    }
    dcpx.save(state, tmp_path / "step-1", no_dist=True)
    for wrappers in (None, True):
        other, its = training("norms", wrap, 5)
        given = {"model": other, "optimizer": its}
        with pytest.raises(dcpx.MismatchError, match=r"translate=KeyMap\(\) leaves them out"):
            manager_of(tmp_path).resume(**given)
        manager_of(tmp_path).resume(**given, translate=KeyMap(wrappers=wrappers))
        assert_equal((other, its), (model, optimizer))
