"""Makes golden roots of a manager with the torch_dcpx that PYTHONPATH finds: NAME.tar.xz.

    python tests/golden/make_manager.py manager-0.1.0

`plain` is of one process, `fsdp2` of two. Every value follows from its name and shape, so that
tests/manager/test_golden_roots.py computes what to expect.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn


class Training(NamedTuple):
    """What a manager saves."""

    model: nn.Module
    optimizer: dict[str, torch.optim.Optimizer]
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler
    state: dict[str, Any]

    def fill(self) -> None:
        """Takes a step, so that there are states; then gives each tensor its own values."""
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in self.optimizer.values():
            optimizer.step()
        self.lr_scheduler.step()
        for name, tensor in self.tensors().items():
            _local(tensor).copy_(_ramp(name, tensor))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors of the model and of the optimizers by name."""
        found = dict(self.model.state_dict(keep_vars=True))
        for kind, optimizer in self.optimizer.items():
            for name, parameter in self.model.named_parameters():
                for entry, value in optimizer.state.get(parameter, {}).items():
                    found[f"{kind}.{name}.{entry}"] = value
        return {name: tensor.detach() for name, tensor in found.items()}


def expected(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values of a whole tensor: small integers, exact in every dtype that is used."""
    return (torch.arange(tensor.numel()) % 97 + zlib.crc32(name.encode()) % 31).view(tensor.shape)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _ramp(name: str, tensor: Any) -> torch.Tensor:
    full = expected(name, tensor)
    if not hasattr(tensor, "to_local"):
        return full
    from torch.distributed.tensor import distribute_tensor

    return _local(distribute_tensor(full, tensor.device_mesh, tensor.placements))


def training(kind: str) -> Training:
    """Returns what a program has made when it begins."""
    torch.manual_seed(0)
    first: Any = nn.Conv2d(2, 4, 3)
    first.to(memory_format=torch.channels_last)
    if kind == "fsdp2":
        first = nn.Linear(6, 4)
    model = nn.Sequential(first, nn.BatchNorm1d(4), nn.Linear(4, 3))
    if kind == "fsdp2" and torch.distributed.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    slow = {"params": [*model[1].parameters()], "lr": 0.25, "initial_lr": 0.5}
    groups: list[Any] = [{"params": [*model[0].parameters()]}, slow]
    adamw = torch.optim.AdamW(groups, lr=0.125)
    sgd = torch.optim.SGD(model[2].parameters(), lr=0.5, momentum=0.75)
    state = {
        "seen": torch.zeros(3, dtype=torch.int64),
        "nested": {"values": [0.0, ""], "deep": {"of": [{}, {"x": None}]}},
        "rate": 0.0,
    }
    schedule = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.5)
    return Training(model, {"adamw": adamw, "sgd": sgd}, schedule, state)


SAVED: dict[str, Any] = {
    "seen": [3, 1, 4],
    "nested": {"values": [0.5, "text"], "deep": {"of": [{}, {"x": 1 << 70}]}},
    "rate": 0.375,
}


def _save(kind: str, root: str) -> None:
    """One rank."""
    from torch_dcpx import CheckpointManager

    if kind == "fsdp2":
        torch.distributed.init_process_group("gloo")
    run = training(kind)
    run.fill()
    state = {**SAVED, "seen": torch.tensor(SAVED["seen"])}
    parts = {**run._asdict(), "state": state}
    with CheckpointManager(root, no_dist=kind == "plain", async_save=False) as manager:
        manager.save(1, **parts)
        manager.save(2, **parts, user_content={"note": "of then"})
    if kind == "fsdp2":
        torch.distributed.destroy_process_group()


def main() -> None:
    if len(sys.argv) == 3:
        _save(*sys.argv[1:])
        return
    from make_golden import anonymous  # beside this script

    here = Path(__file__).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        for kind, ranks in (("plain", 1), ("fsdp2", 2)):
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command = [sys.executable, *launch, str(here), kind, kind]
            subprocess.run(command, cwd=scratch, check=True)
        with tarfile.open(here.with_name(f"{sys.argv[1]}.tar.xz"), "w:xz") as archive:
            for kind in ("plain", "fsdp2"):
                archive.add(Path(scratch) / kind, kind, filter=anonymous)


if __name__ == "__main__":
    main()
