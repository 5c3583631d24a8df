"""A URL that pathlib has taken a slash from is refused before any byte, and shows no secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import torch_dcpx
from torch_dcpx import CheckpointManager, DcpxReader, DcpxWriter
from torch_dcpx.cli.app import app

STATE = {"x": torch.zeros(2)}

DOORS: dict[str, Callable[[Any], Any]] = {
    "save": lambda path: torch_dcpx.save(STATE, path, no_dist=True),
    "async_save": lambda path: torch_dcpx.async_save(STATE, path, no_dist=True).result(),
    "load": lambda path: torch_dcpx.load(dict(STATE), path, no_dist=True),
    "writer": DcpxWriter,
    "reader": DcpxReader,
    "dcp.save": lambda path: dcp.save(
        STATE, checkpoint_id=path, storage_writer=DcpxWriter("elsewhere"), no_dist=True
    ),
    "manager": CheckpointManager,
    "export": lambda path: torch_dcpx.export(STATE, path, no_dist=True),
    "load_pretrained": lambda path: torch_dcpx.load_pretrained(torch.nn.Linear(1, 1), path),
    "load_tensors": torch_dcpx.load_tensors,
    "verify": torch_dcpx.verify,
    "repair": torch_dcpx.repair,
    "ls": torch_dcpx.ls,
    "inspect": torch_dcpx.inspect,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("url", ["s3://key:secret@b/run", "S3://b/run", "az://b/run", "gs://b/r"])
def test_path_that_was_a_url_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path(url), PurePosixPath(url)):
        with pytest.raises(Exception, match=r"give a str") as info:
            DOORS[door](path)
        errors = [info.value, *getattr(info.value, "failures", {}).values()]
        assert any("OptionError" in repr(each) for each in errors), repr(info.value)
        assert "secret" not in str(info.value) + repr(vars(info.value))
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
        torch_dcpx.save(STATE, path, no_dist=True)
        assert (tmp_path / path / ".metadata").is_file()
