"""Lets Megatron-Core train and save without an accelerator: its example runs on any machine.

Megatron asks CUDA for its device, waits for it, and makes tensors there. Here all of them are on
the CPU. A training on GPUs needs nothing of this.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch.overrides import TorchFunctionMode


class _OnCPU(TorchFunctionMode):
    """Takes the CPU where code names CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if "cuda" in str(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def use_megatron_on_cpu() -> None:
    """Makes the CPU the device of all that asks for CUDA, in this process."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda _device: None
    torch.cuda.synchronize = lambda _device=None: None
    CudaRNGStatesTracker.fork = lambda _self, _name="": nullcontext()
    _OnCPU().__enter__()
