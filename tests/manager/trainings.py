"""Small trainings on one process, and what a manager's root holds."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_dcpx import CheckpointManager, WriteOptions
from torch_dcpx.manager.resume import ResumeInfo

Log = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch

# No fsync: tests of the order of system calls have them.
FAST = WriteOptions(durability="none", workers=1, slot_bytes=256 << 10)


def manager_of(root: Path, **kwargs: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"options": FAST, "async_save": False, **kwargs})


class Training:
    """A linear model, AdamW and a scheduler; every step's gradients come from the step's number."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.scheduler}

    def train(self, step: int) -> float:
        loss = self.gradients(step)
        self.optimizer.step()
        self.scheduler.step()
        return loss

    def gradients(self, step: int) -> float:
        generator = torch.Generator().manual_seed(step)
        self.optimizer.zero_grad()
        loss = self.model(torch.rand(4, 5, generator=generator)).square().sum()
        loss.backward()
        return loss.item()


class Held:
    """A part with a state: a loader, a scheduler, a value. It gives its own values themselves."""

    def __init__(self, **values: Any) -> None:
        self.values, self.taken = values, list[Any]()

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state
        self.taken.append(state)


class Called(Held):
    """Calls a function where its state is asked for, which returns it, or where it gets one."""

    def __init__(self, asked: Any = dict, given: Any = lambda _: None) -> None:
        self.state_dict, self.load_state_dict = asked, given  # type: ignore[method-assign]


def large(value: float) -> torch.Tensor:
    """A tensor of several blocks: one may be damaged while the others are whole."""
    return torch.full((1 << 16,), float(value))


def save_steps(manager: CheckpointManager | Path, *steps: int, **kwargs: Any) -> None:
    """Saves these steps, each with its number as value, and waits for removals behind them."""
    manager = manager_of(manager) if isinstance(manager, Path) else manager
    for step in steps:
        manager.save(step, state={"x": torch.full((3,), float(step))}, **kwargs)
    manager.wait()


def resumed(manager: CheckpointManager | Path, **how: Any) -> tuple[ResumeInfo, float]:
    """Resumes what `save_steps` has saved; returns what the manager says of it, and the value."""
    manager = manager_of(manager) if isinstance(manager, Path) else manager
    target = {"x": torch.zeros(3)}
    info = manager.resume(state=target, **how)
    (value,) = target["x"].unique().tolist()
    return info, value


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def on_disk(root: Path) -> set[str]:
    """Names of the directories in the root."""
    return {path.name for path in root.iterdir() if path.is_dir()}


def pointer(root: Path) -> dict[str, Any]:
    """What the root says of its newest checkpoint."""
    found: dict[str, Any] = json.loads((root / "newest").read_bytes())
    return found


def fully_sharded(model: Any) -> Any:
    """Shards each layer, and the model, by FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


def damage(directory: Path, rank: int = 0) -> Path:
    """Flips a bit amid what a rank wrote, whose size stays: in a large tensor, if it wrote one, and
    not in the manager's record. Returns the file."""
    name = sorted(directory.glob(f"__{rank}_*.distcp"))[0]
    data = bytearray(name.read_bytes())
    data[len(data) // 2] ^= 1
    name.write_bytes(data)
    return name
