"""`dcpx.diff` tells what differs, by how much and where, and reads within bounds."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import RunPython
from support.saves import data_files, save

import torch_dcpx as dcpx
from torch_dcpx.cli.app import app
from torch_dcpx.views import values


def sides(folder: Path, a: dict[str, Any], b: dict[str, Any], writer: Any = "ours") -> list[Path]:
    for name, state in (("a", a), ("b", b)):
        save(state, folder / name, writer)
    return [folder / "a", folder / "b"]


def changes(report: dcpx.DiffReport) -> dict[str, str]:
    return {one.name: one.what for one in report.differences}


@pytest.mark.parametrize("piece_bytes", [None, 64])
def test_tensors_differ_by_count_max_abs_and_relative_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int | None
) -> None:
    if piece_bytes:
        monkeypatch.setattr(values, "_PIECE_BYTES", piece_bytes)
    a = torch.randn(9, 7, 5, generator=torch.Generator().manual_seed(1))
    b = a.clone()
    b[3, 2, 1] += 0.5
    b[8, 6, 4] -= 2
    (one,) = dcpx.diff(*sides(tmp_path, {"w": a}, {"w": b})).differences
    assert (one.what, one.elements, one.different, one.beyond) == ("values", 315, 2, 2)
    exact = a.double() - b.double()
    assert one.max_abs == exact.abs().max().item()
    assert one.rel == pytest.approx((exact.norm() / a.double().norm()).item())
    assert one.a == one.b == "float32 [9, 7, 5]"


def test_values_of_one_element_and_of_objects_stand_in_the_columns(tmp_path: Path) -> None:
    a = {"t": torch.tensor(2.5), "step": 3, "lr": 0.1, "opt": {"betas": [0.9, 0.99]}, "name": "x"}
    b = {"t": torch.tensor(2.25), "step": 4, "lr": 0.2, "opt": {"betas": [0.9, 0.95]}, "name": "x"}
    report = dcpx.diff(*sides(tmp_path, a, b))
    assert {one.name: (one.a, one.b) for one in report.differences} == {
        "t": ("float32 [] 2.5", "float32 [] 2.25"),
        "step": ("3", "4"),
        "lr": ("0.1", "0.2"),
        "opt.betas": ("[1]: 0.99", "[1]: 0.95"),
    }
    assert report.equal == 1 and not report.is_equal
    text = str(report)
    assert text.splitlines()[0] == "4 differences, 1 equal name; read 8 B of values"
    assert "2.25" in text and "<td" in report._repr_html_()


DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.complex64, torch.complex128,
]  # fmt: skip


def test_every_dtype_is_compared_as_numbers(tmp_path: Path) -> None:
    a = {str(dtype): torch.tensor([1, 0, 1, 1, 0]).to(dtype) for dtype in DTYPES}
    b = {str(dtype): torch.tensor([1, 0, 0, 1, 0]).to(dtype) for dtype in DTYPES}
    same = {f"same {dtype}": torch.ones(3).to(dtype) for dtype in DTYPES}
    report = dcpx.diff(*sides(tmp_path, {**a, **same}, {**b, **same}))
    assert changes(report) == dict.fromkeys(a, "values")
    for one in report.differences:
        assert (one.different, one.max_abs, one.note) == (1, 1.0, ""), one.name
        assert one.rel == pytest.approx(1 / math.sqrt(3))


def test_another_dtype_is_told_and_its_values_are_compared(tmp_path: Path) -> None:
    a = {"same": torch.ones(4), "other": torch.tensor([1.0, 3.0])}
    b = {"same": torch.ones(4).half(), "other": torch.tensor([1, 2])}
    same, other = dcpx.diff(*sides(tmp_path, a, b)).differences
    assert (same.what, same.different, same.max_abs) == ("dtype", 0, 0.0)
    assert (other.what, other.different, other.max_abs) == ("dtype", 1, 1.0)


def test_nan_and_zeros_of_other_bits_differ_in_bits_alone(tmp_path: Path) -> None:
    nan = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    plain = torch.tensor([math.nan, 1.0])
    a = {"nan": plain, "bits": nan, "zero": torch.zeros(2), "f": math.nan, "one": plain}
    b = {"nan": plain, "bits": plain, "zero": -torch.zeros(2), "f": math.nan, "one": torch.ones(2)}
    paths = sides(tmp_path, a, b)
    report = dcpx.diff(*paths)
    assert changes(report) == {"bits": "bits", "zero": "bits", "one": "values"}
    (one,) = (each for each in report.differences if each.name == "one")
    assert one.different == 1 and math.isnan(one.max_abs or 0) and math.isnan(one.rel or 0)
    assert changes(dcpx.diff(*paths, atol=1e-9)) == {"one": "values"}
    found = json.loads(CliRunner().invoke(app, ["diff", *map(str, paths), "--json"]).stdout)
    assert [row["max_abs"] for row in found["differences"]] == [0.0, 0.0, "nan"]


def test_tolerances_are_those_of_isclose_and_hold_for_floats_in_objects(tmp_path: Path) -> None:
    a = {"w": torch.tensor([100.0, 100.0, 0.0]), "lr": 0.1, "step": 3}
    b = {"w": torch.tensor([111.0, 112.0, 0.0]), "lr": 0.1001, "step": 4}
    paths = sides(tmp_path, a, b)
    report = dcpx.diff(*paths, rtol=0.1)
    assert changes(report) == {"w": "values", "step": "values"}
    assert (report.differences[0].different, report.differences[0].beyond) == (2, 1)
    assert report.within == 1
    assert changes(dcpx.diff(*paths, rtol=0.1, atol=1)) == {"step": "values"}
    for wrong in ({"rtol": -1.0}, {"atol": math.nan}, {"rtol": "x"}, {"quick": True, "rtol": 1.0}):
        with pytest.raises(dcpx.OptionError):
            dcpx.diff(*paths, **wrong)  # type: ignore[arg-type]


def test_keys_choose_names_and_an_exact_name_is_no_glob(tmp_path: Path) -> None:
    a = {"w[0]": torch.ones(1), "w0": torch.ones(1), "step": 1}
    b = {"w[0]": torch.zeros(1), "w0": torch.zeros(1), "step": 2, "new": 5}
    paths = sides(tmp_path, a, b)
    assert set(changes(dcpx.diff(*paths, keys="w[0]"))) == {"w[0]"}
    assert set(changes(dcpx.diff(*paths, keys=["w*", "new"]))) == {"w[0]", "w0", "new"}
    with pytest.raises(dcpx.UnknownNameError, match="did you mean 'step'"):
        dcpx.diff(*paths, keys="steps")
    result = CliRunner().invoke(app, ["diff", *map(str, paths), "-k", "none"])
    assert result.exit_code == 2 and "'none'" in result.output


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_objects_are_equal_only_with_equal_keys_orders_and_classes(
    tmp_path: Path, writer: Any
) -> None:
    a = {
        "key": [{1: "x"}], "order": [OrderedDict(a=1, b=2)], "plain": [{"a": 1, "b": 2}],
        "bool": [1], "float": [1], "set": [{1, 2}], "more": [1, 2], "tuple": [(1,)], "s": ["é"],
        "nan": [math.nan], "zero": [0.0],
    }  # fmt: skip
    b = {
        "key": [{True: "x"}], "order": [OrderedDict(b=2, a=1)], "plain": [{"b": 2, "a": 1}],
        "bool": [True], "float": [1.0], "set": [{2, True}], "more": [1], "tuple": [[1]],
        "s": ["é"], "nan": [math.nan], "zero": [-0.0],
    }  # fmt: skip
    report = dcpx.diff(*sides(tmp_path, {"x": (a,)}, {"x": (b,)}, writer))
    (one,) = report.differences
    assert one.a == "[0]['key'][0][1]: 'x'" and one.b == ""
    for name in a:
        paths = sides(tmp_path / name, {"v": (a[name],)}, {"v": (b[name],)}, writer)
        is_equal = name in ("plain", "s", "nan")
        assert dcpx.diff(*paths).is_equal == is_equal, name
        assert dcpx.diff(*paths, quick=True).is_equal == is_equal, name


@pytest.mark.parametrize("nested", [False, True])
def test_numpy_values_are_equal_by_value_and_within_tolerances(
    tmp_path: Path, nested: bool
) -> None:
    rows = np.arange(6.0).reshape(2, 3)

    def state(scale: float) -> dict[str, Any]:
        found = {
            "array": rows * scale,
            "scalar": np.float32(scale),
            "tensor": torch.ones(2) * scale,
        }
        return {name: (one,) for name, one in found.items()} if nested else found

    a, b = sides(tmp_path, state(1.0), state(1.0001))
    names = {"array", "scalar", "tensor"}
    assert set(changes(dcpx.diff(a, b))) == names
    report = dcpx.diff(a, b, rtol=1e-3)
    assert (report.is_equal, report.within) == (True, 3)
    transposed = {"array": np.asfortranarray(rows)}
    assert dcpx.diff(*sides(tmp_path / "f", {"array": rows}, transposed)).is_equal
    other = {"array": rows.astype("float32")}
    assert not dcpx.diff(*sides(tmp_path / "g", {"array": rows}, other), rtol=1).is_equal


def test_bytes_and_bytearray_look_unlike(tmp_path: Path) -> None:
    (one,) = dcpx.diff(*sides(tmp_path, {"x": b"ab"}, {"x": bytearray(b"ab")})).differences
    assert (one.a, one.b) == ("b'ab'", "bytearray(b'ab')")


def test_equal_bytes_in_another_memory_order_are_other_values(tmp_path: Path) -> None:
    rows = torch.arange(6.0).view(2, 3)
    columns = torch.arange(6.0).view(3, 2).t()
    for a, b, is_equal in ((rows, columns, False), (rows, rows.t().contiguous().t(), True)):
        paths = sides(tmp_path / str(is_equal), {"w": a}, {"w": b})
        assert dcpx.diff(*paths).is_equal == is_equal
        assert dcpx.diff(*paths, quick=True).is_equal == is_equal


def test_what_has_no_checksums_is_said(tmp_path: Path) -> None:
    state = {"w": torch.ones(4)}
    dcpx.export(state, tmp_path / "one")
    dcpx.export(state, tmp_path / "two.pt")
    said = "safetensors have no checksums"
    same = dcpx.diff(tmp_path / "one", tmp_path / "one").head()
    assert "0 differences, 1 equal name" in same and "32 B" in same and said in same
    assert said in dcpx.diff(tmp_path / "one", tmp_path / "two.pt").head()
    assert said not in dcpx.diff(tmp_path / "two.pt", tmp_path / "two.pt").head()
    (quick, archive) = (
        dcpx.diff(path, path, quick=True).head() for path in (tmp_path / "one", tmp_path / "two.pt")
    )
    for head in (quick, archive):
        assert "read 32 B of values, for which no checksums are compared" in head
    assert said in quick and "`dcpx verify`" in archive


def damaged(directory: Path) -> None:
    """Flips a bit in the middle of the only data file."""
    (name,) = data_files(directory)
    data = bytearray((directory / name).read_bytes())
    data[len(data) // 2] ^= 4
    (directory / name).write_bytes(data)


def test_damage_is_an_error_though_both_sides_have_it_alike(tmp_path: Path) -> None:
    state = {"w": torch.arange(60000.0), "step": 1}
    paths = sides(tmp_path, state, state)
    assert dcpx.diff(*paths).is_equal
    for path in paths:
        damaged(path)
    quick = dcpx.diff(*paths, quick=True)
    assert quick.is_equal and quick.read_bytes == 0
    assert "by recorded checksums; `dcpx verify`" in quick.head()
    with pytest.raises(dcpx.CorruptionError) as caught:
        dcpx.diff(*paths)
    assert caught.value.path == str(paths[0] / data_files(paths[0])[0])
    result = CliRunner().invoke(app, ["diff", *map(str, paths)])
    assert result.exit_code == 1 and data_files(paths[0])[0] in result.output


@pytest.mark.parametrize("kind", ["stock", "torch.save"])
def test_damage_of_foreign_archives_is_an_error(tmp_path: Path, kind: str) -> None:
    state = {"w": torch.arange(60000.0), "v": torch.ones(3)}
    if kind == "stock":
        paths = sides(tmp_path, state, state, "stock")
        files = [path / data_files(path)[0] for path in paths]
    else:
        files = paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
        for path in paths:
            torch.save(state, path)
    assert dcpx.diff(*paths).is_equal
    for file in files:
        data = bytearray(file.read_bytes())
        data[data.index(state["w"].numpy().tobytes()) + 100] ^= 4
        file.write_bytes(data)
    with pytest.raises(dcpx.CorruptionError, match="checksum of a zip's record") as caught:
        dcpx.diff(*paths)
    assert (caught.value.path, caught.value.fqn) == (str(files[0]), "w")
    with pytest.raises(dcpx.CorruptionError):
        dcpx.stats(paths[0])
    assert dcpx.diff(*paths, keys="v").is_equal


class Own:
    """Of a user: no reader makes it unless it is told to."""


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_what_no_reader_makes_is_compared_by_its_stored_bytes(tmp_path: Path, writer: Any) -> None:
    def state(value: float) -> dict[str, Any]:
        q = torch.quantize_per_tensor(torch.full((4000,), value), 0.1, 0, torch.qint8)
        return {"q": q, "own": Own()}

    paths = sides(tmp_path, state(1.0), state(1.0), writer)
    report = dcpx.diff(*paths)
    assert report.is_equal
    notes = {one.name: one.note for one in report.names}
    refused = {"q": "UnsupportedError", "own": "UnsafePickleError"}
    assert notes == {name: f"by stored bytes: {error}" for name, error in refused.items()}
    save(state(2.0), tmp_path / "c", writer)
    assert changes(dcpx.diff(tmp_path / "a", tmp_path / "c")) == {"q": "values"}
    if writer == "ours":
        for path in paths:
            damaged(path)
        with pytest.raises(dcpx.CorruptionError, match=r"'q'.* recorded"):
            dcpx.diff(*paths)


GROWTH = """
import resource, sys, torch, torch_dcpx as dcpx
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small, *large = sys.argv[1:]
dcpx.diff(small, small); dcpx.stats(small)
before = peak()
report = dcpx.diff(*large)
assert [one.different for one in report.differences] == [1], report
assert dcpx.stats(large[0]).tensors[0].elements == 5800**2
print((peak() - before) >> 10)
"""


def test_large_tensors_are_compared_in_bounded_memory(tmp_path: Path, run_warm: RunPython) -> None:
    w = torch.zeros(5800, 5800)  # 128 MiB
    save({"w": w}, tmp_path / "a")
    w[5000, 5000] = 1
    save({"w": w.t()}, tmp_path / "b", "stock")
    w[5000, 5000] = 0
    save({"w": w[:2].clone()}, tmp_path / "small")
    names = [str(tmp_path / name) for name in ("small", "a", "b")]
    assert int(run_warm(GROWTH, *names).stdout) < 96  # MiB


def test_claims_of_more_than_there_is_cost_no_memory() -> None:
    from torch_dcpx.artifacts.rows import slabs

    rows = slabs([1 << 34, 1 << 26], 1, 1 << 20)  # 2**60 elements
    assert next(rows) == ((0, 0), (1, 1 << 20))
    assert next(rows) == ((0, 1 << 20), (1, 1 << 20))
