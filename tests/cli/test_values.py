"""`dcpx cat` prints values, `dcpx diff` compares them: by checksums where it can."""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from support.cli import dcpx, json_of
from support.saves import data_files, save

import torch_dcpx
from torch_dcpx.views import values

STATE: dict[str, Any] = {
    "w": torch.arange(600.0).view(20, 30),
    "half": torch.ones(4, dtype=torch.bfloat16),
    "step": 3,
    "more": {"lr": 2.5, "betas": [0.9, "x"]},
}


class Own:
    """Of a user: no reader rebuilds it unless it is told to."""

    key = 0


def changed(**changes: Any) -> dict[str, Any]:
    return {**STATE, **changes}


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_cat_prints_tensors_rows_and_objects(tmp_path: Path, writer: Any) -> None:
    save({**STATE, "odd[0]": torch.tensor(7)}, tmp_path, writer)
    names = ["w[3:5, 0]", "w[-1, ::10]", "w[..., 29]", "half", "step", "more.lr", "odd[0]"]
    found = [each["value"] for each in json_of("cat", tmp_path, *names)]
    w = STATE["w"]
    assert found[:3] == [w[3:5, 0].tolist(), w[-1, ::10].tolist(), w[..., 29].tolist()]
    assert found[3:] == [[1.0] * 4, 3, 2.5, 7]
    text = dcpx("cat", tmp_path, "w[0, :2]", "step").stdout
    assert text.splitlines() == ["w[0, :2]: float32 [2]", "tensor([0., 1.])", "step: 3"]
    full = dcpx("cat", tmp_path, "--full", "w").stdout
    assert "..." not in full and "599." in full


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("v", "UnknownNameError", "'w'"),
        ("w[a]", "OptionError", "begin:end"),
        ("w[1:2:3:4]", "OptionError", "begin:end"),
        ("w[]", "OptionError", "begin:end"),
        ("w[0,0,0]", "OptionError", "3 indices"),
        ("w[99]", "OptionError", "99"),
        ("step[0]", "UnknownNameError", "is an object"),
    ],
)
def test_cat_names_what_it_cannot_print(tmp_path: Path, name: str, kind: str, words: str) -> None:
    save(STATE, tmp_path)
    error = json_of("cat", tmp_path, name, code=2)["error"]
    assert error["type"] == kind and words in error["message"]


@pytest.mark.parametrize("sides", [("ours", "ours"), ("ours", "stock"), ("stock", "stock")])
def test_diff_of_equal_checkpoints_finds_nothing(tmp_path: Path, sides: Any) -> None:
    for name, writer in zip("ab", sides, strict=True):
        save(STATE, tmp_path / name, writer)
    found = json_of("diff", tmp_path / "a", tmp_path / "b")
    assert (found["differences"], found["equal"]) == ([], 5)
    assert found["read_bytes"] == 2 * (2400 + 8)
    found = json_of("diff", tmp_path / "a", tmp_path / "b", "--quick")
    assert (found["differences"], found["equal"]) == ([], 5)
    is_by_sums = sides == ("ours", "ours")
    assert found["read_bytes"] == (0 if is_by_sums else 2 * (2400 + 8))


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_diff_says_what_differs_in_which_name(tmp_path: Path, writer: Any) -> None:
    bit = STATE["w"].clone()
    bit.view(torch.int32)[19, 29] ^= 1
    other = {
        "w": bit, "half": STATE["half"].float(), "step": torch.tensor(3), "more": {"lr": 3.5},
        "new": torch.zeros(2, 3),
    }  # fmt: skip
    save(STATE, tmp_path / "a")
    save(other, tmp_path / "b", writer)
    found = json_of("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert {row["name"]: (row["what"], row["a"], row["b"]) for row in found["differences"]} == {
        "w": ("values", "float32 [20, 30]", "float32 [20, 30]"),
        "half": ("dtype", "bfloat16 [4]", "float32 [4]"),
        "step": ("kind", "3", "int64 []"),
        "more.lr": ("values", "2.5", "3.5"),
        "more.betas": ("only in A", "[0.9, 'x']", ""),
        "new": ("only in B", "", "float32 [2, 3]"),
    }
    assert found["equal"] == 0
    text = dcpx("diff", tmp_path / "a", tmp_path / "b", "--limit", 2)
    assert "6 differences, 0 equal names;" in text.stdout
    assert text.stdout.endswith("\n4 names not shown: --limit 0 shows all\n")
    for args in ([], ["--parts"]):
        text = dcpx("inspect", tmp_path / "a", "--limit", 1, *args)
        assert text.stdout.endswith("\n4 names not shown: --limit 0 shows all\n"), text.stdout


