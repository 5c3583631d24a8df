"""The entry points of our own: what plug-ins of `torch.distributed.checkpoint` cannot do alone."""

from __future__ import annotations

from torch_dcpx.load_checkpoint import load

__all__ = ["load"]
