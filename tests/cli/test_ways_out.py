"""What `verify`, `repair` and `gc` say of lost or damaged metadata leads to a whole checkpoint."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.cli import code_and_text
from support.saves import data_files, save, save_rank_local

import torch_dcpx

STATE = {"w": torch.arange(4000.0), "b": torch.ones(7), "step": 3}


def follow(text: str) -> tuple[int, str]:
    """Carries out the last command that a text names."""
    line = shlex.split(text.split("`")[-2])
    assert line[0] == "dcpx", text
    return code_and_text(*line[1:])


def put_away(path: Path) -> None:
    path.rename(path.parent.with_name("away"))


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARMS: dict[str, Callable[[Path], None]] = {
    "cut behind its pickle": lambda path: os.truncate(path, path.stat().st_size - 20),
    "cut": lambda path: os.truncate(path, 300),
    "empty": lambda path: os.truncate(path, 0),
    "lost": Path.unlink,
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("ranks", [0, 2])
def test_verify_names_the_repair_that_helps(tmp_path: Path, ranks: int, harm: str) -> None:
    if ranks:
        for rank in range(ranks):
            save_rank_local(STATE, tmp_path, rank)
    else:
        save(STATE, tmp_path)
    HARMS[harm](tmp_path / ("__1.metadata" if ranks else ".metadata"))
    code, text = code_and_text("verify", tmp_path)
    assert code == 1 and "`dcpx repair --accept-assumptions" in text
    code, said = code_and_text("repair", tmp_path, "--dry-run")
    assert code == 1 and "nothing was written: where you know what is assumed" in said
    code, text = follow(text)
    assert code == 0, text
    assert code_and_text("verify", tmp_path)[0] == code_and_text("ls", tmp_path)[0] == 0


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_metadata_that_is_no_file_is_moved_away_first(tmp_path: Path, kind: str) -> None:
    save(STATE, tmp_path / "a")
    path = tmp_path / "a/.metadata"
    if kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        as_directory(path)
    for verb in ("verify", "repair"):
        code, text = code_and_text(verb, tmp_path / "a")
        assert code == 1 and f"move it away, and `dcpx repair {tmp_path / 'a'}` may make it" in text
    assert "says what can be done" in code_and_text("ls", tmp_path / "a")[1]
    put_away(path)
    code, text = follow(text)
    assert code == 1
    assert follow(text)[0] == code_and_text("verify", tmp_path / "a")[0] == 0


def test_repair_repeats_what_it_was_asked(tmp_path: Path) -> None:
    for rank in range(2):
        save_rank_local(STATE, tmp_path, rank)
        (tmp_path / f"__{rank}.metadata").unlink()
    code, text = code_and_text("ls", tmp_path)
    assert code == 1 and "with --rank-local or --all-ranks" in text
    code, text = code_and_text("repair", "--rank-local", tmp_path)
    assert code == 1 and "`dcpx repair --accept-assumptions --rank-local" in text
    assert follow(text)[0] == code_and_text("verify", tmp_path)[0] == 0


def test_gc_keeps_what_repair_could_use(tmp_path: Path) -> None:
    for rank in range(3):
        save_rank_local(STATE, tmp_path, rank)
    (tmp_path / "__1.metadata").unlink()
    (tmp_path / "__2.metadata").unlink()
    (third,) = tmp_path.glob("__2_*.distcp")
    os.truncate(third, 100)  # nobody can use it
    code, text = code_and_text("gc", "--delete", tmp_path)
    assert code == 0 and "kept" in text and "of a rank whose metadata is not there" in text
    assert "removed" in text and not third.exists() and len(data_files(tmp_path)) == 2
    code, text = follow(text)
    assert follow(text)[0] == code_and_text("verify", tmp_path)[0] == 0
    assert torch_dcpx.ls(tmp_path).checkpoints[0].ranks == 2


def test_ls_and_doctor_lead_to_an_export(tmp_path: Path) -> None:
    for name in ("one", "run/step-1"):
        torch_dcpx.export(STATE, tmp_path / name, no_dist=True)
    for name in ("a.safetensors", "b.safetensors"):
        torch_dcpx.export(STATE, tmp_path / "two" / name, no_dist=True)
    for path in (tmp_path / "one", tmp_path / "run", tmp_path / "two"):
        code, text = code_and_text("ls", path)
        assert code == 0 and "no checkpoint, but an export: `dcpx inspect" in text
        assert "3 items (2 tensors, 1 object)" in follow(text)[1] or "2 tensors" in follow(text)[1]
        assert "but an export: `dcpx inspect" in code_and_text("doctor", path)[1]
        assert code_and_text("gc", path)[1] == f"no file there is left by a save: {path}\n"
    assert "not verified" not in code_and_text("verify", tmp_path / "one")[1]
    save(STATE, tmp_path / "run/step-2")
    code, text = code_and_text("ls", tmp_path / "run")
    assert code == 0 and "committed" in text and "an export" in text
    torch_dcpx.export(STATE, tmp_path / "run/beside.safetensors", no_dist=True)
    assert len(code_and_text("ls", tmp_path / "run")[1].splitlines()) == len(text.splitlines())


def test_stats_of_an_object_lead_to_cat(tmp_path: Path) -> None:
    save({**STATE, "cfg": {"lr": 1.5, "name": "it's"}}, tmp_path)
    for key, shown in (("step", "3"), ("cfg*", "1.5"), ("cfg", "cfg.lr")):
        code, text = code_and_text("stats", tmp_path, "-k", key)
        assert code == 2 and "nor a glob" not in text
        assert shown in follow(text)[1]
    assert (
        code_and_text("stats", tmp_path, "-k", "[ws]*")[0] == 0
    )  # tensors, and objects beside them


def test_each_ranks_own_is_exported_by_what_the_error_says(tmp_path: Path) -> None:
    for rank in (1, 2):
        save_rank_local({"w": torch.full((3,), float(rank))}, tmp_path / "it's", rank)
    code, text = code_and_text("export", tmp_path / "it's", tmp_path / "x.safetensors")
    assert code == 2 and "metadata of 2 ranks, of each its own" in text
    names = {"export": torch_dcpx.export, "load_tensors": torch_dcpx.load_tensors}
    way = text.rpartition("to export: ")[2].replace("...", "out, no_dist=True")
    eval(way, {**names, "out": tmp_path / "x.safetensors"})
    assert torch_dcpx.load_tensors(tmp_path / "x.safetensors")["w"].tolist() == [1.0] * 3
    for verb in ("cat", "stats"):
        line = [verb, tmp_path / "it's", *["w"] * (verb == "cat")]
        assert code_and_text(*line)[0] == 2 and code_and_text(*line, "--rank", 1)[0] == 0
