"""Lets Lightning use FSDP1 without an accelerator, so that its example runs on any machine.

Lightning takes `FSDPStrategy` on GPUs only, and so does FSDP1 where it is given no device. A
training on GPUs needs nothing of this; FSDP2 (`ModelParallelStrategy`) needs nothing of it either.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel


class FabricFSDPOnCPU(FabricFSDPStrategy):
    """Fabric refuses its own class alone."""


class FSDPOnCPU(FSDPStrategy):
    """The Trainer refuses its own class alone."""


def use_fsdp_on_cpu() -> None:
    """Makes FSDP1 take the CPU where the caller names no device."""
    own = FullyShardedDataParallel.__init__

    def init(self: Any, *args: Any, device_id: Any = None, **others: Any) -> None:
        own(self, *args, device_id=device_id or torch.device("cpu"), **others)

    FullyShardedDataParallel.__init__ = init
