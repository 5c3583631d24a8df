"""An empty path is no path: no public door takes it for the current directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.saves import save

import torch_dcpx as dcpx

STATE = {"w": torch.ones(2)}
DOORS: dict[str, Callable[[Any], Any]] = {
    "ls": dcpx.ls,
    "inspect": dcpx.inspect,
    "verify": dcpx.verify,
    "repair": dcpx.repair,
    "stats": dcpx.stats,
    "diff": lambda path: dcpx.diff(".", path),
    "open_checkpoint": dcpx.open_checkpoint,
    "load_tensors": dcpx.load_tensors,
    "load_pretrained": lambda path: dcpx.load_pretrained(torch.nn.Linear(1, 1), path),
    "export of": lambda path: dcpx.export(path, "x.safetensors", no_dist=True),
    "export to": lambda path: dcpx.export(STATE, path, no_dist=True),
    "export's config": lambda path: dcpx.export(STATE, "x", config=path, no_dist=True),
    "export's adapter": lambda path: dcpx.export(".", "x", merge_lora=path, no_dist=True),
    "save": lambda path: dcpx.save(STATE, path, no_dist=True),
    "async_save": lambda path: dcpx.async_save(STATE, path, no_dist=True),
    "load": lambda path: dcpx.load(STATE, path, no_dist=True),
    "CheckpointManager": lambda path: dcpx.CheckpointManager(path, no_dist=True),
    "DcpxWriter": dcpx.DcpxWriter,
    "DcpxReader": dcpx.DcpxReader,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("path", ["", b""])
def test_an_empty_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str, path: str | bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    save(STATE, tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(dcpx.OptionError):
        DOORS[door](path)
    assert sorted(tmp_path.iterdir()) == before
