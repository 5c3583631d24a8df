"""The help: groups, nothing cut at 80 columns, examples that run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.machine import seconds
from support.saves import save

import torch_dcpx
from torch_dcpx.cli.app import app
from torch_dcpx.cli.help import Command

ROOT = Path(torch_dcpx.__file__).parents[1]


@pytest.fixture(params=["", *app.commands])
def text(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """The help of a command, as at a terminal of 80 columns: CliRunner has a width of its own."""
    monkeypatch.setenv("COLUMNS", "80")
    args = [*filter(None, [request.param]), "--help"]
    app.main(args, prog_name="dcpx", standalone_mode=False)
    return capsys.readouterr().out


def test_help_at_80_columns_cuts_nothing(text: str) -> None:
    assert max(map(len, text.splitlines())) <= 80
    cut = text.replace("PATH...", "").replace("[ARGS]...", "").replace("COMMAND...", "")
    assert "..." not in cut.replace("NAME[ROWS]...", "")


def test_help_at_80_columns_breaks_no_option_and_no_example(text: str) -> None:
    assert not re.search(r"\w-$", text, re.MULTILINE), text
    quoted = re.findall(r"(?<!\w)'[^']+'", " ".join(text.split()))
    assert [each for each in quoted if each not in text] == []


@pytest.mark.parametrize("command", ["inspect", "diff", "stats"])
def test_limit_is_no_negative_number(command: str) -> None:
    result = CliRunner().invoke(app, [command, ".", ".", "--limit", "-1"], prog_name="dcpx")
    assert result.exit_code == 2 and "'--limit': -1 is not in the range x>=0" in result.stderr


def test_groups_hold_each_command_once() -> None:
    text = CliRunner().invoke(app, ["--help"], prog_name="dcpx").stdout
    assert [head for head in ("Look:", "Check:", "Change:", "More:") if f"\n{head}\n" in text] == [
        "Look:", "Check:", "Change:",
    ]  # fmt: skip
    lines = [line.split()[0] for line in text.splitlines() if line[:2] == "  " and line[2:3] != " "]
    for name in app.commands:
        assert lines.count(name) == 1


@pytest.mark.parametrize("name", sorted(set(app.commands) - {"run"}))
def test_example_of_a_command_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DCPX_TRACE_DIR", "traces")
    weight = torch.arange(6.0).view(3, 2)
    for step in (100, 200):
        save({"model": {"weight": weight + step}, "step": step}, tmp_path / f"ckpt/step-{step}")
    monkeypatch.delenv("DCPX_TRACE_DIR")
    result = CliRunner().invoke(app, example_of(name), prog_name="dcpx")
    assert result.exit_code == (1 if name == "diff" else 0), result.output


def test_example_of_run_works(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; print(os.environ['DCPX_INSTALL'])")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    said = subprocess.run(
        [sys.executable, "-m", "torch_dcpx", *example_of("run")],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        timeout=seconds(60),
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path,
             "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
    )  # fmt: skip
    assert said.stdout == "1\n"


def example_of(name: str) -> list[str]:
    command = app.commands[name]
    assert isinstance(command, Command)
    program, *args = shlex.split(command.example)
    assert (program, args[0]) == ("dcpx", name)
    return args