def test_diff_reads_tensors_that_are_stored_in_other_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = STATE["w"]
    save(changed(w=w), tmp_path / "a")
    save(changed(w=w.t().contiguous().t()), tmp_path / "b")  # equal values, transposed memory
    args = "diff", tmp_path / "a", tmp_path / "b", "--quick"
    found = json_of(*args)
    assert (found["differences"], found["read_bytes"]) == ([], 2 * w.nbytes)
    monkeypatch.setattr(values, "_PIECE_BYTES", 100)  # in pieces of less than a row
    assert json_of(*args) == found
    other = w.clone()
    other[7, 29] += 1
    save(changed(w=other.t().contiguous().t()), tmp_path / "b")
    (row,) = json_of(*args, code=1)["differences"]
    assert (row["name"], row["what"], row["different"]) == ("w", "values", 1)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_diff_goes_on_behind_a_tensor_that_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Any
) -> None:
    for path, value in (("a", 1.0), ("b", 2.0)):
        q = torch.quantize_per_tensor(torch.full((4,), value), 0.1, 0, torch.qint8)
        save({"q": q, "e": torch.ones(9), "v": torch.full((9,), value)}, tmp_path / path, writer)
    for most in (1 << 20, 1):  # together, and each in pieces
        monkeypatch.setattr(values, "_PIECE_BYTES", most)
        found = json_of("diff", tmp_path / "a", tmp_path / "b", code=1)
        rows = [(row["name"], row["what"], row["note"]) for row in found["differences"]]
        unread = "by stored bytes: UnsupportedError"
        assert rows == [("q", "values", unread), ("v", "values", "")]
        assert found["equal"] == 1


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_diff_compares_the_bits_of_tensors_in_objects(tmp_path: Path, writer: Any) -> None:
    values = {"nan": float("nan"), "zero": 0.0}
    one = {name: (torch.tensor(value).expand(3), name) for name, value in values.items()}
    save(one, tmp_path / "a", writer)
    save({**one, "zero": (torch.tensor(-0.0).expand(3), "zero")}, tmp_path / "b", "stock")
    found = json_of("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert [row["name"] for row in found["differences"]] == ["zero"]


def test_diff_reads_where_a_footer_is_not_of_the_checkpoint(tmp_path: Path) -> None:
    save(STATE, tmp_path / "a")
    save(STATE, tmp_path / "b")
    (name,) = data_files(tmp_path / "b")
    data = bytearray((tmp_path / "b" / name).read_bytes())
    data[-60] ^= 1  # in the tail, where the index's checksum is
    (tmp_path / "b" / name).write_bytes(data)
    for more in ((), ("--quick",)):
        error = json_of("diff", tmp_path / "a", tmp_path / "b", *more, code=1)["error"]
        assert error["type"] == "CorruptionError"


def test_json_has_no_nan(tmp_path: Path) -> None:
    save({"w": torch.tensor([1.0, float("nan"), float("-inf")]), "best": float("inf")}, tmp_path)
    found = [each["value"] for each in json_of("cat", tmp_path, "w", "best")]
    assert found == [[1.0, "nan", "-inf"], "inf"]


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_diff_executes_nothing_and_compares_refused_objects_by_their_bytes(
    tmp_path: Path, writer: Any
) -> None:
    for name, key in (("a", 1), ("b", 2)):
        own = Own()
        own.key = key
        save({"x": OrderedDict(a=1), "y": own, "z": Own()}, tmp_path / name, writer)
    found = json_of("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert [row["name"] for row in found["differences"]] == ["y"]


# ---- cat: globs of tensors and objects, prefixes, bytes of torch.save ----------------------------


LAYERS: dict[str, Any] = {
    "layers": {
        "0": {"weight": torch.ones(2), "bias": torch.zeros(2)},
        "1": {"bias": torch.ones(2)},
    },
    "opt": {"lr": 0.5, "betas": [0.9, 0.95]},
    "step": 3,
}


def cat(*args: object) -> Result:
    return dcpx("cat", *args)


def values_of(*args: object) -> dict[str, Any]:
    return {each["name"]: each["value"] for each in json.loads(cat(*args, "--json").stdout)}


def archive(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch_dcpx.save(LAYERS, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_globs_mean_tensors_and_objects_in_stored_order(saved: Path) -> None:
    zeros, ones = [0.0, 0.0], [1.0, 1.0]
    assert values_of(saved, "*.bias") == {"layers.0.bias": zeros, "layers.1.bias": ones}
    assert values_of(saved, "opt.*") == {"opt.lr": 0.5, "opt.betas": [0.9, 0.95]}
    assert values_of(saved, "*") == {
        "layers.0.weight": ones, "layers.0.bias": zeros, "layers.1.bias": ones,
        "opt.lr": 0.5, "opt.betas": [0.9, 0.95], "step": 3,
    }  # fmt: skip
    assert values_of(saved, "layers.[01].bias[1:]") == {
        "layers.0.bias[1:]": [0.0], "layers.1.bias[1:]": [1.0]
    }  # fmt: skip
    assert values_of(saved, "step", "st*", "layers.0.bias[0]") == {
        "step": 3,
        "layers.0.bias[0]": 0.0,
    }


def test_a_prefix_shows_the_names_beneath_it(saved: Path) -> None:
    found = cat(saved, "layers.0")
    assert found.exit_code == 2
    assert "'layers.0.weight', 'layers.0.bias'; 'layers.0.*' means all of them" in found.stderr
    assert list(values_of(saved, "layers.0.*")) == ["layers.0.weight", "layers.0.bias"]
    assert "'opt.lr', 'opt.betas'; 'opt.*' means" in cat(saved, "opt").stderr
    assert "did you mean: 'step'" in cat(saved, "steps").stderr


@pytest.mark.parametrize("make", [bytes, bytearray, io.BytesIO])
def test_bytes_of_torch_save_are_shown_and_not_executed(tmp_path: Path, make: Any) -> None:
    held = {"rng": torch.arange(3), "seen": (1, None)}
    own = archive({"x": Own()})
    torch_dcpx.save(
        {"a": make(archive(held)), "b": make(own), "c": b"PK\x03\x04", "d": b"\0"}, tmp_path
    )
    lines = cat(tmp_path, "a").stdout
    assert "B of torch.save: {'rng': tensor([0, 1, 2]), 'seen': (1, None)}" in lines
    found = cat(tmp_path, "b", "c", "d")
    assert found.exit_code == 0
    assert f"b: {len(own)} B of torch.save, not shown: " in found.stdout
    assert "Own" in found.stdout and "d: b'\\x00'" in found.stdout
    assert [one["name"] for one in json.loads(cat(tmp_path, "*", "--json").stdout)] == [*"abcd"]


def test_what_a_manager_keeps_for_each_rank_is_readable(tmp_path: Path) -> None:
    with torch_dcpx.CheckpointManager(tmp_path) as manager:
        manager.save(1, state={"a": torch_dcpx.PerRank([7])}, user_content={"note": "hi"})
        manager.wait()
    found = cat(tmp_path / "step-1", "dcpx.user_content", "dcpx.rank.0").stdout
    assert "{'note': 'hi'}" in found and "[7]" in found


def test_one_object_that_no_reader_makes_hides_no_other(tmp_path: Path) -> None:
    torch_dcpx.save({"a": 1, "own": Own(), "z": 2}, tmp_path)
    found = cat(tmp_path, "*")
    assert found.stdout.splitlines() == ["a: 1", "z: 2"]
    assert found.exit_code == 1 and "Own" in found.stderr
    rows = json.loads(cat(tmp_path, "*", "--json").stdout)
    assert [row["name"] for row in rows] == ["a", "own", "z"]
    assert rows[1]["error"]["type"] == "UnsafePickleError"


def test_json_has_arrays_as_lists_and_loses_no_key(tmp_path: Path) -> None:
    tensor = torch.arange(2.0)
    state = {"a": np.arange(3), "s": np.float32(2), "t": (tensor,), "keys": ({1: "a", "1": "b"},)}
    torch_dcpx.save(state, tmp_path)
    found = {row["name"]: row["value"] for row in json.loads(cat(tmp_path, "*", "--json").stdout)}
    assert found["a"] == [0, 1, 2] and found["s"] == 2.0 and found["t"] == [[0.0, 1.0]]
    assert found["keys"] == [{"1": "a", "'1'": "b"}]
