"""An optimizer that a state holds trains on as before, whatever the layout of its states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict())


def training(kind: Any, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, kind(model.parameters(), lr=0.1, **options)


@pytest.mark.parametrize("door", ["state", "save"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})],
)
def test_fused_optimizers_of_channels_last_models_train_on_as_before(
    tmp_path: Path, door: str, kind: Any, options: dict[str, Any]
) -> None:
    model, optimizer = training(kind, fused=True, **options)
    trained(model, optimizer, 3)
    other, fresh = training(kind, fused=True, **options)
    if door == "save":
        dcpx.save({"m": model, "o": optimizer}, tmp_path, no_dist=True)
        dcpx.load({"m": other, "o": fresh}, tmp_path, no_dist=True)
    else:
        with CheckpointManager(tmp_path, no_dist=True, async_save=False) as manager:
            manager.save(1, model=model, state={"o": optimizer})
            manager.resume(model=other, state={"o": fresh})
    wanted, found = trained(model, optimizer, 3), trained(other, fresh, 3)
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
