"""Sources that hold nothing, and indices that do not name what the files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx.reader.pretrained_reader import stored_sizes

SHARDS = {"1.safetensors": ("a", "b"), "2.safetensors": ("c", "d")}


def write_shards(path: Path, weight_map: str) -> None:
    """Writes two files, and an index with this text for its map."""
    for file, names in SHARDS.items():
        st.save_file({name: torch.ones(2) for name in names}, path / file)
    text = f'{{"metadata": {{"total_size": 32}}, "weight_map": {weight_map}}}'
    (path / "model.safetensors.index.json").write_text(text)


def whole_map() -> dict[str, str]:
    return {name: file for file, names in SHARDS.items() for name in names}


def refusals(path: Path) -> list[str]:
    """Returns the texts of the errors of all that reads the index."""
    model = nn.ParameterDict({name: torch.zeros(2) for name in "ab"})
    texts = []
    for read in (
        lambda: dcpx.load_pretrained(model, path, strict=False),
        lambda: dcpx.export(path, path / "out"),
        lambda: stored_sizes(path),
    ):
        with pytest.raises(dcpx.CorruptionError) as raised:
            read()
        texts.append(str(raised.value))
    assert not model["a"].any() and not (path / "out").exists()
    return texts


def test_index_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    twice = json.dumps(whole_map()).replace("{", '{"a": "2.safetensors", ', 1)
    write_shards(tmp_path, twice)
    assert all("'a' is there twice" in text for text in refusals(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}, "weight_map": {}}')
    assert all("'weight_map' is there twice" in text for text in refusals(tmp_path))


def test_index_that_lacks_what_a_file_holds_decides_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lacking = {name: file for name, file in whole_map().items() if name != "d"}
    write_shards(tmp_path, json.dumps(lacking))
    assert stored_sizes(tmp_path).keys() == set("abc")
    left = "left out 1 tensor of '2.safetensors' that the index does not name there, such as 'd'"
    assert left in caplog.text
    dcpx.export(tmp_path, tmp_path / "out", no_dist=True)
    assert dcpx.load_tensors(tmp_path / "out").keys() == set("abc")


@pytest.mark.parametrize("file_format", ["safetensors", "torch"])
def test_export_of_nothing_is_refused_and_leaves_what_is_there(
    tmp_path: Path, file_format: Any
) -> None:
    w = {"w": torch.ones(2)}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"ema": w, "model": w}, {"key_map": dcpx.KeyMap({"w": None})}),
        (w, {"keys": []}),
    ]
    for number, (state, arguments) in enumerate(cases):
        dcpx.save(dict(state), tmp_path / str(number))
        for source in (state, tmp_path / str(number)):
            with pytest.raises(dcpx.PlanError, match=r"there is no tensor to export"):
                dcpx.export(source, tmp_path / "out", format=file_format, **arguments)
            assert not (tmp_path / "out").exists(), number


def test_objects_alone_are_an_artifact_of_torch_and_none_of_safetensors(tmp_path: Path) -> None:
    with pytest.raises(dcpx.PlanError, match="1 object, which safetensors cannot hold"):
        dcpx.export({"step": 7}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    dcpx.export({"step": 7}, tmp_path / "out", format="torch")
    held = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert held == {"step": 7}
