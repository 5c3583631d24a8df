"""Exports by suffix, in another dtype, with texts in the header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from export_cases import mixed_state, read_artifact
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx import OptionError, WriteOptions

TIGHT = WriteOptions(host_memory_bytes=1 << 20, slot_bytes=256 << 10)


@pytest.mark.parametrize(
    ("target", "file"),
    [
        ("y.pt", "y.pt"),
        ("y.pth", "y.pth"),
        ("y.bin", "y.bin"),
        ("y.safetensors", "y.safetensors"),
        ("y", "y/model.safetensors"),
        ("v1.5", "v1.5/model.safetensors"),
    ],
)
def test_suffix_of_the_path_says_the_format(tmp_path: Path, target: str, file: str) -> None:
    dcpx.export({"w": torch.ones(3)}, tmp_path / target, no_dist=True)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [tmp_path / file]
    is_torch = target.endswith((".pt", ".pth", ".bin"))
    if is_torch:
        found = torch.load(tmp_path / file, weights_only=True)
    else:
        found = read_artifact((tmp_path / file).parent, Path(file).stem)
    assert torch.equal(found["w"], torch.ones(3))


@pytest.mark.parametrize(
    ("target", "file_format"),
    [("y.pt", "safetensors"), ("y.bin", "safetensors"), ("y.safetensors", "torch")],
)
def test_format_that_contradicts_the_suffix_is_refused(
    tmp_path: Path, target: str, file_format: Any
) -> None:
    with pytest.raises(OptionError, match=f"format='{file_format}' contradicts .*leave format out"):
        dcpx.export({"w": torch.ones(3)}, tmp_path / target, format=file_format, no_dist=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["y.safetensors", "y.pt"])
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_floating_tensors_are_converted_and_others_stay(
    tmp_path: Path, target: str, is_stored: bool, dtype: torch.dtype
) -> None:
    state = {**mixed_state(), "large": torch.randn(700, 501), "view": torch.randn(80, 60)[::2].T}
    source: Any = state
    if is_stored:
        source = tmp_path / "ckpt"
        dcpx.save(state, source, no_dist=True)
    dcpx.export(source, tmp_path / target, dtype=dtype, no_dist=True, options=TIGHT)
    found = dcpx.load_tensors(tmp_path / target)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        wanted = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert found[name].dtype == wanted.dtype, name
        assert torch.equal(found[name], wanted), name


def test_tied_weights_stay_tied_in_another_dtype(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    report = dcpx.export(model, tmp_path / "y.safetensors", dtype=torch.float16, no_dist=True)
    assert report.aliases == (("b.weight", "a.weight"),)
    assert report.nbytes < 32 + 300


def test_merge_of_two_dtypes_fits_once_both_are_converted(tmp_path: Path) -> None:
    state = {"a": torch.randn(2, 3), "b": torch.randn(2, 3).half()}
    key_map = dcpx.KeyMap(dcpx.Merge(("a", "b"), "ab"))
    with pytest.raises(dcpx.PlanError, match="merged of dtypes"):
        dcpx.export(state, tmp_path / "y.safetensors", key_map=key_map, no_dist=True)
    to = torch.bfloat16
    dcpx.export(state, tmp_path / "y.safetensors", key_map=key_map, dtype=to, no_dist=True)
    found = dcpx.load_tensors(tmp_path / "y.safetensors")["ab"]
    assert torch.equal(found, torch.cat([state["a"].to(to), state["b"].to(to)]))


def test_metadata_is_in_the_header_of_every_file_beside_ours(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(100) for i in range(4)}
    notes = {"licence": "Apache-2.0", "who": "née", "format": "pt"}
    dcpx.export(state, tmp_path / "out", metadata=notes, max_shard_bytes=800, no_dist=True)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        with safetensors.safe_open(file, "pt") as held:
            assert held.metadata() == notes
    assert dcpx.load_tensors(tmp_path / "out").keys() == state.keys()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dtype": "bfloat16"}, "dtype must be None or a floating"),
        ({"dtype": torch.int8}, "dtype must be None or a floating"),
        ({"dtype": torch.complex64}, "dtype must be None or a floating"),
        ({"metadata": [("a", "b")]}, "metadata must be None or a dict of texts"),
        ({"metadata": {"a": 1}}, "metadata must be None or a dict of texts"),
        ({"metadata": {"a": "\udc80"}}, "metadata must be None or a dict of texts"),
        ({"metadata": {"format": "tf"}}, "'format' other than 'pt'"),
        ({"metadata": {"w": "x"}}, "metadata has 1 tensor name, 'w'"),
        ({"metadata": {"a": "b"}, "format": "torch"}, "belongs to the header of safetensors"),
        ({"format": "pickle"}, "format must be 'safetensors' or 'torch'"),
    ],
)
def test_argument_that_cannot_work_is_refused_before_a_file_is_made(
    tmp_path: Path, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(OptionError, match=text):
        dcpx.export({"w": torch.ones(3)}, tmp_path / "out", no_dist=True, **arguments)
    assert not (tmp_path / "out").exists()
