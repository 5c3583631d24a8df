"""Exports by suffix, to wrong and taken places, in another dtype, with texts in the header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch as st
import torch
from export_cases import mixed_state, read_artifact
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx import OptionError, WriteOptions

TIGHT = WriteOptions(host_memory_bytes=1 << 20, slot_bytes=256 << 10)


STATE = {"w": torch.ones(3)}
# Names of versions are directories.
DIRECTORIES = ("y", "v1.5", "run-1.5", "step-2.0", "v1.2rc3", ".hidden")


def test_suffix_of_the_path_says_the_format(tmp_path: Path) -> None:
    files = {f"{name}": name for name in ("y.pt", "y.pth", "y.bin", "y.safetensors")}
    files |= {name: f"{name}/model.safetensors" for name in DIRECTORIES}
    for number, (target, file) in enumerate(files.items()):
        folder = tmp_path / str(number)
        dcpx.export(STATE, folder / target, no_dist=True)
        assert [p for p in folder.rglob("*") if p.is_file()] == [folder / file]
        if target.endswith((".pt", ".pth", ".bin")):
            found = torch.load(folder / file, weights_only=True)
        else:
            found = read_artifact((folder / file).parent, Path(file).stem)
        assert torch.equal(found["w"], torch.ones(3)), target


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "y.pt": ({"format": "safetensors"}, "format='safetensors' contradicts .*leave format out"),
    "y.bin": ({"format": "safetensors"}, "format='safetensors' contradicts"),
    "y.safetensors": ({"format": "torch"}, "format='torch' contradicts .*leave format out"),
    "x.txt": ({}, r"a file ends in \.safetensors, \.bin, \.pt, \.pth"),
    "x.onnx": ({}, "a file ends in"), "x.safetensor": ({}, "a file ends in"),
    "run-1.model": ({}, "a file ends in"),
    "a": ({}, "holds a checkpoint"), "file": ({}, "is a file"), "file/x.pt": ({}, "is a file"),
    "nothing": ({}, "link to nothing"),
    "d.safetensors": ({}, "is a directory"), "d.pt": ({}, "is a directory"),
}  # fmt: skip


def test_suffix_of_no_format_and_a_place_of_another_kind_are_refused_and_stay(
    tmp_path: Path,
) -> None:
    dcpx.save(STATE, tmp_path / "a")
    (tmp_path / "file").write_text("x")
    (tmp_path / "nothing").symlink_to("gone")
    for name in ("d.safetensors", "d.pt"):
        (tmp_path / name).mkdir()
    before = sorted(tmp_path.rglob("*"))
    for place, (arguments, words) in REFUSED.items():
        with pytest.raises(OptionError, match=words):
            dcpx.export(STATE, tmp_path / place, no_dist=True, **arguments)
        assert sorted(tmp_path.rglob("*")) == before, place
    for name in ("x.txt", "run-1.model"):
        dcpx.export(STATE, tmp_path / name, format="safetensors", no_dist=True)
        assert (tmp_path / name / "model.safetensors").is_file()


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
    except OptionError:
        return False
    return True


@pytest.mark.parametrize("first", FORMATS)
def test_loads_get_the_newer_of_two_exports_to_one_place_or_it_was_refused(
    tmp_path: Path, first: str
) -> None:
    for second in FORMATS:
        path = tmp_path / second
        assert write(1, path, first)
        value = 2.0 if write(2, path, second) else 1.0
        assert all((one == value).all() for one in dcpx.load_tensors(path).values()), second
        is_front = first in ("single", "sharded") and second == "torch"
        is_beside = first == "checkpoint" and second != "checkpoint"
        assert (value == 1) == (is_front or is_beside), second


@pytest.mark.parametrize("names", [["x"], ["x", "y"], ["diffusion_pytorch_model"]])
def test_torch_file_behind_any_safetensors_is_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        st.save_file({"w": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(OptionError, match="which loads would take before"):
        dcpx.export({"w": torch.zeros(3)}, tmp_path, format="torch", no_dist=True)
    dcpx.export({"w": torch.zeros(3)}, tmp_path / "named.pt", no_dist=True)
    assert not dcpx.load_tensors(tmp_path / "named.pt")["w"].any()


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


DTYPE, TEXTS = "dtype must be None or a floating", "metadata must be None or a dict of texts"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "bfloat16"}, DTYPE), ({"dtype": torch.int8}, DTYPE),
    ({"dtype": torch.complex64}, DTYPE),
    ({"metadata": [("a", "b")]}, TEXTS), ({"metadata": {"a": 1}}, f"{TEXTS}.*not 'a': 1"),
    ({"metadata": {"a": "\udc80"}}, TEXTS),
    ({"metadata": {"format": "tf"}}, "'format' other than 'pt'"),
    ({"metadata": {"w": "x"}}, "metadata has 1 tensor name, 'w'"),
    ({"metadata": {"a": "b"}, "format": "torch"}, "belongs to the header of safetensors"),
    ({"format": "pickle"}, "format must be 'safetensors' or 'torch'"),
    ({"max_shard_bytes": 0}, "1 or more"), ({"max_shard_bytes": "0"}, "1 or more"),
    ({"max_shard_bytes": "5 apples"}, "max_shard_bytes"),
]  # fmt: skip


def test_argument_that_cannot_work_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    for arguments, text in WRONG:
        with pytest.raises(OptionError, match=text):
            dcpx.export(STATE, tmp_path / "out", no_dist=True, **arguments)
        assert not (tmp_path / "out").exists(), arguments
