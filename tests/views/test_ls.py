"""`dcpx.ls` returns what a monitor asks of a root, and `dcpx ls` prints it."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import code_and_text, json_of
from support.saves import WRITERS, data_files, save, save_rank_local

import torch_dcpx
from torch_dcpx import ListedCheckpoint
from torch_dcpx.integrity.contents import brief_from, read_brief, read_commit
from torch_dcpx.integrity.facts import files_text
from torch_dcpx.storage.place import open_place

STATE = {"w": torch.arange(40.0), "step": 3}
SIX = ("step", "saved_at", "ranks", "pinned", "state", "save_id")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with torch_dcpx.CheckpointManager(tmp_path / "run", no_dist=True, keep_last=3) as manager:
        for step in (1, 2, 3):
            manager.save(step, state={"w": torch.ones(30)})
        manager.save("final", step=7, state={"w": torch.ones(30)})
        manager.wait()
        manager.pin(2)
    return tmp_path / "run"


def test_ls_answers_what_a_monitor_asks(root: Path) -> None:
    found = torch_dcpx.ls(root)
    assert [one.name for one in found.checkpoints] == ["final", "step-2", "step-3"]
    assert [one.step for one in found.checkpoints] == [7, 2, 3]
    assert [one.pinned for one in found.checkpoints] == [False, True, False]
    assert {(one.state, one.ranks, one.items, one.files) for one in found.checkpoints} == {
        ("committed", 1, 2, 1)
    }
    assert found.newest is not None and found.newest.name == "final"
    assert all(one.age_s is not None and one.age_s < 600 for one in found.checkpoints)
    for row, one in zip(json_of("ls", root), found.checkpoints, strict=True):
        assert row == vars(one)
        verified = json_of("verify", one.path)
        assert {name: verified[name] for name in SIX} == {name: row[name] for name in SIX}
        assert len(row["save_id"]) == 32 and row["saved_at"].endswith("Z")
    head, columns, *rows = str(found).splitlines()
    assert head == f"{root}: 3 committed"
    assert columns.split() == [
        "state", "files", "step", "saved", "ranks", "items", "size", "pinned", "written",
        "by", "name",
    ]  # fmt: skip
    assert rows[1].split()[-3:] == ["pinned", "torch-dcpx", "step-2"]
    assert "<td" in found._repr_html_() and "3 committed" in found._repr_html_()


def test_newest_is_what_cron_asks_for(root: Path, tmp_path: Path) -> None:
    assert json_of("ls", root, "--newest")["name"] == "final"
    assert code_and_text("ls", root, "--newest", "--max-age", "1h")[0] == 0
    time.sleep(1.1)
    code, text = code_and_text("ls", root, "--newest", "--max-age", "1s")
    assert code == 1 and "was saved" in text
    shutil.rmtree(root / "step-3")
    (root / "final/__0_0.distcp").unlink()  # damaged: not the newest that could be resumed
    code, text = code_and_text("ls", root, "--newest", "--max-age", "15min")
    assert code == 1 and "step-2" in text and "final' is newer, and damaged: '__0_0" in text
    (root / "step-2/.metadata").rename(root / "away")
    code, text = code_and_text("ls", root, "--newest")
    assert code == 1 and "no whole checkpoint: '" in text and "1 committed" not in text
    (root / "away").rename(root / "step-2/.metadata")
    shutil.rmtree(root / "final")
    assert json_of("ls", root, "--newest", "--max-age", "15min")["name"] == "step-2"
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "none"):
        assert code_and_text("ls", path, "--newest", "--max-age", "2d")[0] == 2
    for age in ("1", "h", "-1h", "1y", "", "1e3s", "nan s", "1 h", "²h"):
        assert code_and_text("ls", root, "--newest", f"--max-age={age}")[0] == 2, age
    code, text = code_and_text("ls", root, "--max-age", "1h")
    assert code == 2 and "Traceback" not in text


def test_newest_of_one_second_and_step_is_the_last_by_name() -> None:
    rows = [
        ListedCheckpoint(name, name, "committed", 3, "2026-01-01T00:00:00Z", whole=True)
        for name in ("a", "b", "c")
    ]
    newest = torch_dcpx.Listing("run", tuple(rows)).newest
    assert newest is not None and newest.name == "c"


def test_a_copys_age_is_that_of_its_save(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "step-3", tmp_path / "copy/step-3")
    os.utime(tmp_path / "copy/step-3/.metadata", (1, 1))
    (one,) = torch_dcpx.ls(tmp_path / "copy").checkpoints
    assert one.age_s is not None and one.age_s < 600
    save(STATE, tmp_path / "plain")
    os.utime(tmp_path / "plain/.metadata", (86400, 86400))
    (one,) = torch_dcpx.ls(tmp_path / "plain").checkpoints
    assert one.saved_at == "1970-01-02T00:00:00Z"
    (tmp_path / "copy/step-3/__0_0.distcp").write_bytes(b"\0" * 8192)  # the record is gone
    (one,) = torch_dcpx.ls(tmp_path / "copy").checkpoints
    assert (one.step, one.saved_at) == (3, "1970-01-01T00:00:01Z")


def test_stock_and_each_ranks_own_are_listed(tmp_path: Path) -> None:
    save(STATE, tmp_path / "checkpoint-500/optimizer_0", "stock")
    for rank in range(2):
        save_rank_local(STATE, tmp_path / "local", rank)
    stock, local = torch_dcpx.ls(tmp_path).checkpoints
    assert (stock.name, stock.step, stock.ranks) == ("checkpoint-500/optimizer_0", 500, 1)
    assert stock.written_by == "stock" and stock.save_id
    assert (local.state, local.ranks, local.files) == ("committed", 2, 2)
    (tmp_path / "local/__1.metadata").unlink()
    assert torch_dcpx.ls(tmp_path).checkpoints[1].whole is False


def test_one_bad_neighbour_hides_nobody(root: Path) -> None:
    (root / "gone").symlink_to("nowhere")
    (root / "notes.txt").write_text("x")
    (root / "step-3/.metadata").write_bytes(b"nonsense")
    save(STATE, root / "step-4")
    (root / "step-4" / data_files(root / "step-4")[0]).unlink()
    found = {one.name: one for one in torch_dcpx.ls(root).checkpoints}
    assert {name: one.state for name, one in found.items()} == {
        "final": "committed", "step-2": "committed", "step-3": "unreadable",
        "step-4": "committed", "gone": "none",
    }  # fmt: skip
    assert "a link to 'nowhere', which is not there" in found["gone"].problem
    assert "is missing" in found["step-4"].problem
    assert [found[name].whole for name in ("step-2", "step-3", "step-4")] == [True, False, False]
    assert code_and_text("ls", root)[0] == code_and_text("verify", root)[0] == 1
    rows = json_of("verify", root, code=1)
    assert [row["ok"] for row in rows] == [True, True, False, False]


def test_names_cannot_draw_and_numbers_are_ordered(tmp_path: Path) -> None:
    for name in ("a\x1b[2Jb", "step-10", "step-9"):
        save(STATE, tmp_path / name)
    code, text = code_and_text("ls", tmp_path)
    assert code == 0 and "\x1b" not in text and r"a\x1b[2Jb" in text
    assert text.index("step-9") < text.index("step-10")
    assert "\x1b" not in str(torch_dcpx.ls(tmp_path))


def test_nothing_to_list_says_so(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert code_and_text("ls", tmp_path) == (0, f"{tmp_path}: no checkpoint\n")
    assert [row["name"] for row in json_of("ls", tmp_path, "--all")] == ["logs"]
    with pytest.raises(torch_dcpx.NotCommittedError):
        torch_dcpx.ls(tmp_path / "none")
    with pytest.raises(torch_dcpx.OptionError):
        torch_dcpx.ls(tmp_path, with_all=1)  # type: ignore[arg-type]


# ---- The column `files`: what is there of the files that metadata names --------------------------


THREE = {"w": torch.arange(4000.0), "b": torch.ones(7), "step": 3}


def listed(path: Path, code: int) -> dict[str, Any]:
    """Returns the one row, as JSON has it, with the cell `files` of the table as "cell"."""
    found, table = code_and_text("ls", path)
    assert found == code, table
    (row,) = json_of("ls", path, code=code)
    head, line, *_ = table.splitlines()
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
    save(THREE, tmp_path / "a", writer)
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
    assert code_and_text(*line.split()[1:])[0] == 1


def test_a_file_of_ours_that_is_longer_is_not_whole(tmp_path: Path) -> None:
    for writer in WRITERS:
        save(THREE, tmp_path / writer / "a", writer)
        truncate(tmp_path / writer / "a" / data_files(tmp_path / writer / "a")[0], 10)
    assert listed(tmp_path / "ours", 1)["cell"] == "1 of 1 too long"
    assert len(torch_dcpx.inspect(tmp_path / "ours" / "a").faults) == 1
    assert listed(tmp_path / "stock", 0)["cell"] == "whole"  # its metadata holds no sizes of files


def test_ranks_are_counted_together(tmp_path: Path) -> None:
    for rank in range(3):
        save_rank_local(THREE, tmp_path, rank)
    second, third = (next(tmp_path.glob(f"__{rank}_*.distcp")) for rank in (1, 2))
    second.unlink()
    truncate(third, -1)
    assert listed(tmp_path, 1)["cell"] == "1 of 3 missing, 1 short"
    assert files_text(5, 0, 1, 2, is_whole=False) == "1 of 5 short, 2 too long"


def test_the_brief_says_what_the_metadata_says(tmp_path: Path) -> None:
    with torch_dcpx.CheckpointManager(tmp_path / "run", no_dist=True) as manager:
        manager.save(1, state=THREE)
        manager.wait()
    for writer in WRITERS:
        save(THREE, tmp_path / writer, writer)
    save({"é\ud800": torch.ones(2)}, tmp_path / "odd name")
    for path in (*map(tmp_path.joinpath, (*WRITERS, "odd name")), tmp_path / "run/step-1"):
        with open_place(path) as place:
            brief = read_brief(place, ".metadata")
            assert brief == brief_from(read_commit(place, ".metadata"))
            assert (brief.record is None) == (path.name != "step-1") and brief.sizes


def test_a_pickle_that_is_not_as_torch_writes_it_is_read_by_torch(tmp_path: Path) -> None:
    save(THREE, tmp_path, "stock")
    path = tmp_path / ".metadata"
    made = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(made, protocol=2))
    assert listed(tmp_path, 0)["cell"] == "whole"
    (tmp_path / data_files(tmp_path)[0]).unlink()
    assert listed(tmp_path, 1)["cell"] == "1 of 1 missing"
