"""Errors that end with a way out: their texts, and what they name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import torch_dcpx as dcpx
from torch_dcpx import DcpxError, KeyMap
from torch_dcpx.cli.app import app

ARGUMENT = re.compile(r"\b(\w+)=('[^']*'|\[[^\]]*\]|True|False|KeyMap\(\))")


def state() -> dict[str, Any]:
    return {"model": {"weight": torch.ones(3, 2), "bias": torch.ones(2)}, "step": 3}


def zeros() -> dict[str, Any]:
    return {"model": {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, "step": 0}


def save_state(folder: Path) -> Path:
    """Saves `state()`; returns the checkpoint."""
    dcpx.save(state(), folder / "runs" / "ckpt-10")
    return folder / "runs" / "ckpt-10"


def save_models(folder: Path) -> Path:
    """Saves two steps of a small model; returns the manager's root."""
    with dcpx.CheckpointManager(folder / "root", async_save=False) as manager:
        manager.save(1, model=torch.nn.Linear(2, 3))
        manager.save(2, model=torch.nn.Linear(2, 3))
    return folder / "root"


def text_of(kind: type[DcpxError], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def run(text: str, *, code: int = 0) -> Result:
    """Runs the command that a text names."""
    (command,) = re.findall(r"`dcpx ([^`]+)`", text)
    result = CliRunner().invoke(app, command.split(), prog_name="dcpx")
    assert result.exit_code == code, result.output
    return result


def arguments(text: str) -> dict[str, Any]:
    """Returns the arguments that a text names, each with its value."""
    names = {"KeyMap": KeyMap, "globs": None}
    found = [match for match in ARGUMENT.findall(text) if match[1] != "[globs]"]
    return {name: eval(value, names) for name, value in found}


def assert_loads(path: str | Path, **options: Any) -> None:
    target = zeros()
    dcpx.load(target, path, **options)
    assert torch.equal(target["model"]["weight"], torch.ones(3, 2))
