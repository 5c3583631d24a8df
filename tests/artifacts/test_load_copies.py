"""Loads into modules whose `state_dict()` gives copies: handed over and checked, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch
from support.copying import COPYING, Wrapped, assert_holds, cast, cloned, cloning, plain
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx import _C


@pytest.fixture
def source(tmp_path: Path) -> nn.Module:
    source = plain(7)
    source[1].running_mean.copy_(torch.arange(7))
    st.save_file(source.state_dict(), tmp_path / "model.safetensors")
    return source


@pytest.mark.parametrize("make", COPYING)
def test_module_that_gives_copies_holds_what_was_stored(
    tmp_path: Path, source: nn.Module, make: Callable[[Any], nn.Module]
) -> None:
    model = make(plain())
    report = dcpx.load_pretrained(model, tmp_path)
    assert report.is_whole
    assert_holds(model, source)
    nan = {
        n: t + float("nan") if t.is_floating_point() else t for n, t in source.state_dict().items()
    }
    st.save_file(nan, tmp_path / "model.safetensors")
    dcpx.load_pretrained(model, tmp_path)
    assert next(model.parameters()).isnan().all()


@pytest.mark.parametrize("make", COPYING)
def test_load_and_manager_hand_copies_to_modules(
    tmp_path: Path, make: Callable[[Any], nn.Module]
) -> None:
    old, new, other = make(plain(7)), make(plain()), make(plain())
    dcpx.save({"model": old, "step": 3}, tmp_path / "one")
    state: dict[str, Any] = {"model": new, "step": 0}
    dcpx.load(state, tmp_path / "one")
    assert state["step"] == 3 and state["model"] is new
    with dcpx.CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, model=old)
        manager.wait()
        manager.resume(model=other)
    for module in (new, other):
        assert_holds(module, old)


def test_load_into_a_state_dict_fills_it_and_leaves_the_module_to_the_caller(
    tmp_path: Path,
) -> None:
    old, new = plain(7), cloning(plain())
    dcpx.save(dict(old.state_dict()), tmp_path)
    state = dict(new.state_dict())
    dcpx.load(state, tmp_path)
    assert torch.equal(state["0.weight"], old[0].weight)
    new.load_state_dict(state)
    assert_holds(new, old)


def test_memory_by_other_names_or_as_views_is_filled_and_not_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "up"], state[prefix + "down"] = state.pop(prefix + "weight").chunk(2)
        state[prefix + "turned"] = state.pop(prefix + "bias").view(2, 3).T
        state[prefix + "none"] = torch.zeros(0, 3)

    model = nn.Sequential(nn.Linear(4, 6))
    model[0].register_state_dict_post_hook(split)
    none = {"0.none": torch.zeros(0, 3)}
    stored = none | {
        "0.up": torch.ones(3, 4),
        "0.down": torch.zeros(3, 4),
        "0.turned": torch.rand(3, 2),
    }
    st.save_file(stored, tmp_path / "model.safetensors")
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda *_, **__: pytest.fail("handed over"))
    dcpx.load_pretrained(model, tmp_path)
    assert torch.equal(model[0].weight, torch.cat([stored["0.up"], stored["0.down"]]))
    assert torch.equal(model[0].bias, stored["0.turned"].T.reshape(6))


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapped], ids=["plain", "wrapped"])
def test_module_that_gives_its_memory_is_asked_for_nothing_more(
    tmp_path: Path, source: nn.Module, monkeypatch: pytest.MonkeyPatch, wrap: Any
) -> None:
    model, asked = wrap(plain()), []
    real = nn.Module.state_dict

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is model:
            asked.append(kwargs)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "state_dict", state_dict)
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda *_, **__: pytest.fail("handed over"))
    dcpx.load_pretrained(model, tmp_path)
    assert_holds(model, source)
    assert asked == [{"keep_vars": True}, {}]


class Forgetful(nn.Linear):
    """Gives a copy of its weight, and takes none back."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return state | {"weight": state["weight"].detach().clone(), "bias": state["bias"]}

    def load_state_dict(self, state: Any, *_: Any, **__: Any) -> Any:
        self.bias.data.copy_(state["bias"])


