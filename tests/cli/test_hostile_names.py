"""What files and directories are called cannot write to a terminal, or make a command fail."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from support.saves import save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

import torch_dcpx
from torch_dcpx.cli import output as cli_output
from torch_dcpx.cli.app import app

NAMES = ["x\x1b[31mred", "two\nlines", "a\ud800b", "nul\0l", "turn\u202eed", "x\x9b31m", "cr\rx"]


def forge(directory: Path, name: str) -> None:
    """Makes what stock reads as a checkpoint, of an item in file `name`."""
    storage = {MetadataIndex(name): _StorageInfo(name, 0, 8)}
    metadata = Metadata({name: BytesStorageMetadata()}, None, storage)
    directory.mkdir()
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("name", NAMES)
def test_no_command_prints_a_control_character(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "dir\x1b[2J\nname"
    forge(directory, name)
    for args in (["ls"], ["inspect"], ["inspect", "--parts"], ["verify"], ["repair"]):
        result = CliRunner().invoke(app, [*args, str(directory)])
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit), args
        for text in (result.stdout, result.stderr):
            assert all(line.isprintable() for line in text.split("\n")), (args, text)
    report = torch_dcpx.verify(directory)
    assert len(str(report).splitlines()) == 2 + len(report.findings)
    assert all(line.isprintable() for line in str(report).split("\n"))


def test_error_of_a_path_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "a\x1b]0;title\x07\nb")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1 and result.stderr[:-1].isprintable()


def test_progress_takes_no_name_for_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=200)
    monkeypatch.setattr(cli_output, "Console", lambda **_: console)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with cli_output.showing_progress("verify [bold]x\x1b[5m", is_shown=True) as tell:
        assert tell is not None
        tell(1, 2)
    assert r"verify [bold]x\x1b[5m" in shown.getvalue()


def test_progress_of_a_long_name_is_one_line_in_which_no_number_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(cli_output, "Console", lambda **_: console)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with cli_output.showing_progress(f"verify {'step-of-the-year' * 6}", is_shown=True) as tell:
        assert tell is not None
        tell(10**9, 2 * 10**9)
    assert "verify" in shown.getvalue() and "1.0/2.0 GB" in shown.getvalue()
    assert "step-of" not in shown.getvalue() and "…" not in shown.getvalue()


def test_file_outside_the_directory_is_none_of_its(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(bytes(100))
    for number, name in enumerate((str(tmp_path / "outside"), "../outside", "sub/../../outside")):
        forge(tmp_path / f"ckpt-{number}", name)
        (tmp_path / f"ckpt-{number}/sub").mkdir()
    forge(tmp_path / "ckpt-3", "link/outside")
    (tmp_path / "ckpt-3/link").symlink_to(tmp_path)
    for number in range(4):
        result = CliRunner().invoke(app, ["ls", str(tmp_path / f"ckpt-{number}")])
        assert result.exit_code == 1 and "is missing" in result.stdout, result.stdout


def test_ls_of_names_that_are_no_text(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path / "good")
    os.rename(os.fsencode(tmp_path / "good"), os.fsencode(tmp_path) + b"/g\xffd")
    result = CliRunner().invoke(app, ["ls", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert r"g\udcffd" in result.stdout
