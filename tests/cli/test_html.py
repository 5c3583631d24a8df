"""`--html` writes one file: what is in it, what it is not written over, what writing it reads."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import dcpx, scripts_of
from support.page_samples import EXPERTS, GRID, RANKS, forge_many, save_language_model
from support.saves import WRITERS, data_files, save, save_rank_local

import torch_dcpx
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.place import PosixPlace

STATE = {"model": {"w": torch.arange(600.0).view(20, 30), "b": torch.ones(5)}, "step": 3}


def drawn(path: Path, *args: object, code: int = 0) -> Any:
    """The data of the page that a command writes at `path`."""
    result = dcpx(*args, "--html", path)
    assert result.exit_code == code, result.output
    assert f"wrote '{path}', " in result.stdout
    return scripts_of(path)[0]


# ---- What is in it -------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_page_of_inspect_has_every_name_chunk_and_file(tmp_path: Path, writer: str) -> None:
    save(STATE, tmp_path / "a", writer)
    found = drawn(tmp_path / "out.html", "inspect", tmp_path / "a")
    assert found["path"] == str(tmp_path / "a")
    (one,) = found["checkpoints"]
    (listed,) = json.loads(dcpx("inspect", tmp_path / "a", "--parts", "--json").stdout)
    for at, item in enumerate(listed["items"]):
        columns = one["items"]
        for name, column in (("fqn", "name"), ("dtype", "dtype"), ("shape", "shape")):
            assert columns[column][at] == item[name]
        (chunk,) = item["parts"]
        where = [chunk["offsets"], chunk["sizes"], 0, chunk["nbytes"]]
        assert one["layouts"][columns["layout"][at]] == [where]
        assert columns["at"][at] == [chunk["offset"]]
    (file,) = data_files(tmp_path / "a")
    size = (tmp_path / "a" / file).stat().st_size
    assert one["files"] == {"name": [file], "rank": [0], "found": [size]}
    version = f"torch-dcpx {torch_dcpx.__version__}, torch {torch.__version__}"
    assert one["written_by"] == {"ours": version, "stock": "stock"}[writer]
    assert one["saved"] == listed["saved_at"] and one["step"] is None
    assert one["faults"] == []


def test_page_says_which_rank_holds_which_part(tmp_path: Path) -> None:
    save_language_model(tmp_path / "a")
    (one,) = drawn(tmp_path / "out.html", "inspect", tmp_path / "a")["checkpoints"]
    assert one["files"]["rank"] == list(range(RANKS))
    layout = {
        name: one["layouts"][number]
        for name, number in zip(one["items"]["name"], one["items"]["layout"], strict=True)
    }
    assert [chunk[:3] for chunk in layout[GRID]] == [
        [[12 * (rank // 2), 16 * (rank % 2)], [12, 16], rank] for rank in range(RANKS)
    ]
    assert [chunk[:3] for chunk in layout[EXPERTS]] == [
        [[rank // 2, 0, 32 * (rank % 2)], [1, 16, 32], rank] for rank in range(RANKS)
    ]


def test_page_keeps_to_the_keys_and_has_each_ranks_own_checkpoint(tmp_path: Path) -> None:
    for rank in range(2):
        save_rank_local(STATE, tmp_path / "a", rank)
    found = drawn(tmp_path / "out.html", "inspect", tmp_path / "a", "-k", "*.b")
    assert [one["metadata_file"] for one in found["checkpoints"]] == [
        "__0.metadata", "__1.metadata",
    ]  # fmt: skip
    assert {tuple(one["items"]["name"]) for one in found["checkpoints"]} == {("model.b",)}
    assert found["checkpoints"][0]["keys"] == ["*.b"]


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
def test_page_of_an_export_has_no_ranks(tmp_path: Path, name: str) -> None:
    torch_dcpx.export(STATE["model"], tmp_path / name)
    (one,) = drawn(tmp_path / "out.html", "inspect", tmp_path / name)["checkpoints"]
    assert one["files"]["rank"] == [None]
    assert sorted(one["items"]["name"]) == ["b", "w"] and one["saved"]


def test_page_of_a_damaged_checkpoint_says_so(tmp_path: Path) -> None:
    save(STATE, tmp_path / "a")
    (file,) = data_files(tmp_path / "a")
    os.truncate(tmp_path / "a" / file, 100)
    (one,) = drawn(tmp_path / "out.html", "inspect", tmp_path / "a", code=1)["checkpoints"]
    assert f"'{file}' has 100 B" in one["faults"][0]


def test_page_of_a_file_of_an_impossible_year_has_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(STATE, tmp_path / "a")
    look = PosixPlace.look
    for number, seconds in enumerate((1e12, -1e12, 1e300, float("inf"), float("nan"))):
        monkeypatch.setattr(
            PosixPlace,
            "look",
            lambda place, s=seconds: look(place)._replace(modified_s=lambda _: s),
        )
        (one,) = drawn(tmp_path / f"{number}.html", "inspect", tmp_path / "a")["checkpoints"]
        assert one["saved"] == "", seconds


def test_page_of_diff_has_every_name_of_both_sides(tmp_path: Path) -> None:
    a = {"same": torch.ones(4), "gone": torch.ones(2), "v": torch.ones(3), "shape": torch.ones(6),
         "dtype": torch.ones(2), "step": 1, "kind": 5}  # fmt: skip
    b = {"same": torch.ones(4), "v": torch.zeros(3), "shape": torch.ones(2, 3), "step": 2,
         "dtype": torch.ones(2).half(), "kind": torch.ones(1), "new": torch.ones(9)}  # fmt: skip
    save(a, tmp_path / "a")
    save(b, tmp_path / "b")
    args = "diff", tmp_path / "a", tmp_path / "b"
    found = drawn(tmp_path / "out.html", *args, code=1)
    items = found["items"]
    rows = zip(*(items[name] for name in ("name", "what", "bytes_a", "bytes_b")), strict=True)
    assert {name: row for name, *row in rows} == {
        "same": ["equal", 16, 16], "gone": ["only in A", 8, 0], "v": ["values", 12, 12],
        "shape": ["shape", 24, 24], "dtype": ["dtype", 8, 4], "step": ["values", 0, 0],
        "kind": ["kind", 0, 4], "new": ["only in B", 0, 36],
    }  # fmt: skip
    assert items["a"][items["name"].index("shape")] == "float32 [6]"
    assert items["b"][items["name"].index("shape")] == "float32 [2, 3]"
    nbytes = 2 * (16 + 12) + 8 + 4  # of the tensors of one shape
    assert (found["equal"], found["read_bytes"], found["by_sums"]) == (1, nbytes, 0)
    at = items["name"].index("v")
    assert [items[key][at] for key in ("max_abs", "rel", "different", "elements")] == [1, 1, 3, 3]
    at = items["name"].index("step")
    assert [items[key][at] for key in ("a", "b", "rel")] == ["1", "2", None]
    assert (found["a"], found["b"]) == (str(tmp_path / "a"), str(tmp_path / "b"))


def test_json_goes_to_stdout_alone_beside_the_page(tmp_path: Path) -> None:
    save(STATE, tmp_path / "a")
    for args in (["inspect", tmp_path / "a"], ["diff", tmp_path / "a", tmp_path / "a"]):
        plain = dcpx(*args, "--json").stdout
        page = tmp_path / f"{args[0]}.html"
        assert dcpx(*args, "--json", "--html", page).stdout == plain
        assert scripts_of(page)[0]


# ---- What it may do ------------------------------------------------------------------------------


def test_page_names_no_address_and_its_policy_allows_its_own_scripts_alone(tmp_path: Path) -> None:
    save(STATE, tmp_path / "a")
    drawn(tmp_path / "out.html", "inspect", tmp_path / "a")
    text = (tmp_path / "out.html").read_text()
    scripts = scripts_of(tmp_path / "out.html")[1]
    sums = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy == (
        "default-src 'none'; style-src 'unsafe-inline'; script-src "
        + " ".join(f"'sha256-{one}'" for one in sums)
        + "; base-uri 'none'; form-action 'none'"
    )
    assert len(scripts) == 1 and len(text) < 60_000
    assert re.findall(r"<(?:link|img|iframe|base|script src)\b|@import|url\(", text) == []


HOSTILE = [
    "</script><script>alert(1)</script>", "<!--<script>", "]]>", "$script", "a\ud800\u2028b",
    "&lt;", "plain",
]  # fmt: skip


def test_hostile_name_stays_in_the_data(tmp_path: Path) -> None:
    shapes = set()
    for number, name in enumerate(HOSTILE):
        directory = tmp_path / str(number) / name.replace("/", "").replace("\ud800", "")
        save({name: torch.ones(2)}, directory)
        out = tmp_path / f"{number}.html"
        (one,) = drawn(out, "inspect", directory)["checkpoints"]
        assert one["items"]["name"] == [name.replace("\ud800\u2028", r"\ud800\u2028")]
        drawn(tmp_path / f"{number}.diff.html", "diff", directory, directory)
        shapes.add(re.sub(r'(type="application/json">).*?</script>', r"\1", out.read_text()))
    assert len(shapes) == 1


def test_page_of_10_000_tensors_is_small_and_reads_metadata_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge_many(tmp_path / "many", 10_000)
    opened: list[str] = []
    plainly = Directory.open_regular
    monkeypatch.setattr(
        Directory, "open_regular", lambda self, name: opened.append(name) or plainly(self, name)
    )
    (one,) = drawn(tmp_path / "out.html", "inspect", tmp_path / "many")["checkpoints"]
    assert set(opened) == {".metadata"}
    assert len(one["items"]["name"]) == 10_000 and len(one["layouts"]) == 7
    assert (tmp_path / "out.html").stat().st_size < 2.1e6


# ---- Where it is written -------------------------------------------------------------------------


def refused(*args: object) -> str:
    result = dcpx(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr


def test_what_is_no_page_of_ours_is_never_replaced(tmp_path: Path) -> None:
    save(STATE, tmp_path / "a")
    drawn(tmp_path / "real.html", "inspect", tmp_path / "a")
    (tmp_path / "text.html").write_text("<!doctype html><title>mine</title>")
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    (tmp_path / "dead.html").symlink_to(tmp_path / "nowhere.html")
    before = sorted(path.name for path in tmp_path.iterdir())
    for name in ("text", "folder", "link", "dead"):
        for command in (["inspect", tmp_path / "a"], ["diff", tmp_path / "a", tmp_path / "a"]):
            said = refused(*command, "--html", tmp_path / f"{name}.html", "--overwrite")
            assert "no page that dcpx has written" in said, name
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "text.html").read_text().endswith("<title>mine</title>")


def test_place_that_cannot_have_a_page_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(STATE, tmp_path / "a")
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PosixPlace, "look", lambda _: pytest.fail("it has looked"))
    for name, why in (
        ("out", ".html"), ("-", ".html"), ("", "is empty"), ("s3://bucket/out.html", "is a URL"),
        ("none/out.html", "No such file or directory"), ("file/out.html", "Not a directory"),
    ):  # fmt: skip
        for command in (["inspect", "a"], ["diff", "a", "a"]):
            assert why in " ".join(refused(*command, "--html", name).split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file"]


def test_failed_write_leaves_the_old_page_and_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(STATE, tmp_path / "a")
    out = tmp_path / "out.html"
    drawn(out, "inspect", tmp_path / "a")
    before = out.read_bytes()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert "No space left on device" in refused(
            "inspect", tmp_path / "a", "--html", out, "--overwrite"
        )
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "out.html"]
