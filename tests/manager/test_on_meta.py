"""What is on meta has no memory: a resume refuses it by name, and reads nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainings import manager_of

import torch_dcpx as dcpx
from torch_dcpx import UnsupportedError


class Model(nn.Module):
    """A tied weight, a persistent buffer and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.register_buffer("saved", torch.ones(3))
        self.register_buffer("own", torch.ones(3), persistent=False)


class Wrapped:
    """Hands a module's state on, as application states do."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])


def on_meta(*names: str) -> Model:
    """A model with these of its tensors on meta; without names, all."""
    with torch.device("meta" if not names else "cpu"):
        model = Model()
    for name in names:
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        kept = getattr(module, key)
        new = kept.to("meta")
        setattr(module, key, nn.Parameter(new) if isinstance(kept, nn.Parameter) else new)
    return model


def stepped(model: nn.Module) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    model = Model()
    state = {"w": torch.ones(3), "m": model, "a": Wrapped(model), "n": [torch.ones(2)]}
    manager_of(tmp_path).save(1, model=model, optimizer=stepped(model), state=state)
    return tmp_path


def with_stale_optimizer() -> dict[str, Any]:
    """An optimizer that was made before the model got memory, which made other parameters."""
    model = on_meta()
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model.to_empty(device="cpu"), "optimizer": optimizer}


def with_optimizer(model: nn.Module) -> dict[str, Any]:
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


PARTS: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"model": on_meta()}, r"5 tensors of the model are on meta.*'model\.one\."),
    (lambda: {"model": on_meta("two.bias")}, r"1 tensor .* is on meta.*: 'model\.two\."),
    (lambda: {"model": on_meta("saved")}, r": 'model\.saved'"),
    (lambda: {"model": on_meta("own")}, r": 'model\.own'; .*not persistent anew"),
    (lambda: with_optimizer(on_meta()), r"'model\.one\.weight'"),
    (with_stale_optimizer, r"of the optimizer is on meta"),
    (lambda: {"state": {"w": torch.empty(3, device="meta")}}, r": 'state\.w'"),
    (lambda: {"state": {"n": [torch.empty(2, device="meta")]}}, r": 'state\.n\.0'"),
    (lambda: {"state": {"m": on_meta()}}, r": 'state\.m\.saved'"),
    (lambda: {"state": {"a": Wrapped(on_meta())}}, r": 'state\.a\.module\.saved'"),
]


def test_what_is_on_meta_is_refused_by_name_and_nothing_is_read(root: Path) -> None:
    forgiven: list[dict[str, Any]] = [{}, {"strict": False}, {"allow_missing": ["*"]}]
    for make, text in PARTS:
        for arguments in forgiven:
            filled = torch.zeros(3)
            parts = make()
            state = {"w": filled, **parts.pop("state", {})}
            with pytest.raises(UnsupportedError, match=text):
                manager_of(root).resume(**parts, state=state, **arguments)
            assert filled.tolist() == [0, 0, 0]


def test_ways_out_work(root: Path) -> None:
    untied = on_meta().to_empty(device="cpu")
    untied.two.weight = untied.one.weight
    filled = on_meta()
    filled.own = torch.ones(3)
    dcpx.load_pretrained(filled, str(root / "step-1"))
    for model in (untied, filled):
        parts = with_optimizer(model)
        assert manager_of(root).resume(**parts).tag == "step-1"
        assert model.saved.tolist() == [1, 1, 1]
        assert len(parts["optimizer"].state) == 3


def test_what_is_not_asked_for_may_be_on_meta(root: Path) -> None:
    parts = with_stale_optimizer()
    assert manager_of(root).resume(**parts, load_optimizer=False).tag == "step-1"


@pytest.mark.parametrize("parts", [lambda m: {"model": m}, lambda m: {"state": {"m": m}}])
def test_a_save_of_a_model_on_meta_is_refused_by_name(tmp_path: Path, parts: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"'[a-z.]+' is a meta tensor"):
        manager_of(tmp_path).save(1, **parts(on_meta()))
    assert not list(tmp_path.glob("*/.metadata"))


def test_load_of_a_stateful_object_on_meta_is_refused_by_name(tmp_path: Path) -> None:
    """Stock says ok, and copies into nothing."""
    dcpx.save({"m": Model(), "a": Wrapped(Model())}, tmp_path)
    targets: dict[str, Any] = {"m": on_meta("one.bias"), "a": Wrapped(on_meta("one.bias"))}
    for key, target in targets.items():
        with pytest.raises(UnsupportedError, match=r"1 tensor .* 'm?a?(\.module)?\.one\.bias'; "):
            dcpx.load({key: target}, tmp_path)


@pytest.mark.filterwarnings("ignore:`_get_pg_default_device`:UserWarning")  # torch asks by it
def test_load_of_tensors_on_meta_without_ranks_is_refused_by_name(tmp_path: Path) -> None:
    dcpx.save({"w": torch.ones(3), "n": [torch.ones(2)]}, tmp_path)
    state = {"w": torch.zeros(3), "n": [torch.empty(2, device="meta")]}
    with pytest.raises(UnsupportedError, match=r"1 tensor .* on meta.*'n\.0'.*device='cpu'"):
        dcpx.load(state, tmp_path)
    state["n"] = [torch.empty_like(state["n"][0], device="cpu")]
    dcpx.load(state, tmp_path)
    assert state["n"][0].tolist() == [1, 1]
