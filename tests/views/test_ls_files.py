"""The column `files` of `dcpx ls`: what is there of the files that metadata names, by one look."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.saves import WRITERS, data_files, save, save_rank_local

import torch_dcpx
from torch_dcpx.cli.app import app
from torch_dcpx.integrity.contents import brief_from, read_brief, read_commit
from torch_dcpx.integrity.facts import files_text
from torch_dcpx.storage.place import open_place

STATE = {"w": torch.arange(4000.0), "b": torch.ones(7), "step": 3}


def listed(path: Path, code: int) -> dict[str, Any]:
    """Returns the one row, as JSON has it, with the cell `files` of the table as "cell"."""
    table = CliRunner().invoke(app, ["ls", str(path)])
    result = CliRunner().invoke(app, ["ls", str(path), "--json"])
    assert table.exit_code == result.exit_code == code, table.output
    (row,) = json.loads(result.stdout)
    head, line, *_ = table.output.splitlines()
    begin, end = head.index("files"), head.index("  step")
    return {**row, "cell": line[begin:end].strip()}


def truncate(path: Path, nbytes: int) -> None:
    os.truncate(path, path.stat().st_size + nbytes)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (Path.unlink, "1 of 1 missing"),
    "cut": (lambda path: truncate(path, -4096), "1 of 1 short"),
    "a link": (replace_by_link, "1 of 1 missing"),
    "a directory": (replace_by_directory, "1 of 1 missing"),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_files_that_are_not_as_metadata_says_are_counted(
    tmp_path: Path, writer: str, harm: str
) -> None:
    save(STATE, tmp_path / "a", writer)
    row = listed(tmp_path, 0)
    assert (row["cell"], row["whole"], row["missing"], row["short"]) == ("whole", True, 0, 0)
    do, cell = HARMS[harm]
    do(tmp_path / "a" / data_files(tmp_path / "a")[0])
    row = listed(tmp_path, 1)
    assert (row["state"], row["cell"], row["whole"]) == ("committed", cell, False)
    assert (row["missing"], row["short"]) == ((0, 1) if "short" in cell else (1, 0))
    is_there = harm in ("a link", "a directory")
    assert ("is no regular file" in row["problem"]) == is_there
    line = row["problem"].split("`")[1]
    assert line == f"dcpx verify {tmp_path / 'a'}"
    assert CliRunner().invoke(app, line.split()[1:]).exit_code == 1


def test_a_file_of_ours_that_is_longer_is_not_whole(tmp_path: Path) -> None:
    for writer in WRITERS:
        save(STATE, tmp_path / writer / "a", writer)
        truncate(tmp_path / writer / "a" / data_files(tmp_path / writer / "a")[0], 10)
    assert listed(tmp_path / "ours", 1)["cell"] == "1 of 1 too long"
    assert listed(tmp_path / "stock", 0)["cell"] == "whole"  # its metadata holds no sizes of files


def test_ranks_are_counted_together(tmp_path: Path) -> None:
    for rank in range(3):
        save_rank_local(STATE, tmp_path, rank)
    second, third = (next(tmp_path.glob(f"__{rank}_*.distcp")) for rank in (1, 2))
    second.unlink()
    truncate(third, -1)
    assert listed(tmp_path, 1)["cell"] == "1 of 3 missing, 1 short"
    assert files_text(5, 0, 1, 2, is_whole=False) == "1 of 5 short, 2 too long"


def test_the_brief_says_what_the_metadata_says(tmp_path: Path) -> None:
    with torch_dcpx.CheckpointManager(tmp_path / "run", no_dist=True) as manager:
        manager.save(1, state=STATE)
        manager.wait()
    for writer in WRITERS:
        save(STATE, tmp_path / writer, writer)
    save({"é\ud800": torch.ones(2)}, tmp_path / "odd name")
    for path in (*map(tmp_path.joinpath, (*WRITERS, "odd name")), tmp_path / "run/step-1"):
        with open_place(path) as place:
            brief = read_brief(place, ".metadata")
            assert brief == brief_from(read_commit(place, ".metadata"))
            assert (brief.record is None) == (path.name != "step-1") and brief.sizes


def test_a_pickle_that_is_not_as_torch_writes_it_is_read_by_torch(tmp_path: Path) -> None:
    save(STATE, tmp_path, "stock")
    path = tmp_path / ".metadata"
    made = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(made, protocol=2))
    assert listed(tmp_path, 0)["cell"] == "whole"
    (tmp_path / data_files(tmp_path)[0]).unlink()
    assert listed(tmp_path, 1)["cell"] == "1 of 1 missing"
