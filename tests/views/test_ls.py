"""`dcpx.ls` returns what a monitor asks of a root, and `dcpx ls` prints it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from support.cli import code_and_text, json_of
from support.saves import data_files, save, save_rank_local

import torch_dcpx

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
