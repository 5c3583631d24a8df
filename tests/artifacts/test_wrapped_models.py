"""Wrappers are known by the modules: names of submodules that are called `module` are kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch
from support.wrapped import MODELS, SAVED, WRAPS, Tree, filled, group_of_one, held
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

import torch_dcpx as dcpx
from torch_dcpx import KeyMap

# FSDP1 of one rank, and its deprecation.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with group_of_one():
        yield


def saved_forms(name: str, path: Path) -> dict[str, Path]:
    """Saves a model plain and as each wrapper names it; returns the paths by wrapper."""
    paths = {}
    for wrap in SAVED:
        paths[wrap] = path / wrap
        state = WRAPS[wrap](filled(MODELS[name](), 1)).state_dict()
        dcpx.save({"model": state}, paths[wrap], no_dist=True)
    return paths


def assert_same(model: nn.Module, name: str) -> None:
    wanted = held(filled(MODELS[name](), 1))
    for mine, its in zip(held(model), wanted, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("name", MODELS)
def test_export_of_a_module_has_the_names_of_the_plain_one(tmp_path: Path, name: str) -> None:
    for number, wrap in enumerate(WRAPS.values()):
        model, path = wrap(filled(MODELS[name](), 1)), tmp_path / f"{number}.safetensors"
        dcpx.export({"model": model, "step": 1} if number % 2 else model, path)
        fresh = MODELS[name]()
        fresh.load_state_dict(st.load_file(path))
        assert_same(fresh, name)


@pytest.mark.parametrize("name", MODELS)
def test_every_form_of_names_fills_every_wrapped_module(
    tmp_path: Path, name: str, seed: int, pytestconfig: pytest.Config
) -> None:
    paths = list(saved_forms(name, tmp_path).values())
    forms = len(paths) if pytestconfig.getoption("--everything") else 2  # of each wrapper, in turn
    for number, wrap in enumerate(WRAPS.values()):
        for form in range(forms):
            model = wrap(filled(MODELS[name](), 1000))
            path = paths[(seed + number + 2 * form) % len(paths)]
            assert dcpx.load_pretrained(model, path).is_whole
            assert_same(model, name)


@pytest.mark.parametrize("wrap", ["DDP", "compile", "DDP(compile)"])
def test_load_with_a_module_at_hand_takes_its_plain_names(tmp_path: Path, wrap: str) -> None:
    for name in ("both", "parameters"):
        path = tmp_path / name
        dcpx.save({"model": filled(MODELS[name](), 1)}, path)
        model = WRAPS[wrap](filled(MODELS[name](), 1000))
        dcpx.load({"model": model}, path, key_map=KeyMap())
        assert_same(model, name)


@pytest.mark.parametrize("name", ["norms", "only", "averaged"])
def test_names_that_an_older_export_has_shortened_are_found(tmp_path: Path, name: str) -> None:
    dcpx.export(filled(MODELS[name](), 1), tmp_path, key_map=KeyMap(wrappers=True))
    assert not any("module" in key for key in st.load_file(tmp_path / "model.safetensors"))
    model = filled(MODELS[name](), 1000)
    dcpx.load_pretrained(model, tmp_path)
    assert_same(model, name)


def test_stored_names_lose_module_only_where_the_caller_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = Ddp(filled(MODELS["norms"](), 1)).state_dict()
    dcpx.save({"model": state, "step": 1}, tmp_path / "ckpt")
    for source in (state, tmp_path / "ckpt"):
        caplog.clear()
        dcpx.export(source, tmp_path / "kept.safetensors", overwrite=True)
        assert st.load_file(tmp_path / "kept.safetensors").keys() == state.keys()
        (record,) = caplog.records
        assert "every name begins with 'module.'" in record.getMessage()
        caplog.clear()
        assert "key_map=KeyMap(wrappers=True) leaves it out" in record.getMessage()
        bare = KeyMap(wrappers=True)
        dcpx.export(source, tmp_path / "out.safetensors", key_map=bare, overwrite=True)
        names = st.load_file(tmp_path / "out.safetensors").keys()
        assert names == {name.replace("module.", "") for name in state}
        assert not caplog.records
    dcpx.export(MODELS["only"](), tmp_path / "only.safetensors")
    assert not caplog.records


def test_rules_see_the_names_of_a_submodule_and_may_leave_a_wrapper_out(tmp_path: Path) -> None:
    model = filled(MODELS["norms"](), 1)
    names = KeyMap((r"^norms\.0\.module\.", "norms.0.norm."))
    dcpx.export(Ddp(model), tmp_path / "out", key_map=names)
    keys = st.load_file(tmp_path / "out" / "model.safetensors").keys()
    assert "norms.0.norm.weight" in keys
    other = Tree(a=nn.Linear(2, 2), norms=nn.ModuleList([Tree(norm=nn.BatchNorm1d(2))]))
    for saved in (model, Ddp(model)):  # a load knows what is wanted: either names fit
        path = tmp_path / type(saved).__name__
        dcpx.save({"model": saved.state_dict()}, path)
        dcpx.load_pretrained(other, path, key_map=names)
        assert torch.equal(other.norms[0].norm.weight, model.norms[0].module.weight)
        filled(other, 1000)
    with pytest.raises(dcpx.PlanError, match="matches no stored name"):
        names.dry_run(tmp_path / "DistributedDataParallel")


def test_what_fits_in_two_ways_is_refused_and_the_ways_out_work(tmp_path: Path) -> None:
    stored = {
        name: torch.full((2,), n) for n, name in enumerate(["w", "b", "module.w", "module.b"])
    }
    dcpx.save(stored, tmp_path)

    def fresh() -> Any:
        return Ddp(Tree(w=nn.Parameter(torch.full((2,), 9.0)), b=nn.Parameter(torch.zeros(2))))

    with pytest.raises(dcpx.PlanError, match=r"'module\.b' of the model may be 'b' or") as raised:
        dcpx.load_pretrained(fresh(), tmp_path, cast="allow")
    (left_out,) = re.findall(r"KeyMap\(\{'(.*)': None\}\)", str(raised.value))
    assert "KeyMap(wrappers=False) compares whole names" in str(raised.value)
    takes_plain, is_whole = KeyMap({left_out: None}), KeyMap(wrappers=False)
    for key_map, values in ((takes_plain, [0, 1]), (is_whole, [2, 3])):
        model = fresh()
        dcpx.load_pretrained(model, tmp_path, key_map=key_map, cast="allow")
        assert [one[0].item() for one in (model.module.w, model.module.b)] == values


@pytest.mark.parametrize("wrap", ["none", "DDP", "compile"])
def test_names_that_would_be_a_guess_are_missing(tmp_path: Path, wrap: str) -> None:
    """Of a DDP around a part: `module.module.weight` is another model's name, too."""
    inner = filled(MODELS["parameters"](), 1)
    inner.module = Ddp(inner.module)
    dcpx.save(inner.state_dict(), tmp_path)
    model = WRAPS[wrap](filled(MODELS["parameters"](), 1000))
    before = held(model)
    with pytest.raises(dcpx.MismatchError, match=r"did you mean 'module\.module\.weight'"):
        dcpx.load_pretrained(model, tmp_path)
    for mine, its in zip(held(model), before, strict=True):
        assert torch.equal(mine, its)
    rename = KeyMap({"module.module.weight": "module.weight"})
    dcpx.load_pretrained(model, tmp_path, key_map=rename)
    assert_same(model, "parameters")


def test_wrappers_own_buffers_keep_apart_from_the_models(tmp_path: Path) -> None:
    class Counting(Ddp):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            self.register_buffer("weight", torch.full((2,), 7.0))

    model = Counting(filled(MODELS["parameters"](), 1))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    dcpx.export(model, tmp_path)
    assert st.load_file(tmp_path / "model.safetensors").keys() == state.keys()
    other = Counting(filled(MODELS["parameters"](), 1000))
    dcpx.load_pretrained(other, tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())


def test_tied_weights_under_wrappers_are_one_tensor(tmp_path: Path) -> None:
    model = filled(MODELS["both"](), 1)
    model.module.a.weight = model.a.weight  # type: ignore[union-attr]
    report = dcpx.export(Ddp(model), tmp_path)
    assert report.aliases == (("module.a.weight", "a.weight"),)
    other = filled(MODELS["both"](), 1000)
    other.module.a.weight = other.a.weight  # type: ignore[union-attr]
    dcpx.load_pretrained(Ddp(other), tmp_path)
    for mine, its in zip(held(other), held(model), strict=True):
        assert torch.equal(mine, its)
