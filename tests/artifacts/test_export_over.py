"""An export over another one of any format: loads get the newer, or it was refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch

import torch_dcpx as dcpx

FORMATS: dict[str, dict[str, Any] | None] = {
    "single": {},
    "sharded": {"max_shard_bytes": 12},
    "torch": {"format": "torch"},
    "checkpoint": None,
}


def write(value: float, path: Path, how: str) -> bool:
    """Returns whether it was written, and not refused."""
    state = {"w": torch.full((3,), value), "v": torch.full((3,), value)}
    arguments = FORMATS[how]
    try:
        if arguments is None:
            dcpx.save(state, path, no_dist=True)
        else:
            dcpx.export(state, path, no_dist=True, overwrite=True, **arguments)
    except dcpx.OptionError:
        return False
    return True


@pytest.mark.parametrize(("first", "second"), list(itertools.product(FORMATS, FORMATS)))
def test_loads_get_the_newer_or_it_was_refused(tmp_path: Path, first: str, second: str) -> None:
    assert write(1, tmp_path / "x", first)
    value = 2.0 if write(2, tmp_path / "x", second) else 1.0
    assert all((one == value).all() for one in dcpx.load_tensors(tmp_path / "x").values())
    is_front = first in ("single", "sharded") and second == "torch"
    is_beside = first == "checkpoint" and second != "checkpoint"
    assert (value == 1) == (is_front or is_beside)


@pytest.mark.parametrize("names", [["x"], ["x", "y"], ["diffusion_pytorch_model"]])
def test_torch_file_behind_any_safetensors_is_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        st.save_file({"w": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(dcpx.OptionError, match="which loads would take before"):
        dcpx.export({"w": torch.zeros(3)}, tmp_path, format="torch", no_dist=True)
    dcpx.export({"w": torch.zeros(3)}, tmp_path / "named.pt", no_dist=True)
    assert not dcpx.load_tensors(tmp_path / "named.pt")["w"].any()
