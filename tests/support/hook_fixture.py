"""Fixtures of tests of the hook: it is off before and after; children have its entry point."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def hook_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of the hook comes from outside, and nothing of it is left of a test."""
    import torch_dcpx
    from torch_dcpx.hook.settings import VARIABLES
    from torch_dcpx.reports import REPLACED

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    REPLACED.clear()
    yield
    torch_dcpx.uninstall()
    for name in VARIABLES:
        os.environ.pop(name, None)
    REPLACED.clear()


@pytest.fixture
def entry_point(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lets child processes find the package with its entry point, whatever installed it."""
    import torch_dcpx

    root = tmp_path_factory.mktemp("installed")
    folder = root / "torch_dcpx-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-dcpx\nVersion: 0\n")
    entry = "[torch.backends]\ntorch_dcpx = torch_dcpx:_autoload\n"
    (folder / "entry_points.txt").write_text(entry)
    package = Path(torch_dcpx.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{package}")
    return root
