"""Lets torchtitan train without an accelerator, so that its example runs on any machine.

torchtitan takes CUDA where it sees no device, and imports triton. A training on GPUs needs nothing
of this. Import it before any other module of torchtitan: they copy the names that it sets.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


utils.device_type = "cpu"
utils.device_module = SimpleNamespace(  # what torchtitan asks of torch.cuda
    device_count=lambda: 1,
    current_device=lambda: 0,
    set_device=_nothing,
    synchronize=_nothing,
    empty_cache=_nothing,
    reset_peak_memory_stats=_nothing,
    get_device_name=lambda *_: "CPU",
    get_device_properties=lambda *_: SimpleNamespace(total_memory=1),
    memory_stats=lambda *_: {},
)
utils.get_local_device = lambda: torch.device("cpu")
torch.distributed.__dict__.setdefault("set_timeout", _nothing)  # torch 2.13.0 lacks it

_kernels = {name: mock.MagicMock() for name in ("triton", "triton.language")}
sys.modules.update(_kernels)
import torchtitan.distributed.minimal_async_ep  # noqa: E402, F401  (its kernels run on GPUs only)

for _name in _kernels:
    del sys.modules[_name]


def use_gloo(trainer: Any) -> None:
    """Makes FSDP divide gradients by itself: gloo only sums."""
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
