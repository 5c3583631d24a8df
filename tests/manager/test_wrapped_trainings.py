"""A manager saves and resumes wrapped models, whole or their trained parts (`trainable_only`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import assert_same
from support.wrapped import MODELS, WRAPS, Tree, filled, group_of_one, held
from torch import nn
from torch.distributed.tensor import DTensor
from trainings import damage, fully_sharded, manager_of

import torch_dcpx as dcpx
from torch_dcpx import CorruptionError, KeyMap, MismatchError

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


WRAPPED = {
    "none": WRAPS["none"],
    "DDP": WRAPS["DDP"],
    "compile": WRAPS["compile"],
    "fsdp": fully_sharded,
}


class Adapted(nn.Module):
    """A frozen base, a trained adapter on top, and running statistics without parameters."""

    def __init__(self, seed: int, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(width, 64)
        self.norm = nn.BatchNorm1d(64, affine=False)
        self.base.requires_grad_(False)
        torch.manual_seed(seed)
        self.lora_A = nn.Linear(width, 2, bias=False)
        self.lora_B = nn.Linear(2, 64, bias=False)

    def forward(self, x: Any) -> Any:
        return self.norm(self.base(x)) + self.lora_B(self.lora_A(x))


def made(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = WRAPPED[kind](Adapted(seed))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)  # frozen ones are in its groups


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> list[float]:
    losses = []
    for step in steps:
        x = torch.rand(8, 64, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def stored(path: Path) -> set[str]:
    reader = dcpx.DcpxReader(path)
    names = reader.read_metadata().state_dict_metadata
    return {name.removeprefix("model.") for name in names if name.startswith("model.")}


@pytest.mark.parametrize("kind", WRAPPED)
def test_adapter_alone_is_saved_and_resumes_to_the_bit(tmp_path: Path, kind: str) -> None:
    model, optimizer = made(kind, 1)
    train(model, optimizer, 1, 2)
    with manager_of(tmp_path, trainable_only=True) as manager:
        manager.save(2, model=model, optimizer=optimizer)
    statistics = {f"norm.{name}" for name, _ in Adapted(0).norm.named_buffers()}
    assert stored(tmp_path / "step-2") == {"lora_A.weight", "lora_B.weight", *statistics}
    expected, mine = train(model, optimizer, 3, 4), optimizer.state_dict()
    for number, other in enumerate((*WRAPPED, *WRAPPED)):
        translate = KeyMap() if number >= len(WRAPPED) else None
        again, its_optimizer = made(other, 9)
        with manager_of(tmp_path, trainable_only=True) as manager:
            info = manager.resume(model=again, optimizer=its_optimizer, translate=translate)
        assert info.report is not None
        assert info.report.missing == ()
        assert train(again, its_optimizer, 3, 4) == expected
        its = its_optimizer.state_dict()
        assert_same({**mine, "state": full(mine)}, {**its, "state": full(its)})


def full(state: dict[str, Any]) -> dict[str, Any]:
    def whole(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    states = state["state"].items()
    return {number: {key: whole(one) for key, one in own.items()} for number, own in states}


def test_what_is_missing_is_an_error(tmp_path: Path) -> None:
    model, optimizer = made("none", 1)
    manager = manager_of(tmp_path, trainable_only=True)
    assert "trainable_only=True" in repr(manager)
    manager.save(1, model=model, optimizer=optimizer)
    with pytest.raises(MismatchError, match="trainable_only=True") as raised:
        manager_of(tmp_path).resume(model=model)
    assert raised.value.missing == ("model.base.weight", "model.base.bias")
    model.base.bias.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(MismatchError) as raised:
        manager.resume(model=model)
    assert raised.value.missing == ("model.base.bias",)
    with pytest.raises(dcpx.OptionError, match="trainable_only"):
        manager_of(tmp_path, trainable_only=1)


def test_whole_checkpoint_fills_the_base_too(tmp_path: Path) -> None:
    model, optimizer = made("none", 1)
    with torch.no_grad():
        model.base.bias.fill_(7)  # type: ignore[operator, union-attr]
    manager_of(tmp_path).save(1, model=model, optimizer=optimizer)
    other, its_optimizer = made("none", 2)
    manager_of(tmp_path, trainable_only=True).resume(model=other, optimizer=its_optimizer)
    assert_same(model.state_dict(), other.state_dict())


def test_parameter_that_was_frozen_after_it_was_trained_is_saved(tmp_path: Path) -> None:
    model, optimizer = made("none", 1)
    train(model, optimizer, 1)
    model.lora_A.requires_grad_(False)
    manager_of(tmp_path, trainable_only=True).save(1, model=model, optimizer=optimizer)
    other, its_optimizer = made("none", 2)
    other.lora_A.requires_grad_(False)
    manager_of(tmp_path, trainable_only=True).resume(model=other, optimizer=its_optimizer)
    assert_same(model.state_dict(), other.state_dict())


def test_base_that_a_damaged_checkpoint_has_filled_is_told(tmp_path: Path) -> None:
    model = Adapted(1, width=4096)  # whose base fills blocks of its own
    manager_of(tmp_path, trainable_only=True).save(1, model=model)
    manager_of(tmp_path).save(2, model=model)
    damage(tmp_path / "step-2")
    with pytest.raises(CorruptionError, match=r"does not hold .*model\.base"):
        manager_of(tmp_path, trainable_only=True).resume(model=model)
