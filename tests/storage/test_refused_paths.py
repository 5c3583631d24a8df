"""No public door takes an empty path, or a URL that pathlib has taken a slash from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from support.saves import save
from torch.distributed.checkpoint.api import CheckpointException

import torch_dcpx as dcpx
from torch_dcpx.cli.app import app

STATE = {"w": torch.ones(2)}
DOORS: dict[str, Callable[[Any], Any]] = {
    "ls": dcpx.ls,
    "inspect": dcpx.inspect,
    "verify": dcpx.verify,
    "repair": dcpx.repair,
    "stats": dcpx.stats,
    "diff": lambda path: dcpx.diff(".", path),
    "open_checkpoint": dcpx.open_checkpoint,
    "load_tensors": dcpx.load_tensors,
    "load_pretrained": lambda path: dcpx.load_pretrained(torch.nn.Linear(1, 1), path),
    "export of": lambda path: dcpx.export(path, "x.safetensors", no_dist=True),
    "export to": lambda path: dcpx.export(STATE, path, no_dist=True),
    "export's config": lambda path: dcpx.export(STATE, "x", config=path, no_dist=True),
    "export's adapter": lambda path: dcpx.export(".", "x", merge_lora=path, no_dist=True),
    "save": lambda path: dcpx.save(STATE, path, no_dist=True),
    "async_save": lambda path: dcpx.async_save(STATE, path, no_dist=True).result(),
    "load": lambda path: dcpx.load(dict(STATE), path, no_dist=True),
    "CheckpointManager": lambda path: dcpx.CheckpointManager(path, no_dist=True),
    "DcpxWriter": dcpx.DcpxWriter,
    "DcpxReader": dcpx.DcpxReader,
    "dcp.save": lambda path: dcp.save(
        STATE, checkpoint_id=path, storage_writer=dcpx.DcpxWriter("elsewhere"), no_dist=True
    ),
}
# Of files beside a checkpoint, and of what is to be compared: other words.
NO_CHECKPOINTS = ("export's config", "export's adapter", "diff")
URLS = ("s3://key:secret@b/run", "S3://b/run", "az://b/run", "gs://b/r")


def test_an_empty_path_is_refused_by_every_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(STATE, tmp_path)
    before = sorted(tmp_path.iterdir())
    for door, call in DOORS.items():
        for path in ("", b"") if door != "dcp.save" else ():  # which takes "" for none
            with pytest.raises(dcpx.OptionError):
                call(path)
            assert sorted(tmp_path.iterdir()) == before, door


def test_path_that_no_file_system_can_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for door, call in DOORS.items():
        for path in ("a\ud800", "a\ud800.safetensors") if door not in NO_CHECKPOINTS else ():
            with pytest.raises((dcpx.OptionError, CheckpointException), match=r"\\ud800'"):
                call(path)
            assert not list(tmp_path.iterdir()), door


@pytest.mark.parametrize("url", URLS)
def test_path_that_was_a_url_is_refused_and_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for door, call in DOORS.items():
        for path in (Path(url), PurePosixPath(url)) if door not in NO_CHECKPOINTS else ():
            with pytest.raises(Exception, match=r"give a str") as info:
                call(path)
            errors = [info.value, *getattr(info.value, "failures", {}).values()]
            assert any("OptionError" in repr(each) for each in errors), (door, info.value)
            assert "secret" not in str(info.value) + repr(vars(info.value)), door
    assert not list(tmp_path.iterdir())


def test_command_refuses_a_url_with_one_slash() -> None:
    result = CliRunner().invoke(app, ["ls", "s3:/key:secret@b/run"])
    assert result.exit_code == 2
    assert "secret" not in result.output + result.stderr
    assert "'s3://...'" in result.stderr


def test_directory_of_such_a_name_is_named_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("./s3:/run", tmp_path / "s3:" / "two", "c:/run", "step:1/run"):
        dcpx.save(STATE, path, no_dist=True)
        assert (tmp_path / path / ".metadata").is_file()
