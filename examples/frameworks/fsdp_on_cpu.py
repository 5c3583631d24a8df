"""Lets accelerate use FSDP without an accelerator, so that these examples run on any machine.

accelerate has FSDP on GPUs and their like only, and takes ranks on CPUs for DDP. A training on GPUs
needs nothing of this.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def use_fsdp_on_cpu() -> None:
    """Makes `Accelerator(cpu=True, fsdp_plugin=...)` use FSDP, as it does on GPUs."""
    own = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **others: Any) -> None:
        own(self, *args, fsdp_plugin=fsdp_plugin, **others)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            self.device = torch.device("cpu")  # without an index, as FSDP1 wants it
            for name in ("distributed_type", "device"):
                PartialState._shared_state[name] = getattr(self, name)

    AcceleratorState.__init__ = init
