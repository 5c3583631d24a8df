"""The entry points of our own: what plug-ins of `torch.distributed.checkpoint` cannot do alone."""

from __future__ import annotations

from torch_dcpx.load_checkpoint import load
from torch_dcpx.pending_saves import drain_on_sigterm, wait
from torch_dcpx.save_checkpoint import async_save, close, prewarm, save

__all__ = ["async_save", "close", "drain_on_sigterm", "load", "prewarm", "save", "wait"]
