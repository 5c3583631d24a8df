"""dcpx.export(format="torch"): torch.load(weights_only=True) and zipfile find what was there."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import mixed_state
from support.states import assert_same

import torch_dcpx as dcpx
from torch_dcpx._compat import DTYPES, is_saved_dtype


def load(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None  # every checksum, put together from all rows
        raw = path.read_bytes()
        for entry in archive.infolist():  # testzip compares those of the directory alone
            at = entry.header_offset + 14
            assert int.from_bytes(raw[at : at + 4], "little") == entry.CRC
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    assert_same(loaded, torch.load(path, weights_only=True, mmap=True))
    return loaded


@pytest.mark.parametrize("is_stored", [False, True])
def test_torch_load_finds_tensors_and_plain_objects(tmp_path: Path, is_stored: bool) -> None:
    values = {"step": 7, "lr": 0.5, "name": "x" * 300, "none": None, "raw": b"\x00\xff"}
    state = {**mixed_state(), **values}
    dcpx.save(state, tmp_path / "ckpt")
    report = dcpx.export(tmp_path / "ckpt" if is_stored else state, tmp_path, format="torch")
    assert report.files == ("pytorch_model.bin",) and not report.skipped
    loaded = load(tmp_path / "pytorch_model.bin")
    assert_same({name: loaded[name] for name in state}, state)
    assert len(loaded) == len(state)


def test_every_dtype_of_torch_save_is_loaded(tmp_path: Path) -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    odd = ("q", "complex32")  # quantized; torch itself warns of the other
    saved = {name: d for name, d in DTYPES.items() if is_saved_dtype(d)}
    dtypes = {name: d for name, d in saved.items() if not name.startswith(odd)}
    state = {name: raw.clone().view(d) for name, d in dtypes.items() if d != torch.bool}
    dcpx.export(state, tmp_path / "all.pt", format="torch")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert len(state) > 15
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_tied_weights_share_their_memory_again(tmp_path: Path) -> None:
    w = torch.randn(5, 3)
    dcpx.export({"a": w, "b": w, "c": w.clone()}, tmp_path / "net.pth", format="torch")
    loaded = load(tmp_path / "net.pth")
    assert_same(loaded, {"a": w, "b": w, "c": w})
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr() != loaded["c"].data_ptr()


def test_objects_that_are_not_plain_are_refused_by_name(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "bad": Path("x"), "worse": [object()]}
    with pytest.raises(dcpx.UnsupportedError, match=r"2 objects .*'bad', 'worse\.0'|'bad', 'worse"):
        dcpx.export(state, tmp_path / "out", format="torch")
    assert not (tmp_path / "out").exists()
    dcpx.export(state, tmp_path / "out", format="torch", keys="w")
    assert list(load(tmp_path / "out" / "pytorch_model.bin")) == ["w"]


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("file_format", ["torch", "safetensors"])
def test_quantized_tensors_are_refused_by_name_whatever_the_format(
    tmp_path: Path, is_stored: bool, file_format: Any
) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    state = {"w": torch.ones(2), "scaled": quantized}
    dcpx.save(dict(state), tmp_path / "ckpt")
    source: Any = tmp_path / "ckpt" if is_stored else state
    with pytest.raises(dcpx.UnsupportedError) as raised:
        dcpx.export(source, tmp_path / "out", format=file_format)
    what = "safetensors" if file_format == "safetensors" else "a torch archive"
    assert str(raised.value) == (
        f"{what} cannot hold 1 tensor: 'scaled' (quint8); leave them out by keys, or export what "
        "dequantize() gives"
    )
    assert not (tmp_path / "out").exists()
    dcpx.export(source, tmp_path / "out", format=file_format, keys="w")
    with pytest.raises(dcpx.UnsupportedError, match="or use format='torch'"):
        dcpx.export({"c": torch.ones(1, dtype=torch.complex128)}, tmp_path / "complex")
