"""Hooks of users in saves of our accelerator: `accelerate_worker.py CASE PATH`, under torchrun.

Prints one line of JSON; test_accelerate.py has a test for each case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_on_cpu import use_fsdp_on_cpu
from train_accelerate import prepared

from torch_dcpx import DcpxError

ADAPTER = "torch_dcpx.integrations.accelerate:DcpxAccelerator"
STATE = {"average": torch.full((4,), 3.0)}


def accelerator_of(path: Path, limit: int | None = None) -> Any:
    more = {"fsdp": 2, "width": 8, "layers": 2, "steps": 4, "accelerator": ADAPTER}
    return prepared(SimpleNamespace(folder=str(path), limit=limit, **more))[0]


def saved(accelerator: Any, folder: str | None = None) -> str:
    """Returns the error of a save."""
    try:
        accelerator.save_state(folder)
        accelerator.wait_for_saves()
    except DcpxError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def raises(path: Path) -> Any:
    """A hook of the last rank raises once; automatic names go on."""
    accelerator, left = accelerator_of(path, limit=5), [1]

    def hook(*_: Any) -> None:
        if dist.get_rank() == 1 and left:
            left.clear()
            raise ValueError("the hook of rank 1")

    accelerator.register_save_state_pre_hook(hook)
    return [saved(accelerator) for _ in range(3)]


def saves(path: Path) -> Any:
    """A hook saves by DCP: all ranks, one rank by itself, one rank that errs."""
    accelerator, found = accelerator_of(path), []
    for name in ("all", "alone", "errs"):

        def hook(_models: Any, _weights: Any, folder: str, name: str = name) -> None:
            if name == "all" or dist.get_rank() == 0:
                more = {"no_dist": True} if name == "alone" else {}
                dcp.save(STATE, checkpoint_id=Path(folder, "average"), **more)

        handle = accelerator.register_save_state_pre_hook(hook)
        found.append(saved(accelerator, str(path / name)))
        handle.remove()
        dist.barrier()
        found.append((path / name / "average" / ".metadata").exists())
    return found


CASES: dict[str, Callable[[Path], Any]] = {"raises": raises, "saves": saves}


def main() -> None:
    use_fsdp_on_cpu()
    found = CASES[sys.argv[1]](Path(sys.argv[2]))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        print(json.dumps({"found": every}))


if __name__ == "__main__":
    main()
