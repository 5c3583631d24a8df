"""`dcpx.stats`: the numbers of tensors, as torch computes them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.saves import save

import torch_dcpx as dcpx
from torch_dcpx._native import _C
from torch_dcpx.cli.app import app
from torch_dcpx.views import values

SMALL_FLOATS = [
    "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu",
]  # fmt: skip


@pytest.mark.parametrize("piece_bytes", [None, 40])
def test_numbers_are_those_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int | None
) -> None:
    if piece_bytes:
        monkeypatch.setattr(values, "_PIECE_BYTES", piece_bytes)
    w = torch.randn(30, 7, generator=torch.Generator().manual_seed(2))
    save({"w": w, "i": torch.tensor([2**62 + 1, -5]), "b": w > 0, "step": 1}, tmp_path)
    found = {one.name: one for one in dcpx.stats(tmp_path).tensors}
    assert list(found) == ["w", "i", "b"]
    one, exact = found["w"], w.double()
    assert (one.dtype, one.shape, one.elements) == ("float32", (30, 7), 210)
    assert (one.min, one.max) == (exact.min().item(), exact.max().item())
    assert one.mean == pytest.approx(exact.mean().item())
    assert one.norm == pytest.approx(exact.norm().item())
    assert (one.nan, one.infinite, one.note) == (0, 0, "")
    assert (found["i"].min, found["i"].max) == (-5, 2**62 + 1)
    assert found["b"].mean == pytest.approx((w > 0).double().mean().item())


def test_nan_and_infinities_are_counted_and_left_out(tmp_path: Path) -> None:
    w = torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.0])
    save({"w": w, "none": torch.tensor([math.nan]), "e": torch.empty(0, 4)}, tmp_path)
    report = dcpx.stats(tmp_path)
    one, none, empty = report.tensors
    assert (one.nan, one.infinite, one.min, one.max, one.mean) == (1, 2, 1.0, 3.0, 2.0)
    assert (none.min, none.mean, none.norm, none.nan) == (None, None, None, 1)
    assert (empty.elements, empty.max, empty.norm, empty.nan) == (0, None, None, 0)
    assert report.head() == "3 tensors, 6 elements: 2 NaN, 2 infinities"
    result = CliRunner().invoke(app, ["stats", str(tmp_path), "-k", "w", "--json"])
    (row,) = json.loads(result.stdout)["tensors"]
    assert result.exit_code == 0 and (row["name"], row["nan"], row["shape"]) == ("w", 1, [5])
    text = CliRunner().invoke(app, ["stats", str(tmp_path)]).stdout
    assert text.splitlines()[0].split()[-3:] == ["NaN", "inf", "name"]
    assert CliRunner().invoke(app, ["stats", str(tmp_path), "-k", "x"]).exit_code == 2


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_what_has_no_numbers_is_noted(tmp_path: Path) -> None:
    q = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    save({"q": q, "c": torch.tensor([3 + 4j, 0j]), "w": torch.ones(2)}, tmp_path)
    q_found, c, w = dcpx.stats(tmp_path).tensors
    assert q_found.note == "not read: UnsupportedError" and q_found.norm is None
    assert (c.min, c.mean, c.norm) == (None, None, 5.0)
    assert w.norm == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_all_bits_of_small_floats_are_the_numbers_that_torch_makes_of_them(name: str) -> None:
    dtype = getattr(torch, name)
    bits = torch.arange(1 << (8 * dtype.itemsize), dtype=torch.int32)
    bits = bits.to(torch.uint16 if dtype.itemsize == 2 else torch.uint8)
    own, wide = bits.view(dtype), bits.view(dtype).to(torch.float64)
    count = own.numel()
    args = name, own.data_ptr(), "float64", wide.data_ptr(), count
    different, _, _, max_abs, norm, _ = _C.compare_values(*args)
    assert (different, max_abs, norm) == (0, 0.0, 0.0)
    finite, nan, infinite, low, high, _, _ = _C.value_statistics(name, own.data_ptr(), count)
    assert (nan, infinite) == (wide.isnan().sum().item(), wide.isinf().sum().item())
    kept = wide[wide.isfinite()]
    assert (finite, low, high) == (kept.numel(), kept.min().item(), kept.max().item())


def test_damage_is_an_error(tmp_path: Path) -> None:
    save({"w": torch.arange(60000.0)}, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    with pytest.raises(dcpx.CorruptionError):
        dcpx.stats(tmp_path)
    assert CliRunner().invoke(app, ["stats", str(tmp_path)]).exit_code == 1


def test_objects_are_said_to_have_no_numbers(tmp_path: Path) -> None:
    save({"w": torch.ones(2), "opt": {"lr": 0.1, "eps": 1e-8}}, tmp_path)
    for key in ("opt.lr", "opt.*"):
        shown = r"means \d objects?, no numbers: `dcpx cat .* shows 'opt"
        with pytest.raises(dcpx.UnknownNameError, match=shown):
            dcpx.stats(tmp_path, key)
    for view in (dcpx.stats, dcpx.inspect):
        with pytest.raises(
            dcpx.UnknownNameError, match=r"beginning of 2 names: 'opt.lr', 'opt.eps'"
        ):
            view(tmp_path, "opt")
    assert [one.name for one in dcpx.stats(tmp_path, ["w", "*"]).tensors] == ["w"]
