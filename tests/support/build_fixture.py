"""The functions of setup.py and an nvcc that compiles nothing, for tests of the build."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

NVCC = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
case "$1" in
--version) echo "release $(cat "$(dirname "$0")/release")" ;;
--list-gpu-code) echo sm_50 sm_75 sm_90 sm_999 ;;
-fatbin) while [ "$1" != -o ]; do shift; done; printf 'P\\355U\\272 image' > "$2" ;;
esac
"""


@functools.cache
def _functions() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "setup.py"))


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The functions of setup.py, in an environment that names no toolkit."""
    pytest.importorskip("setuptools", "77.0.3")  # the build's, not the package's
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["setup.py", "-q", "--version"])
    monkeypatch.setattr(os, "environ", {"PATH": "/no/such/place"})
    return _functions()


@pytest.fixture
def nvcc(tmp_path: Path) -> Path:
    """A toolkit's nvcc that notes its calls."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "release").write_text("13.0")
    path = tmp_path / "bin" / "nvcc"
    path.write_text(NVCC)
    path.chmod(0o755)
    return path
