"""1 is said of damage and differences alone: what a command could not answer exits with 2."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from support.cli import dcpx
from support.saves import save

import torch_dcpx.cli.listing
import torch_dcpx.views.ls
from torch_dcpx import _C
from torch_dcpx.errors import StorageError
from torch_dcpx.metadata.parts import TAIL


def test_no_directory_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in ("ls", "inspect", "verify", "repair", "doctor"):
        for kind in ("nothing", "file"):
            result = dcpx(command, tmp_path / kind, "--json")
            assert result.exit_code == 2, (command, kind)
            assert json.loads(result.stdout)["error"]["type"] == "StorageError"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), RuntimeError("a\x1b[1m")])
def test_interrupt_and_bug_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    save({"a": torch.ones(2)}, tmp_path)
    monkeypatch.setattr(torch_dcpx.cli.listing, "verify", fail)
    result = dcpx("verify", tmp_path)
    assert result.exit_code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    words = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
    assert words in result.stderr and "\x1b" not in result.stderr


def test_ls_says_what_it_cannot_read_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("forbidden", "newer", "whole"):
        save({"a": torch.ones(2)}, tmp_path / name)
    path = tmp_path / "newer/.metadata"
    data = bytearray(path.read_bytes())
    data[-TAIL.size + 8 : -TAIL.size + 12] = struct.pack("<I", 99)  # the format's version
    data[-4:] = struct.pack("<I", _C.crc32(data[-TAIL.size : -4]))
    path.write_bytes(data)
    read_brief = torch_dcpx.views.ls.read_brief

    def refuse(place: Any, name: str) -> Any:  # tests may run as root, whom no mode refuses
        if place.path.name == "forbidden":
            raise StorageError("open", errno=13, path=str(place.path))
        return read_brief(place, name)

    monkeypatch.setattr(torch_dcpx.views.ls, "read_brief", refuse)
    result = dcpx("ls", tmp_path, "--json")
    states = [each["state"] for each in json.loads(result.stdout)]
    assert (result.exit_code, states) == (2, ["unreadable", "unreadable", "committed"])
    (tmp_path / "whole/.metadata").unlink()
    assert dcpx("ls", tmp_path).exit_code == 1


# What is said of damage and of what has no answer: the line, its exit code, what it names.
LINES = [
    ("diff A root", 2, "'step-1' (`dcpx ls root`)"),
    ("diff root A", 2, "'step-1' (`dcpx ls root`)"),
    ("diff A empty", 2, "no committed checkpoint"),
    ("diff A A", 0, "0 differences"),
    ("cat A typo", 2, "'typo'"),
    ("cat root step", 2, "name one of them"),
    ("inspect A -k typo", 2, "'typo'"),
    ("inspect root", 2, "name one of them"),
    ("inspect empty", 2, "no committed checkpoint"),
    ("inspect unfinished", 1, "of an unfinished save"),
    ("export A x.safetensors -k typo", 2, "'typo'"),
    ("export empty x.safetensors", 2, "no committed checkpoint"),
    ("inspect trainer", 2, "'checkpoint-1/model' (`dcpx ls trainer`)"),
    ("repair trainer", 2, "'checkpoint-1/model' (`dcpx ls trainer`)"),
    ("diff A unfinished", 1, "of an unfinished save"),
    ("diff unfinished A", 1, "of an unfinished save"),
    ("cat unfinished step", 1, "of an unfinished save"),
    ("stats unfinished", 1, "of an unfinished save"),
    ("export unfinished x.safetensors", 1, "of an unfinished save"),
    ("inspect removed", 2, "its manager has removed it"),
    ("cat removed step", 2, "its manager has removed it"),
    ("ls ranks", 1, "'__1_0.distcp' is of a rank whose metadata is not there"),
    ("inspect ranks", 1, "'__1_0.distcp' is of a rank whose metadata is not there"),
    ("inspect ranks", 1, "`dcpx verify ranks` says what can be done"),
    ("gc ranks", 0, "`dcpx repair ranks` may make it anew; else remove them by hand"),
    ("inspect lost", 1, "'__0_0.distcp' is missing"),
    ("diff A lost", 1, "`dcpx verify lost` lists all damage"),
    ("cat lost step", 1, "`dcpx verify lost` lists all damage"),
    ("stats lost", 1, "`dcpx verify lost` lists all damage"),
    ("export lost x.safetensors", 1, "`dcpx verify lost` lists all damage"),
    ("repair lost", 1, "it mends no data: '__0_0.distcp' is missing (`dcpx verify lost`)"),
    ("verify shards", 1, "No such file"),
    ("inspect shards", 1, "No such file"),
    ("cat shards *", 1, "No such file"),
    ("inspect shards/model-00001-of-00002.safetensors", 2, "is no directory"),
    ("verify shards/model-00002-of-00002.safetensors", 2, "is no directory"),
    ("inspect A/__7_0.distcp", 2, "is no directory"),
    ("inspect A --overwrite", 2, "--overwrite is for --html"),
    ("trace A --html x.html --out x.html", 2, "--html and --out name one file"),
    ("gc A --grace nan", 2, "nan"),
    ("verify empty", 2, "holds no checkpoint"),
    ("repair empty", 2, "there is no data file"),
    ("repair root", 2, "name one of them"),
    ("repair unfinished", 1, "nothing was written"),
    ("inspect A --limit x", 2, "'x' is not a valid integer"),
    ("no-such-command", 2, "No such command"),
    ("inspect A -k", 2, "requires an argument"),
]


def test_1_is_damage_and_2_what_has_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("A", "root/step-1", "unfinished", "removed", "lost", "ranks")
    for name in (*names, "trainer/checkpoint-1/model"):
        save({"a": torch.ones(2), "step": 1}, tmp_path / name)
    (tmp_path / "unfinished/.metadata").unlink()
    (tmp_path / "removed/.metadata").rename(tmp_path / "removed/.dcpx.deleted")
    (tmp_path / "ranks/.metadata").rename(tmp_path / "ranks/__0.metadata")
    shutil.copy(tmp_path / "ranks/__0_0.distcp", tmp_path / "ranks/__1_0.distcp")
    (tmp_path / "lost/__0_0.distcp").unlink()
    (tmp_path / "shards").mkdir()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "shards/model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "empty").mkdir()
    wrong = {}
    for line, code, words in LINES:
        result = dcpx(*line.split())
        if result.exit_code != code or words not in result.output or "Trace" in result.output:
            wrong[line] = result.exit_code, result.output
    assert wrong == {}
    assert not (tmp_path / "x.safetensors").exists() and not (tmp_path / "x.html").exists()
