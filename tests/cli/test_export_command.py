"""`dcpx export` converts checkpoints to files that others open, and such files to checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import dcpx, json_of
from support.saves import assert_loads, data_files, save

export = functools.partial(json_of, "export")
STATE = {"w": torch.arange(600.0).view(20, 30), "n": torch.arange(5)}


@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.parametrize("name", ["y.pt", "y.safetensors", "folder"])
def test_there_and_back_again_keeps_every_bit(tmp_path: Path, writer: Any, name: str) -> None:
    save(STATE, tmp_path / "a", writer)
    found = export(tmp_path / "a", tmp_path / name)
    assert (found["tensors"], found["left_out"]) == (2, [])
    if name == "y.pt":
        loaded = torch.load(tmp_path / name, weights_only=True)
        assert all(torch.equal(loaded[key], STATE[key]) for key in STATE)
    assert export(tmp_path / name, tmp_path / "b")["tensors"] == 2
    assert_loads(STATE, tmp_path / "b")


def test_keys_and_dtype_choose_what_is_written(tmp_path: Path) -> None:
    save(STATE, tmp_path / "a")
    export(tmp_path / "a", tmp_path / "y.pt", "--dtype", "bfloat16")
    loaded = torch.load(tmp_path / "y.pt", weights_only=True)
    assert (loaded["w"].dtype, loaded["n"].dtype) == (torch.bfloat16, torch.int64)
    export(tmp_path / "y.pt", tmp_path / "b", "-k", "w", "--dtype", "float32")
    assert_loads({"w": STATE["w"].bfloat16().float()}, tmp_path / "b")
    error = export(tmp_path / "a", tmp_path / "z.pt", "--dtype", "int8", code=2)["error"]
    assert error["type"] == "OptionError" and "bfloat16" in error["message"]
    assert not (tmp_path / "z.pt").exists()


def test_what_is_not_there_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    assert export(tmp_path / "a", tmp_path / "b", code=2)["error"]["errno"] == 2
    (tmp_path / "a").mkdir()
    assert export(tmp_path / "a", tmp_path / "b", code=2)["error"]["type"] == "NotCommittedError"
    save(STATE, tmp_path / "a")
    data = bytearray((tmp_path / "a" / data_files(tmp_path / "a")[0]).read_bytes())
    data[1000:1200] = bytes(200)
    (tmp_path / "a" / data_files(tmp_path / "a")[0]).write_bytes(data)
    assert export(tmp_path / "a", tmp_path / "y.pt", code=1)["error"]["type"] == "CorruptionError"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("dest", ["b", "run", "out", "y.pt", "a"])
def test_nothing_that_is_there_is_replaced_by_chance(tmp_path: Path, dest: str) -> None:
    for name in ("a", "b", "run/step-1"):
        save({**STATE, "step": 1}, tmp_path / name)
    export(tmp_path / "a", tmp_path / "out")
    export(tmp_path / "a", tmp_path / "y.pt")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for source in ("a", "out", "y.pt"):
        for flags in ((), ("--format", "dcp")) if not dest.endswith(".pt") else ((),):
            error = export(tmp_path / source, tmp_path / dest, *flags, code=2)["error"]
            assert error["type"] == "OptionError" and "is there; name another" in error["message"]
    error = export(tmp_path / "out", tmp_path / "run", "--overwrite", code=2)["error"]
    assert "no checkpoint that could be replaced" in error["message"]
    error = export(tmp_path / "a", tmp_path / "b", "--overwrite", code=2)["error"]
    assert "holds a checkpoint" in error["message"]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_overwrite_replaces_what_is_of_the_same_kind(tmp_path: Path) -> None:
    save(STATE, tmp_path / "a")
    save({"w": torch.zeros(3)}, tmp_path / "b")
    export(tmp_path / "a", tmp_path / "out")
    export(tmp_path / "a", tmp_path / "out", "--overwrite")
    export(tmp_path / "out", tmp_path / "b", "--overwrite")
    assert_loads(STATE, tmp_path / "b")


def test_what_is_left_out_is_counted_and_named(tmp_path: Path) -> None:
    state = {"model": STATE, "optimizer": {"m": torch.ones(2)}, "step": 3}
    save(state, tmp_path / "a")
    result = dcpx("export", tmp_path / "a", tmp_path / "out")
    assert "left out 2 names: 'optimizer.m', 'step'" in result.stdout
    assert export(tmp_path / "out", tmp_path / "run-1.5")["tensors"] == 2
    assert (tmp_path / "run-1.5/.metadata").is_file()


def test_objects_are_counted_and_nothing_to_write_is_2_and_leaves_nothing(tmp_path: Path) -> None:
    save({**STATE, "step": 3}, tmp_path / "a")
    found = export(tmp_path / "a", tmp_path / "y.pt", "-k", "step")
    assert (found["tensors"], found["objects"], found["left_out"]) == (0, 1, [])
    assert export(tmp_path / "y.pt", tmp_path / "b", "-k", "step")["objects"] == 1
    assert_loads({"step": 3}, tmp_path / "b")
    save({"step": 3}, tmp_path / "c")
    torch.save({}, tmp_path / "empty.pt")
    for args in (("c", "z"), ("a", "z", "-k", "v"), ("y.pt", "z", "-k", "v"), ("empty.pt", "z")):
        error = export(*(tmp_path / one for one in args[:2]), *args[2:], code=2)["error"]
        assert error["type"] in ("PlanError", "UnknownNameError")
        assert not (tmp_path / "z").exists()


def test_module_of_ddp_is_left_out_of_names_on_request(tmp_path: Path) -> None:
    save({f"module.{name}": value for name, value in STATE.items()}, tmp_path / "a")
    for args, begin in (((), "module."), (("--unwrap",), "")):
        export(tmp_path / "a", tmp_path / "y.pt", "--overwrite", *args)
        loaded = torch.load(tmp_path / "y.pt", weights_only=True)
        assert loaded.keys() == {begin + name for name in STATE}
    error = export(tmp_path / "y.pt", tmp_path / "b", "--unwrap", code=2)["error"]
    assert "--unwrap is for exports" in error["message"]
    assert not (tmp_path / "b").exists()
