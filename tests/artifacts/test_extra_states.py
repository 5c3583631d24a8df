"""Extra states of every kind that a file does not hold: forgiven, and not handed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx import KeyMap

KINDS: dict[str, Any] = {
    "dict": {"scale": 2.0, "steps": [1, 2]},
    "deep": {"a": {"b": torch.zeros(2)}},
    "list": [torch.zeros(2)],
    "empty": {},
    "text": "old",
}


class Scaled(nn.Linear):
    """A layer whose extra state is what the test gives it."""

    def __init__(self, held: Any) -> None:
        super().__init__(3, 2)
        self.held = held
        self.got: list[Any] = []

    def get_extra_state(self) -> Any:
        return self.held

    def set_extra_state(self, state: Any) -> None:
        self.got.append(state)


def weights() -> dict[str, torch.Tensor]:
    return {"0.weight": torch.ones(2, 3), "0.bias": torch.ones(2)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key_map", [None, KeyMap((r"^x\.", ""))])
def test_extra_state_of_any_kind_may_be_missing(tmp_path: Path, kind: str, key_map: Any) -> None:
    names = {f"x.{name}" if key_map else name: tensor for name, tensor in weights().items()}
    dcpx.export(names, tmp_path)
    model = nn.Sequential(Scaled(KINDS[kind]))
    report = dcpx.load_pretrained(model, tmp_path, key_map=key_map)
    assert torch.equal(model[0].weight, torch.ones(2, 3))
    assert all(name.startswith("0._extra_state") for name in report.missing)
    assert bool(report.missing) == (kind != "empty")
    assert model[0].got == ([{}] if kind == "empty" else [])


def test_part_of_an_extra_state_that_is_stored_is_handed_over_with_the_rest(
    tmp_path: Path,
) -> None:
    dcpx.save({**weights(), "0._extra_state": {"scale": 5.0}}, tmp_path)
    model = nn.Sequential(Scaled({"scale": 2.0, "steps": [1, 2]}))
    report = dcpx.load_pretrained(model, tmp_path)
    assert report.missing == ("0._extra_state.steps",)
    assert model[0].got == [{"scale": 5.0, "steps": [1, 2]}]


def test_parameter_whose_name_only_ends_like_an_extra_state_is_missed(tmp_path: Path) -> None:
    dcpx.export(weights(), tmp_path)
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].register_parameter("my_extra_state", nn.Parameter(torch.zeros(1)))
    with pytest.raises(dcpx.MismatchError, match=r"0\.my_extra_state"):
        dcpx.load_pretrained(model, tmp_path)
