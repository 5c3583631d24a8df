"""Names and globs: a name that is there means itself, at every door that takes patterns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

import torch_dcpx as dcpx
from torch_dcpx._globs import Patterns, chosen_names, unmatched
from torch_dcpx.cli.app import app

# A name, and another one that it fits as a glob.
PAIRS = {"w[0]": "w0", "params['k']": "paramsk", "a*": "ab", "q?": "qq", "[x]": "x", "z[!a]": "zb"}
NAMES = [*PAIRS, *PAIRS.values()]


def dcpx_(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "lr=[1]*?" / "step-1"
    dcpx.save({name: torch.full((2,), float(at)) for at, name in enumerate(NAMES)}, path)
    return path


@pytest.mark.parametrize("name", PAIRS)
def test_a_name_that_is_there_means_itself(name: str) -> None:
    assert chosen_names(NAMES, [name]) == [name]
    assert chosen_names([PAIRS[name]], [name], [name]) == []
    assert unmatched(NAMES, [name]) == []
    assert Patterns([name])(name)


def test_a_pattern_that_is_no_name_is_a_glob_where_case_matters() -> None:
    assert chosen_names(["b", "a0", "A1"], ["a[01]", "b", "a*"]) == ["b", "a0"]
    assert unmatched(["b", "a0"], ["a[01]", "c", "[", "A*"]) == ["c", "[", "A*"]
    assert chosen_names(["b"], []) == []
    assert chosen_names(["b", "b"], ["b"]) == ["b"]


def test_patterns_learn_names() -> None:
    patterns = Patterns(["w[0]", "x*"])
    assert patterns("w0")
    patterns.learn({"w[0]": 1})
    assert not patterns("w0")
    assert patterns("w[0]")
    assert patterns("xy")


def exported(saved: Path, out: Path, name: str) -> Any:
    dcpx.export(saved, out, keys=[name])
    return load_file(out / "model.safetensors")


def exported_state(saved: Path, out: Path, name: str) -> Any:
    dcpx.export(dcpx.load_tensors(saved), out, keys=[name])
    return load_file(out / "model.safetensors")


def exported_by_command(saved: Path, out: Path, name: str) -> Any:
    assert dcpx_("export", saved, out, "-k", name).exit_code == 0
    return load_file(out / "model.safetensors")


def exported_as_checkpoint(saved: Path, out: Path, name: str) -> Any:
    dcpx.export(saved, out / "one.safetensors")
    assert dcpx_("export", out / "one.safetensors", out / "ckpt", "-k", name).exit_code == 0
    return dcpx.load_tensors(out / "ckpt")


def inspected(saved: Path, _: Path, name: str) -> Any:
    (found,) = json.loads(dcpx_("inspect", saved, "-k", name, "--json").output)
    return [item["fqn"] for item in found["items"]]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    "door",
    [
        lambda saved, _, name: dcpx.load_tensors(saved, [name]),
        exported,
        exported_state,
        exported_by_command,
        exported_as_checkpoint,
        inspected,
    ],
)
def test_every_door_takes_the_name(
    saved: Path, tmp_path: Path, name: str, door: Callable[[Path, Path, str], Any]
) -> None:
    assert list(door(saved, tmp_path / "out", name)) == [name]


@pytest.mark.parametrize("name", PAIRS)
def test_what_may_be_missing_is_the_name_alone(saved: Path, name: str) -> None:
    new, fits = f"{name}.new", f"{PAIRS[name]}.new"
    state = {name: torch.zeros(2), new: torch.zeros(2)}
    assert dcpx.load(state, saved, allow_missing=[new]).missing == (new,)
    with pytest.raises(dcpx.MismatchError) as caught:
        dcpx.load({**state, fits: torch.zeros(2)}, saved, allow_missing=[new])
    assert caught.value.missing == (fits,)


def test_a_stored_name_is_no_glob_of_what_may_be_missing(tmp_path: Path) -> None:
    dcpx.save({"w[0]": torch.ones(2)}, tmp_path / "ckpt")
    state = {"w0": torch.zeros(2)}
    with pytest.raises(dcpx.MismatchError):
        dcpx.load(state, tmp_path / "ckpt", allow_missing=["w[0]"])


def test_a_manager_lets_the_name_alone_be_missing(tmp_path: Path) -> None:
    with dcpx.CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, state={"a": torch.ones(2)})
        manager.wait()
        state = {"a": torch.zeros(2), "w[0]": torch.zeros(2)}
        assert manager.resume(state=state, allow_missing=["state.w[0]"]).tag == "step-1"
        more = {**state, "w0": torch.zeros(2)}
        with pytest.raises(dcpx.MismatchError):
            manager.resume(state=more, allow_missing=["state.w[0]"])


def test_object_s_name_is_no_glob_of_tensors(tmp_path: Path) -> None:
    state = {"o[0]": 1, "opt": {"lr": 0.1, "eps": 1.0}, "o0": torch.ones(2)}
    dcpx.save(state, tmp_path / "ckpt")
    with pytest.raises(dcpx.UnknownNameError, match=r"'o\[0\]' is an object"):
        dcpx.load_tensors(tmp_path / "ckpt", ["o[0]"])
    with pytest.raises(dcpx.UnknownNameError, match="means 1 object"):
        dcpx.stats(tmp_path / "ckpt", "o[0]")
    assert list(dcpx.load_tensors(tmp_path / "ckpt", "o[01]")) == ["o0"]
    with pytest.raises(dcpx.PlanError, match=r"the beginning of 2 names: 'opt.lr', 'opt.eps'"):
        dcpx.export(tmp_path / "ckpt", tmp_path / "out", keys=["opt"])
