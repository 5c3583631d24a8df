"""`dcpx` looks at checkpoints: what it prints, what it exits with, what it does not import."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from support.cli import dcpx, json_of
from support.machine import seconds
from support.saves import assert_whole, data_files, save

import torch_dcpx
import torch_dcpx.cli.listing
import torch_dcpx.views.ls
from torch_dcpx import _C
from torch_dcpx._text import human_bytes
from torch_dcpx.errors import StorageError
from torch_dcpx.metadata.parts import TAIL
from torch_dcpx.views import items as views_items

ROOT = Path(torch_dcpx.__file__).parents[1]
STATE = {"model": {"w": torch.arange(600.0).view(20, 30), "b": torch.ones(5)}, "step": 3}


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_inspect_shows_what_a_checkpoint_holds(tmp_path: Path, writer: Any) -> None:
    save(STATE, tmp_path, writer)
    (found,) = json_of("inspect", tmp_path, "--parts")
    assert found["written_by"] == {"ours": "torch-dcpx", "stock": "stock"}[writer]
    assert found["nbytes"] == sum((tmp_path / name).stat().st_size for name in data_files(tmp_path))
    items = {item["fqn"]: item for item in found["items"]}
    assert set(items) == {"model.w", "model.b", "step"}
    assert items["model.w"]["dtype"] == "float32"
    assert items["model.w"]["shape"] == [20, 30]
    (chunk,) = items["model.w"]["parts"]
    assert chunk["sizes"] == [20, 30]
    assert chunk["nbytes"] >= 2400
    assert items["step"]["kind"] == "object"
    text = dcpx("inspect", tmp_path).stdout
    stored = human_bytes(sum(item["nbytes"] for item in found["items"]))
    head = f"3 items (2 tensors, 1 object), 605 parameters (float32), {stored} stored; 1 file of "
    assert text.splitlines()[1] == head + human_bytes(found["nbytes"])
    assert re.search(r"^float32  \[20, 30\]      1  \d\.\d\d kB  model\.w$", text, re.MULTILINE)


def test_inspect_keeps_to_the_keys_and_the_limit(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    (found,) = json_of("inspect", tmp_path, "-k", "*.b", "-k", "st*")
    assert [item["fqn"] for item in found["items"]] == ["model.b", "step"]
    assert found["stored_nbytes"] == sum(item["nbytes"] for item in found["items"])
    assert found["parameters"] == 5
    assert "2 of 3 items (1 tensor, 1 object)" in dcpx("inspect", tmp_path, "-k*.b", "-kst*").stdout
    assert "2 names not shown" in dcpx("inspect", tmp_path, "--limit", 1).stdout


def test_inspect_makes_only_the_items_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({f"t{number}": torch.ones(1) for number in range(200)}, tmp_path)
    made: list[str] = []
    make = views_items._item
    monkeypatch.setattr(
        views_items, "_item", lambda found, fqn: made.append(fqn) or make(found, fqn)
    )
    assert "200 tensors" in dcpx("inspect", tmp_path, "--limit", 7).stdout
    assert len(made) == 7


def cut(folder: Path) -> None:
    os.truncate(folder / data_files(folder)[0], 1000)


def damage_metadata(folder: Path) -> None:
    data = bytearray((folder / ".metadata").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / ".metadata").write_bytes(data)


def test_errors_exit_by_whose_fault_they_are(tmp_path: Path) -> None:
    missing = json_of("inspect", tmp_path / "none", code=2)["error"]
    assert (missing["type"], missing["errno"]) == ("StorageError", 2)
    assert json_of("inspect", tmp_path, code=2)["error"]["type"] == "NotCommittedError"
    save(STATE, tmp_path)
    damage_metadata(tmp_path)
    assert json_of("inspect", tmp_path, code=1)["error"]["type"] == "CorruptionError"
    result = dcpx("inspect", tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "CRC-32" in result.stderr
    assert dcpx("inspect").exit_code == 2  # click's own


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_verify_finds_a_flipped_bit(tmp_path: Path, writer: Any) -> None:
    save(STATE, tmp_path, writer)
    assert json_of("verify", tmp_path)["ok"]
    assert "is whole" in dcpx("verify", tmp_path).stdout
    (name,) = data_files(tmp_path)
    (found,) = json_of("inspect", tmp_path, "--parts", "-k", "model.w")
    chunk = found["items"][0]["parts"][0]
    data = bytearray((tmp_path / name).read_bytes())
    data[chunk["offset"] + chunk["nbytes"] // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    report = json_of("verify", tmp_path, code=1)
    assert not report["ok"]
    assert report["findings"][0]["file"] == name
    assert "model.w" in report["findings"][0]["fqns"]
    assert name in dcpx("verify", tmp_path).stdout


def test_verify_takes_roots_and_several_paths(tmp_path: Path) -> None:
    for name in ("run/step-1", "run/step-2", "other"):
        save(STATE, tmp_path / name)
    (tmp_path / "run/logs").mkdir()
    found = json_of("verify", tmp_path / "run", tmp_path / "other", tmp_path / "run/step-2")
    assert [Path(each["path"]).name for each in found] == ["step-1", "step-2", "other"]
    cut(tmp_path / "run/step-2")
    result = dcpx("verify", tmp_path / "run")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "2 checkpoints, 1 with faults"
    assert [each["ok"] for each in json_of("verify", tmp_path / "run", code=1)] == [True, False]
    (tmp_path / "run/step-1/.metadata").unlink()  # a save that did not end
    assert json_of("verify", tmp_path / "run", code=1)[0]["findings"][0]["kind"] == "uncommitted"
    assert json_of("verify", tmp_path / "run", tmp_path / "none", code=2)["error"]["errno"] == 2


def test_verify_takes_an_exported_file_and_a_folder(tmp_path: Path) -> None:
    torch_dcpx.export({"w": torch.ones(100)}, tmp_path / "y.pt", no_dist=True)
    torch_dcpx.export({"w": torch.ones(100)}, tmp_path / "out", no_dist=True)
    for target in ("y.pt", "out"):
        result = dcpx("verify", tmp_path / target)
        assert result.exit_code == 0, result.output
        assert "1 part in 1 file," in result.output
    (tmp_path / "y.pt").write_bytes((tmp_path / "y.pt").read_bytes()[:-9])
    assert dcpx("verify", tmp_path / "y.pt").exit_code == 1
    assert dcpx("verify", tmp_path / "nope.pt").exit_code == 2


def test_repair_makes_lost_metadata_anew_and_spares_a_good_one(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    before = (tmp_path / ".metadata").read_bytes()
    assert json_of("repair", tmp_path)["repaired"] == []
    assert "it is good, and stays as it is" in dcpx("repair", tmp_path).stdout
    assert (tmp_path / ".metadata").read_bytes() == before
    (name,) = data_files(tmp_path)
    (tmp_path / name).rename(tmp_path / "away")  # the metadata is good, the checkpoint is not
    assert json_of("repair", tmp_path, code=1)["error"]["type"] == "RepairError"
    (tmp_path / "away").rename(tmp_path / name)
    (tmp_path / ".metadata").unlink()
    said = json_of("repair", tmp_path, "--dry-run", code=1)
    assert said["is_dry_run"] and "the save had ended" in said["assumptions"][0]
    error = json_of("repair", tmp_path, code=1)["error"]
    assert error["type"] == "RepairError" and all(
        one in error["message"] for one in said["assumptions"]
    )
    assert not (tmp_path / ".metadata").exists()
    accepted = json_of("repair", tmp_path, "--dry-run", "--accept-assumptions")
    assert accepted == said
    assert not (tmp_path / ".metadata").exists()
    assert "made '.metadata'" in dcpx("repair", tmp_path, "--accept-assumptions").stdout
    assert_whole(STATE, tmp_path)
    assert json_of("verify", tmp_path)["ok"]


def test_doctor_tries_what_a_save_does_and_leaves_nothing(tmp_path: Path) -> None:
    found = {each["name"]: each for each in json_of("doctor", tmp_path)}
    assert found["writing"]["state"] == "fine"
    assert {"torch", "C++ extension", "direct I/O", "locks", "file system"} <= set(found)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    found = {each["name"]: each for each in json_of("doctor", tmp_path)}
    assert found["checkpoint"]["state"] == "warning"
    assert json_of("doctor", tmp_path / "none", code=2)["error"]["errno"] == 2


def test_doctor_says_that_nobody_has_tried_aarch64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    (found,) = (each for each in json_of("doctor") if each["name"] == "versions")
    assert (found["state"], found["text"][-19:]) == ("warning", ", which is untested")


@pytest.mark.parametrize(("has_kernel", "word"), [(True, "with"), (False, "without")])
def test_doctor_says_whether_the_build_has_the_kernel(
    monkeypatch: pytest.MonkeyPatch, has_kernel: bool, word: str
) -> None:
    driver = {"has_kernel": has_kernel, "failure": "no driver", "devices": 0, "version": 0}
    monkeypatch.setattr("torch_dcpx._C.device_driver", lambda: driver)
    found = {each["name"]: each["text"] for each in json_of("doctor")}
    assert f"built {word} the CUDA pack kernel;" in found["C++ extension"]


def test_command_fails_clearly_without_click_or_rich(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError(name='rich')")
    result = run("--help", path=f"{tmp_path}:{ROOT}")
    assert result.returncode == 2
    assert "pip install click rich" in result.stderr


NOWHERE = [[name, "nope"] for name in ("ls", "inspect", "verify", "repair")]


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], ["doctor"], ["inspect", "--help"], *NOWHERE]
)
def test_commands_that_need_no_torch_do_not_import_it(args: list[str]) -> None:
    code = (
        "import sys, atexit, torch_dcpx.cli as cli\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        f"sys.argv = ['dcpx', *{args!r}]\n"
        "cli.main()"
    )
    result = run(code=code)
    assert result.returncode == (2 if "nope" in args else 0), result.stderr
    assert result.stderr.splitlines()[-1] == "False"


def run(*args: str, code: str = "", path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-c", code) if code else ("-m", "torch_dcpx", *args))]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds(60),
        env={**os.environ, "PYTHONPATH": path},
    )


# ---- Exit codes: 1 is said of damage and differences alone ---------------------------------------


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