def test_module_that_takes_no_copy_back_is_refused_by_name(tmp_path: Path) -> None:
    st.save_file(nn.Linear(3, 2).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(dcpx.UnsupportedError, match=r"gives copies.* 1 of them: 'weight'"):
        dcpx.load_pretrained(Forgetful(3, 2), tmp_path)


class Derived(nn.Linear):
    """Has a tensor in its state that is made on the fly, and that loading does not know."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return state | {"norm": self.weight.norm().detach()}


def test_name_that_the_module_does_not_take_is_refused_or_left(tmp_path: Path) -> None:
    stored = dict(nn.Linear(3, 2).state_dict())
    st.save_file(stored | {"norm": torch.tensor(5.0)}, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*norm"):
        dcpx.load_pretrained(Derived(3, 2), tmp_path)
    with pytest.raises(dcpx.UnsupportedError, match="'norm'"):
        dcpx.load_pretrained(Derived(3, 2), tmp_path, strict=False)
    right = stored | {"norm": stored["weight"].norm()}
    st.save_file(right, tmp_path / "model.safetensors")
    model = Derived(3, 2)
    dcpx.load_pretrained(model, tmp_path, strict=False)
    assert torch.equal(model.weight, stored["weight"])
    st.save_file(stored, tmp_path / "model.safetensors")
    model = Derived(3, 2)
    model.register_state_dict_post_hook(
        lambda _, state, *__: state.update(bias=cloned(state["bias"]))
    )
    dcpx.load_pretrained(model, tmp_path, strict=False)  # another norm than before is none's loss
    assert torch.equal(model.bias, stored["bias"])


def test_copies_of_what_is_on_meta_are_refused_by_name_before_anything_is_read(
    tmp_path: Path, source: nn.Module
) -> None:
    with torch.device("meta"):
        model = cloning(plain())
    before = _C.call_counts()
    with pytest.raises(dcpx.UnsupportedError, match=r"copies.* on meta: .* of `0\.\*`"):
        dcpx.load_pretrained(model, tmp_path)
    assert all(p.is_meta for p in model.parameters())
    assert _C.call_counts() == before
    model.to_empty(device="cpu")
    dcpx.load_pretrained(model, tmp_path)
    assert_holds(model, source)


def test_missing_names_of_copies_stay_as_they_are(tmp_path: Path, source: nn.Module) -> None:
    stored = {k: v for k, v in source.state_dict().items() if k != "0.bias"}
    st.save_file(stored, tmp_path / "model.safetensors")
    for make in (cloning, cast):
        model = make(plain())
        model[0].bias.data += 1e-3  # type: ignore[index]
        before = model[0].bias.clone()  # type: ignore[index]
        with pytest.raises(dcpx.MismatchError, match=r"0\.bias"):
            dcpx.load_pretrained(model, tmp_path)
        report = dcpx.load_pretrained(model, tmp_path, allow_missing=["*.bias"])
        assert report.missing == ("0.bias",)
        assert torch.equal(model[0].bias, before)  # type: ignore[index]
        assert torch.equal(model[0].weight, source[0].weight)  # type: ignore[index]


def test_tied_names_of_which_one_is_a_copy_are_two(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
        model["b"].weight = model["a"].weight
        return model

    def hook(_: Any, state: dict[str, Any], *__: Any) -> None:
        if not isinstance(state["b.weight"], nn.Parameter):  # with keep_vars they are one
            state["b.weight"] = cloned(state["b.weight"])

    model = tied()
    model.register_state_dict_post_hook(hook)
    for name, kept in (("a.weight", "b.weight"), ("b.weight", "a.weight")):
        stored = torch.rand(3, 3)
        st.save_file({name: stored}, tmp_path / "model.safetensors")
        with pytest.raises(dcpx.MismatchError, match=kept.replace(".", r"\.")):
            dcpx.load_pretrained(model, tmp_path)
        dcpx.load_pretrained(model, tmp_path, allow_missing=[kept])
        assert torch.equal(model["a"].weight, stored)  # type: ignore[index]


def test_module_without_shapes_yet_does_not_fit(tmp_path: Path) -> None:
    st.save_file(nn.Linear(3, 2).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(dcpx.MismatchError, match=r"'weight' stored \(2, 3\), wanted"):
        dcpx.load_pretrained(nn.LazyLinear(2), tmp_path)


class Nested(nn.Linear):
    """Keeps a tensor outside of its parameters, and gives it in a dict and a list."""

    def __init__(self, is_copy: bool) -> None:
        super().__init__(3, 2)
        self.held = torch.zeros(4)
        self.is_copy = is_copy

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        held = self.held.clone() if self.is_copy else self.held
        return {"own": {"list": [held]}, **super().state_dict(*args, **kwargs)}

    def load_state_dict(self, state: Any, *_: Any, **__: Any) -> Any:
        if self.is_copy:
            return super().load_state_dict({n: v for n, v in state.items() if n != "own"})
        return None  # it was filled


@pytest.mark.parametrize("is_copy", [False, True])
def test_tensors_in_dicts_and_lists_are_compared_too(tmp_path: Path, is_copy: bool) -> None:
    old, new = Nested(False), Nested(is_copy)
    old.held += 5
    dcpx.save(old.state_dict(), tmp_path)
    if is_copy:
        with pytest.raises(dcpx.UnsupportedError, match="'own'"):
            dcpx.load_pretrained(new, tmp_path)
    else:
        dcpx.load_pretrained(new, tmp_path)
        assert torch.equal(new.held, old.held) and torch.equal(new.weight, old.weight)
