"""`dcpx cat`: globs of tensors and objects, prefixes, and objects that are bytes of torch.save."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from support.cli import dcpx as dcpx_

import torch_dcpx as dcpx

STATE: dict[str, Any] = {
    "layers": {
        "0": {"weight": torch.ones(2), "bias": torch.zeros(2)},
        "1": {"bias": torch.ones(2)},
    },
    "opt": {"lr": 0.5, "betas": [0.9, 0.95]},
    "step": 3,
}


class Own:
    """Of a user: no reader makes it unless it is told to."""


def cat(*args: object) -> Result:
    return dcpx_("cat", *args)


def values(*args: object) -> dict[str, Any]:
    return {each["name"]: each["value"] for each in json.loads(cat(*args, "--json").stdout)}


def archive(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcpx.save(STATE, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_globs_mean_tensors_and_objects_in_stored_order(saved: Path) -> None:
    zeros, ones = [0.0, 0.0], [1.0, 1.0]
    assert values(saved, "*.bias") == {"layers.0.bias": zeros, "layers.1.bias": ones}
    assert values(saved, "opt.*") == {"opt.lr": 0.5, "opt.betas": [0.9, 0.95]}
    assert values(saved, "*") == {
        "layers.0.weight": ones, "layers.0.bias": zeros, "layers.1.bias": ones,
        "opt.lr": 0.5, "opt.betas": [0.9, 0.95], "step": 3,
    }  # fmt: skip
    assert values(saved, "layers.[01].bias[1:]") == {
        "layers.0.bias[1:]": [0.0], "layers.1.bias[1:]": [1.0]
    }  # fmt: skip
    assert values(saved, "step", "st*", "layers.0.bias[0]") == {"step": 3, "layers.0.bias[0]": 0.0}


def test_a_prefix_shows_the_names_beneath_it(saved: Path) -> None:
    found = cat(saved, "layers.0")
    assert found.exit_code == 2
    assert "'layers.0.weight', 'layers.0.bias'; 'layers.0.*' means all of them" in found.stderr
    assert list(values(saved, "layers.0.*")) == ["layers.0.weight", "layers.0.bias"]
    assert "'opt.lr', 'opt.betas'; 'opt.*' means" in cat(saved, "opt").stderr
    assert "did you mean: 'step'" in cat(saved, "steps").stderr


@pytest.mark.parametrize("make", [bytes, bytearray, io.BytesIO])
def test_bytes_of_torch_save_are_shown_and_not_executed(tmp_path: Path, make: Any) -> None:
    held = {"rng": torch.arange(3), "seen": (1, None)}
    own = archive({"x": Own()})
    dcpx.save({"a": make(archive(held)), "b": make(own), "c": b"PK\x03\x04", "d": b"\0"}, tmp_path)
    lines = cat(tmp_path, "a").stdout
    assert "B of torch.save: {'rng': tensor([0, 1, 2]), 'seen': (1, None)}" in lines
    found = cat(tmp_path, "b", "c", "d")
    assert found.exit_code == 0
    assert f"b: {len(own)} B of torch.save, not shown: " in found.stdout
    assert "Own" in found.stdout and "d: b'\\x00'" in found.stdout
    assert [one["name"] for one in json.loads(cat(tmp_path, "*", "--json").stdout)] == [*"abcd"]


def test_what_a_manager_keeps_for_each_rank_is_readable(tmp_path: Path) -> None:
    with dcpx.CheckpointManager(tmp_path) as manager:
        manager.save(1, state={"a": dcpx.PerRank([7])}, user_content={"note": "hi"})
        manager.wait()
    found = cat(tmp_path / "step-1", "dcpx.user_content", "dcpx.rank.0").stdout
    assert "{'note': 'hi'}" in found and "[7]" in found


def test_one_object_that_no_reader_makes_hides_no_other(tmp_path: Path) -> None:
    dcpx.save({"a": 1, "own": Own(), "z": 2}, tmp_path)
    found = cat(tmp_path, "*")
    assert found.stdout.splitlines() == ["a: 1", "z: 2"]
    assert found.exit_code == 1 and "Own" in found.stderr
    rows = json.loads(cat(tmp_path, "*", "--json").stdout)
    assert [row["name"] for row in rows] == ["a", "own", "z"]
    assert rows[1]["error"]["type"] == "UnsafePickleError"


def test_json_has_arrays_as_lists_and_loses_no_key(tmp_path: Path) -> None:
    tensor = torch.arange(2.0)
    state = {"a": np.arange(3), "s": np.float32(2), "t": (tensor,), "keys": ({1: "a", "1": "b"},)}
    dcpx.save(state, tmp_path)
    found = {row["name"]: row["value"] for row in json.loads(cat(tmp_path, "*", "--json").stdout)}
    assert found["a"] == [0, 1, 2] and found["s"] == 2.0 and found["t"] == [[0.0, 1.0]]
    assert found["keys"] == [{"1": "a", "'1'": "b"}]
