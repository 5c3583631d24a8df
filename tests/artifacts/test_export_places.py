"""Where an export may be written, and what a wrong place or argument says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.saves import save

import torch_dcpx as dcpx
from torch_dcpx import OptionError

STATE = {"w": torch.ones(3)}


@pytest.mark.parametrize("name", ["x.txt", "x.onnx", "x.safetensor", "run-1.model"])
def test_suffix_of_no_format_is_refused_and_taken_with_a_format(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match=r"a file ends in \.safetensors, \.bin, \.pt, \.pth"):
        dcpx.export(STATE, tmp_path / name, no_dist=True)
    assert list(tmp_path.iterdir()) == []
    dcpx.export(STATE, tmp_path / name, format="safetensors", no_dist=True)
    assert (tmp_path / name / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["run-1.5", "step-2.0", "v1.2rc3", ".hidden", "plain"])
def test_name_of_a_version_is_a_directory(tmp_path: Path, name: str) -> None:
    dcpx.export(STATE, tmp_path / name, no_dist=True)
    assert (tmp_path / name / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("a", "holds a checkpoint"),
        ("file", "is a file"),
        ("file/x.pt", "is a file"),
        ("nothing", "link to nothing"),
        ("d.safetensors", "is a directory"),
        ("d.pt", "is a directory"),
    ],
)
def test_place_of_another_kind_is_refused_and_stays(tmp_path: Path, place: str, words: str) -> None:
    save(STATE, tmp_path / "a")
    (tmp_path / "file").write_text("x")
    (tmp_path / "nothing").symlink_to("gone")
    for name in ("d.safetensors", "d.pt"):
        (tmp_path / name).mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OptionError, match=words):
        dcpx.export(STATE, tmp_path / place, no_dist=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"metadata": {"a": 1}}, "not 'a': 1"),
        ({"max_shard_bytes": 0}, "1 or more"),
        ({"max_shard_bytes": "0"}, "1 or more"),
    ],
)
def test_wrong_argument_says_what_came_and_what_is_taken(
    tmp_path: Path, given: Any, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        dcpx.export(STATE, tmp_path / "out", no_dist=True, **given)
