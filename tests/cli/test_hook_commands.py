"""`dcpx run`, and what `dcpx doctor` says of the hook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import torch_dcpx
from torch_dcpx.cli.app import app

SHOW = "import os; print(os.environ['DCPX_INSTALL'])"

pytestmark = pytest.mark.usefixtures("entry_point")


def dcpx(*args: str, **variables: str) -> Any:
    environment = {**os.environ, "DCPX_INSTALL": "", **variables}
    command = [sys.executable, "-m", "torch_dcpx", *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_run_gives_the_command_the_variable_and_its_exit_code() -> None:
    ended = dcpx("run", "--", sys.executable, "-c", f"{SHOW}; raise SystemExit(7)")
    assert (ended.stdout, ended.returncode) == ("1\n", 7)
    ended = dcpx("run", sys.executable, "-c", SHOW, DCPX_INSTALL="writer")
    assert ended.stdout == "writer\n"


def test_run_of_nothing_that_can_run_is_an_error() -> None:
    ended = dcpx("run", "--json", "--", "no-such-command")
    assert ended.returncode == 2
    assert json.loads(ended.stdout)["error"]["type"] == "StorageError"
    assert dcpx("run").returncode == 2


def test_run_where_torch_calls_no_entry_point_is_an_error() -> None:
    ended = dcpx("run", "--", "true", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ended.returncode == 2
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps the hook off" in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("variables", "state", "texts"),
    [
        ({}, "fine", ["off;"]),
        (
            {"DCPX_INSTALL": "1"},
            "fine",
            ["FileSystemWriter, FileSystemReader, DefaultSavePlanner, DefaultLoadPlanner",
             "DefaultStager", "'planners': 2, 'reader': 1, 'stager': 1, 'writer': 1"],
        ),
        ({"DCPX_INSTALL": "x"}, "failure", ["DCPX_INSTALL='x'"]),
        (
            {"DCPX_INSTALL": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            "failure",
            ["TORCH_DEVICE_BACKEND_AUTOLOAD=0"],
        ),
    ],
)  # fmt: skip
def test_doctor_says_whether_the_hook_is_on_and_what_it_replaces(
    tmp_path: Path,
    entry_point: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    state: str,
    texts: list[str],
) -> None:
    """And runs no module of the directory that it is called in."""
    (tmp_path / "torch.py").write_text("open('was-run', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(entry_point)
    monkeypatch.delenv("DCPX_INSTALL", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    (found,) = [check for check in json.loads(result.stdout) if check["name"] == "hook"]
    assert found["state"] == state
    assert [text for text in texts if text not in found["text"]] == []
    assert [path.name for path in tmp_path.iterdir()] == ["torch.py"]


def test_commands_themselves_are_not_warned_that_they_replaced_nothing(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=torch_dcpx.DcpxWriter(tmp_path), no_dist=True)
    ended = dcpx("verify", str(tmp_path), DCPX_INSTALL="1")
    assert ended.returncode == 0
    assert "hook" not in ended.stderr
