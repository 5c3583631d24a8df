"""docs/reference/errors.md: its sections, and what its errors and commands are provoked by."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conftest import ROOT

from torch_dcpx.cli.app import app
from torch_dcpx.errors import DcpxError

PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text()


def section_of(name: str) -> str:
    """Returns what stands between the heading of a class and the next heading."""
    (section,) = re.findall(rf"^### {name}\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE)
    return str(section)


def tool(*args: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, (result.output, result.stderr)
    return result


def raised(kind: type[DcpxError], call: Callable[[], object]) -> Any:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return caught.value


def assert_printed(error: DcpxError) -> None:
    """Checks that a real error begins as the page prints it, but for names and numbers."""
    (printed,) = re.findall(r"```text\n(.*?)\n```", section_of(type(error).__name__), re.DOTALL)
    pattern = re.sub(r"'[^']*'", "'[^']*'", re.escape(printed))
    pattern = re.sub(r"boot=[^)]*\\", r"boot=[^)]*\\", pattern)
    pattern = re.sub(r"\d+(\\\.\d+)?", r"\\d+(\\.\\d+)?", pattern.replace("node7", r"[^ )]+"))
    assert re.match(pattern, str(error)), (printed, str(error))
