"""Extra states of every kind: handed over where a file holds them, else forgiven."""

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


@pytest.mark.parametrize("key_map", [None, KeyMap((r"^x\.", ""))])
def test_extra_state_of_any_kind_may_be_missing(tmp_path: Path, key_map: Any) -> None:
    names = {f"x.{name}" if key_map else name: tensor for name, tensor in weights().items()}
    dcpx.export(names, tmp_path)
    for kind, held in KINDS.items():
        model = nn.Sequential(Scaled(held))
        report = dcpx.load_pretrained(model, tmp_path, key_map=key_map)
        assert torch.equal(model[0].weight, torch.ones(2, 3)), kind
        assert all(name.startswith("0._extra_state") for name in report.missing), kind
        assert bool(report.missing) == (kind != "empty"), kind
        assert model[0].got == ([{}] if kind == "empty" else []), kind


@pytest.mark.parametrize("held", [torch.zeros(2), "old"], ids=["tensor", "object"])
def test_extra_state_of_any_kind_is_handed_over(tmp_path: Path, held: Any) -> None:
    """Of a tensor it is the module's own memory, which is not filled."""
    new: Any = "new" if held == "old" else torch.ones(2)
    dcpx.save({**weights(), "0._extra_state": new}, tmp_path)
    model = nn.Sequential(Scaled(held))
    dcpx.load_pretrained(model, tmp_path)
    (got,) = model[0].got
    assert got == "new" if held == "old" else torch.equal(got, torch.ones(2))


def test_extra_state_is_handed_over_alone_where_all_else_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcpx.export({**weights(), "0._extra_state": torch.tensor(4.0)}, tmp_path / "with")
    dcpx.export(weights(), tmp_path / "without")
    model, handed = nn.Sequential(Scaled(torch.tensor(1.0))), []
    real = nn.Module.load_state_dict
    monkeypatch.setattr(
        nn.Module, "load_state_dict", lambda *a, **k: (handed.append([*a[1]]), real(*a, **k))
    )
    dcpx.load_pretrained(model, tmp_path / "with")
    dcpx.load_pretrained(model, tmp_path / "without")  # not stored, and not missed
    assert (model[0].got, handed) == ([torch.tensor(4.0)], [["0._extra_state"]])
    assert torch.equal(model[0].weight, torch.ones(2, 3))


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
