"""Tensors that nothing can be copied into, or that have no sizes: refused before the first byte."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx import KeyMap, Split

STORED = {"a": torch.ones(600_000), "b": torch.ones(4), "c": torch.ones(600_000)}
EXPANDED = r"'b' of sizes \[4\] and strides \[0\] has one memory for several elements"
NESTED = "'b' is a nested tensor, which has no sizes"


def model_with(value: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in {"a": torch.zeros(600_000), "b": value, "c": torch.zeros(600_000)}.items():
        model.register_parameter(name, nn.Parameter(tensor))
    return model


def expanded() -> torch.Tensor:
    return torch.zeros(1).expand(4)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(1), torch.zeros(3)])


pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


@pytest.mark.parametrize(("make", "text"), [(expanded, EXPANDED), (nested, NESTED)])
def test_model_with_a_tensor_that_cannot_be_filled_is_refused_before_any_is(
    tmp_path: Path, make: Any, text: str
) -> None:
    dcpx.export(dict(STORED), tmp_path / "out")
    dcpx.save(dict(STORED), tmp_path / "ckpt")
    least = dcpx.ReadOptions(host_memory_bytes=2 << 20, workers=1)  # "a" is a window
    cases: list[tuple[str, Any]] = [*itertools.product(("out", "ckpt"), ("error", "allow"))]
    for path, cast in cases:
        model = model_with(make())
        if cast == "allow":
            model.a.data = model.a.data.double()
        with pytest.raises(dcpx.UnsupportedError, match=text):
            dcpx.load_pretrained(model, tmp_path / path, cast=cast, options=least)
        assert not model.a.any() and not model.c.any()


@pytest.mark.parametrize("make", [expanded, nested])
def test_tensor_that_cannot_be_filled_may_be_missing(tmp_path: Path, make: Any) -> None:
    dcpx.export({name: STORED[name] for name in "ac"}, tmp_path)
    model = model_with(make())
    report = dcpx.load_pretrained(model, tmp_path, allow_missing=["b"])
    assert report.missing == ("b",)
    assert torch.equal(model.a, STORED["a"]) and torch.equal(model.c, STORED["c"])


def test_expanded_parameter_on_meta_gets_memory_of_its_own(tmp_path: Path) -> None:
    dcpx.export(dict(STORED), tmp_path)
    with torch.device("meta"):
        model = model_with(torch.zeros(1).expand(4))
    dcpx.load_pretrained(model, tmp_path)
    assert torch.equal(model.b, STORED["b"])


@pytest.mark.parametrize(("make", "text"), [(expanded, EXPANDED), (nested, NESTED)])
def test_state_with_a_tensor_that_cannot_be_filled_is_refused_before_any_is(
    tmp_path: Path, make: Any, text: str
) -> None:
    dcpx.save(dict(STORED), tmp_path)
    for key_map in (None, KeyMap({"b": "b"}), KeyMap(Split("b", ("b",)))):
        state = model_with(make()).state_dict()
        with pytest.raises(dcpx.UnsupportedError, match=text):
            dcpx.load(state, tmp_path, key_map=key_map)
        assert not state["a"].any() and not state["c"].any()


def test_nested_tensor_is_no_part_of_an_export(tmp_path: Path) -> None:
    for file_format in ("safetensors", "torch"):
        with pytest.raises(dcpx.UnsupportedError, match=NESTED):
            dcpx.export(model_with(nested()), tmp_path / "out", format=file_format)  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()
