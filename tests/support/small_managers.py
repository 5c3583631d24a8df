"""Managers of one process, and saves of a state that differs by step, for tests."""

from __future__ import annotations

from typing import Any

import torch

from torch_dcpx import CheckpointManager


def manager_of(url: str, **arguments: Any) -> CheckpointManager:
    return CheckpointManager(url, no_dist=True, **{"async_save": False, **arguments})


def save_steps(manager: CheckpointManager, *steps: int, **more: Any) -> None:
    for step in steps:
        manager.save(step, state={"x": torch.full((40,), float(step))}, **more)
    manager.wait()


def resumed(manager: CheckpointManager, **more: Any) -> float:
    """Returns the step of a resume, all of which is that step's."""
    state = {"x": torch.zeros(40)}
    info = manager.resume(state=state, **more)
    assert info.tag is not None and len(set(state["x"].tolist())) == 1
    return float(state["x"][0])
