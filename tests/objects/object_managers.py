"""Managers beneath the URL of a store, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_dcpx import CheckpointManager

if TYPE_CHECKING:
    from support.object_server import ObjectServer


def manager_of(url: str, **arguments: Any) -> CheckpointManager:
    return CheckpointManager(url, no_dist=True, **{"async_save": False, **arguments})


def save_steps(manager: CheckpointManager, *steps: int, **more: Any) -> None:
    for step in steps:
        manager.save(step, state={"x": torch.full((40,), float(step))}, **more)
    manager.wait()


def resumed(manager: CheckpointManager, **more: Any) -> float:
    state = {"x": torch.zeros(40)}
    info = manager.resume(state=state, **more)
    assert info.tag is not None and len(set(state["x"].tolist())) == 1
    return float(state["x"][0])


def names(server: ObjectServer, url: str, tag: str) -> set[str]:
    """Returns the names of a checkpoint's objects, "data" for each data file."""
    prefix = f"{url}/{tag}/".removeprefix(f"{server.root}/")
    found = [key.removeprefix(prefix) for key in server.keys(prefix)]
    return {"data" if name.endswith(".distcp") else name for name in found}
