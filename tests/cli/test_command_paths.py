"""What a path may be: a checkpoint, an export, a link, a file of another kind, nothing, hostile."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import dcpx, json_of
from support.saves import data_files, save

import torch_dcpx

STATE = {"w": torch.arange(600.0).view(20, 30), "n": torch.arange(5), "step": 3}
EXPORTS = ["y.pt", "y.safetensors", "folder", "shards", "shards/model.safetensors.index.json"]


class Evil:
    """Makes a directory when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def usage(*args: object) -> str:
    """What click says of arguments that it refuses."""
    result = dcpx(*args)
    assert result.exit_code == 2 and not result.stdout
    return result.stderr


def exported(tmp_path: Path) -> Path:
    save(STATE, tmp_path / "a")
    torch.save(STATE, tmp_path / "y.pt")
    for name, most in (("y.safetensors", "5GB"), ("folder", "5GB"), ("shards", "100B")):
        torch_dcpx.export(tmp_path / "a", tmp_path / name, no_dist=True, max_shard_bytes=most)
    return tmp_path / "a"


@pytest.mark.parametrize("name", EXPORTS)
def test_inspect_cat_and_diff_read_what_export_writes(tmp_path: Path, name: str) -> None:
    stored, path = exported(tmp_path), tmp_path / name
    (found,) = json_of("inspect", path)
    shapes = {item["fqn"]: (item["kind"], item["dtype"], item["shape"]) for item in found["items"]}
    steps = {"step": ("object", None, None)} if name == "y.pt" else {}
    tensors = {"w": ("tensor", "float32", [20, 30]), "n": ("tensor", "int64", [5])}
    assert shapes == {**tensors, **steps}
    assert found["written_by"] == ("torch.save" if name == "y.pt" else "safetensors")
    assert all(each["found"] >= each["wanted"] > 0 for each in found["files"].values())
    assert found["faults"] == []
    text = dcpx("inspect", path).stdout
    assert "written by" not in text and str(path) in text.splitlines()[0]
    assert json_of("inspect", path, "-k", "none", code=2)["error"]["type"] == "UnknownNameError"
    (row,) = json_of("cat", path, "w[3, :2]")
    assert row["value"] == [90.0, 91.0]
    if steps:
        assert json_of("cat", path, "step")[0]["value"] == 3
    found = json_of("diff", stored, path, code=0 if steps else 1)
    assert [row["name"] for row in found["differences"]] == ([] if steps else ["step"])
    error = json_of("cat", path, "nothing", code=2)["error"]
    assert str(path) in error["message"]


@pytest.mark.parametrize("command", ["ls", "repair", "gc", "doctor"])
def test_command_for_directories_names_the_command_for_a_file(tmp_path: Path, command: str) -> None:
    torch.save(STATE, tmp_path / "y.pt")
    error = json_of(command, tmp_path / "y.pt", code=2)["error"]
    assert error["type"] == "StorageError"
    assert f"`dcpx inspect {tmp_path}/y.pt` shows it" in error["message"]


@pytest.mark.parametrize("args", ["ls P", "inspect P", "verify P", "cat P w", "diff a P",
                                  "diff P a",
                                  "export P z", "repair P", "gc P"])  # fmt: skip
def test_path_of_another_kind_says_what_is_there_and_what_to_name(
    tmp_path: Path, args: str
) -> None:
    exported(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    data = data_files(tmp_path / "a")[0]
    for name, words in (
        ("notes.txt", "is a file, and no checkpoint"),
        ("dangling", "is a link to 'nowhere', which is not there"),
        (f"a/{data}", "is a file of a checkpoint: name its directory"),
        ("a/.metadata", "is a file of a checkpoint: name its directory"),
        ("b", "is no directory"),
    ):
        given = [{"P": tmp_path / name, "a": tmp_path / "a", "z": tmp_path / "z"}.get(each, each)
                 for each in args.split()]  # fmt: skip
        error = json_of(*given, code=2)["error"]
        assert (error["type"], error["path"]) == ("StorageError", str(tmp_path / name))
        assert words in error["message"] and "\n" not in error["message"]
    assert not (tmp_path / "z").exists()


def test_link_to_a_directory_is_followed_and_one_to_a_file_named(tmp_path: Path) -> None:
    exported(tmp_path)
    for link, target in (("to-a", "a"), ("to-folder", "folder"), ("to-y.pt", "y.pt")):
        (tmp_path / link).symlink_to(target)
    assert json_of("cat", tmp_path / "to-a", "step")[0]["value"] == 3
    assert json_of("diff", tmp_path / "to-a", tmp_path / "a")["equal"] == 3
    assert all(
        report["ok"] for report in json_of("verify", tmp_path / "to-a", tmp_path / "to-folder")
    )
    assert json_of("gc", tmp_path / "to-a") == []
    for command in ("inspect", "verify"):
        error = json_of(command, tmp_path / "to-y.pt", code=2)["error"]
        assert f"is not followed: name '{tmp_path / 'y.pt'}'" in error["message"]


@pytest.mark.parametrize("args", ["ls P", "inspect P", "verify P", "verify . P", "cat P w",
                                  "diff P .", "diff . P", "export P z", "export . P", "repair P",
                                  "gc P", "doctor P"])  # fmt: skip
def test_path_that_no_call_takes_is_refused_by_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, words in (
        ("", "is empty"),
        ("gs://bucket/run", "is a URL"),
        ("~/run", "which only a shell expands"),
    ):
        assert words in usage(*(path if each == "P" else each for each in args.split()))
    assert list(tmp_path.iterdir()) == []


def test_name_that_begins_with_a_tilde_is_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(STATE, tmp_path / "~a")
    assert json_of("verify", "./~a")["ok"]
    assert json_of("cat", "./~a", "step")[0]["value"] == 3


def test_path_that_may_not_be_read_is_the_commands_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(STATE, tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # as click asks; tests may run as root
    assert json_of("ls", tmp_path)[0]["state"] == "committed"


def test_hostile_pickles_execute_nothing_and_are_one_typed_line(tmp_path: Path) -> None:
    place, evil = tmp_path / "made", Evil(tmp_path / "made")
    save(STATE, tmp_path / "a")
    torch.save({"w": torch.ones(2), "e": evil}, tmp_path / "evil.pt")
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil/.metadata").write_bytes(pickle.dumps(evil))
    for path in (tmp_path / "evil.pt", tmp_path / "evil"):
        for args in (
            ("cat", path, "w"),
            ("diff", path, path),
            ("diff", tmp_path / "a", path),
            ("inspect", path),
            ("export", path, tmp_path / "z"),
            ("export", path, tmp_path / "z.pt"),
        ):
            error = json_of(*args, code=1)["error"]
            assert error["type"] == "UnsafePickleError" and "\n" not in error["message"]
            # A file of torch.save is never executed, so its error must not offer it.
            assert ("trusted=True" in error["message"]) == (path.suffix == "")
    assert json_of("verify", tmp_path / "evil", code=1)["findings"][0]["kind"] == "metadata"
    (note,) = json_of("verify", tmp_path / "evil.pt")["findings"]
    assert note["kind"] == "unchecked" and "refuse to unpickle" in note["message"]
    assert json_of("gc", tmp_path / "evil") == []
    assert json_of("ls", tmp_path / "evil", code=1)[0]["state"] == "unreadable"
    assert not place.exists() and not list(tmp_path.glob("z*"))
