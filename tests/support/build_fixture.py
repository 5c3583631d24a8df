"""The functions of setup.py, for tests of what a build does."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The functions of setup.py, in an environment that names no toolkit."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["setup.py", "-q", "--version"])
    monkeypatch.setattr(os, "environ", {"PATH": "/no/such/place"})
    return runpy.run_path(str(ROOT / "setup.py"))
