"""The command `dcpx`, called in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from torch_dcpx.cli.app import app

_SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script>", re.DOTALL)


def dcpx(*args: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in args], prog_name="dcpx")


def code_and_text(*args: object) -> tuple[int, str]:
    """Returns the exit code of a command, and what it printed on both outputs."""
    result = dcpx(*args)
    return result.exit_code, result.output


def json_of(*args: object, code: int = 0) -> Any:
    """Returns what a command says with --json; it exits with `code`."""
    result = dcpx(*args, "--json")
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout)


def scripts_of(page: Path) -> tuple[Any, list[str]]:
    """Returns what the scripts of a page find in it, and these."""
    found = _SCRIPT.findall(page.read_text())
    (data,) = [text for name, text in found if "json" in name]
    return json.loads(data), [text for name, text in found if "json" not in name]
