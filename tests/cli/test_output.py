"""What commands print where: closed pipes, full disks, poor encodings, narrow terminals."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from support.machine import seconds
from support.saves import save

import torch_dcpx
import torch_dcpx.cli
from torch_dcpx.cli import output
from torch_dcpx.cli.app import app

ROOT = Path(torch_dcpx.__file__).parents[1]
LONG = "model.decoder.layers.{}.self_attention.linear_proj.weight"


def dcpx(tail: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of a shell that begins with `dcpx` and these arguments."""
    return subprocess.run(
        ["bash", "-c", f'set -o pipefail; "{sys.executable}" -m torch_dcpx {tail}'],
        capture_output=True,
        encoding="utf-8",
        timeout=seconds(60),
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )


@pytest.mark.parametrize(
    ("tail", "code"),
    [
        ("--help | true", 141),
        ("ls nope 2>&1 | true", 2),  # what stderr cannot say is lost, the answer is not
        ("--version > /dev/full", 2),
        ("--version >&-", 0),
        ("ls nope 2> /dev/full", 2),
        ("ls nope 2>&-", 2),
        ("ls nope <&- >&- 2>&-", 2),
        ("ls --no-such-option > /dev/full 2>&1", 2),
    ],
)
def test_output_that_cannot_be_written_is_no_damage(tail: str, code: int) -> None:
    tail = tail.replace("| true", "| { exec <&-; sleep 2; }")  # it has gone, for sure
    said = dcpx(tail)
    assert said.returncode == code
    lines = said.stderr.splitlines()
    assert lines == ["dcpx: write to stdout: No space left on device"] * (tail[:6] == "--vers" and
        "full" in tail)  # fmt: skip


BOTH = """
import sys
from torch_dcpx.cli import main
for args in (["inspect", sys.argv[1]], ["cat", *sys.argv[1:]]):
    sys.argv[1:] = args
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
"""


def test_names_that_an_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    save({"权重": torch.ones(3), "modèle": torch.ones(3)}, tmp_path / "étape")
    poor = {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    said = subprocess.run(
        [sys.executable, "-c", BOTH, str(tmp_path / "étape"), "权重"],
        env={**os.environ, **poor, "LC_ALL": "POSIX"},
        capture_output=True, encoding="utf-8", timeout=seconds(60), check=True,
    )  # fmt: skip
    assert not said.stderr
    assert r"  \u6743\u91cd" in said.stdout and r"  mod\xe8le" in said.stdout
    assert "\n" + r"\u6743\u91cd: float32 [3]" in said.stdout


class _Full(io.FileIO):
    def write(self, _: Any) -> NoReturn:
        raise OSError(self.errno, os.strerror(self.errno))

    errno = errno.ENOSPC


@pytest.mark.parametrize(("number", "code"), [(errno.EPIPE, 141), (errno.EIO, 2)])
def test_an_error_of_stdout_is_the_code_of_every_command(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_Full, "errno", number)
    monkeypatch.setattr(output, "put_problem", lambda _: None)
    kind = type("_Broken", (output._Output, _Full), {})
    for as_json in (True, False):
        shown = io.TextIOWrapper(io.BufferedWriter(kind(os.dup(1), "w")), "utf-8")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", shown)
            with pytest.raises(SystemExit) as ended:
                (output.put_json if as_json else output.put_lines)(["x" * 100_000])
            assert ended.value.code == code
            shown.close()  # which flushes again, in silence


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "make_context", interrupt)
    monkeypatch.setattr(output, "open_output", lambda: None)
    with pytest.raises(SystemExit) as ended:
        torch_dcpx.cli.main()
    assert ended.value.code == 128 + signal.SIGINT


# ---- Tables --------------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def table(
    monkeypatch: pytest.MonkeyPatch, width: int, *, name: str = LONG, is_tty: bool = True
) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = _Terminal() if is_tty else io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    rows = [("float32", 10**number, name.format(number)) for number in (1, 12)]
    output.put_table(["dtype", "#bytes", "name"], rows)
    return shown.getvalue().splitlines()


def test_names_come_last_and_a_shared_begin_once_where_the_terminal_is_narrow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    begin, head, *rows = table(monkeypatch, 80)
    assert begin == "all names begin with model.decoder.layers."
    assert head.split("  ")[-1] == "rest of the name"
    assert [row.split()[-1] for row in rows] == [LONG.format(n)[21:] for n in (1, 12)]
    assert max(map(len, rows)) <= 80
    assert len(table(monkeypatch, 20)) == 4, "no row is folded or cut"
    assert table(monkeypatch, 200)[1:] == table(monkeypatch, 20, is_tty=False)[1:]
    assert LONG.format(12) in table(monkeypatch, 200)[2]


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("解码器.层.{}.自注意力.投影.权重的名字", "解码器.层."),  # 64 columns wide
        ("run-of-2026.1/of-all-the-gpus/step-{}.5", "run-of-2026.1/of-all-the-gpus/"),
    ],
)
def test_a_shared_begin_is_of_folders_or_modules_and_counts_wide_letters(
    name: str, begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shown = table(monkeypatch, 56, name=name)
    assert shown[0] == f"all names begin with {begin}"
    assert shown[3].endswith(f"  {name.format(12)[len(begin) :]}")


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE", "JPY_PARENT_PID", "CI"])
def test_in_a_pipe_each_row_is_one_whole_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TERM", "xterm")
    rows = table(monkeypatch, 10, is_tty=False)
    assert len(rows) == 3 and rows[1].endswith(LONG.format(1)) and "\x1b" not in str(rows)


def test_colour_is_for_terminals_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[1m" in table(monkeypatch, 200)[0]
    for name, value in (("TERM", "dumb"), ("NO_COLOR", "1")):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv(name, value)
        assert "\x1b" not in str(table(monkeypatch, 200))


def test_columns_are_as_wide_as_a_terminal_shows_them() -> None:
    from torch_dcpx._text import aligned

    rows = aligned(["name", "#n"], [["模型", "1"], ["e\u0301", "22"], ["plain", "333"]])
    assert rows == ["name     n", "模型     1", "e\u0301       22", "plain  333"]
