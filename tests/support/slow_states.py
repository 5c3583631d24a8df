"""States whose save takes long enough to be looked at, and reports of how far it is."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torch_dcpx import WriteOptions

# One worker, the smallest slots, the smallest windows: the slowest save.
SLOW = WriteOptions(workers=1, slot_bytes=256 << 10, host_memory_bytes=256 << 10)
PIECE_BYTES = 1 << 20


def gathered_state(seed: int = 0) -> dict[str, Any]:
    """Returns 384 MiB that are gathered element by element from 1 MiB, in one call to C++."""
    column = torch.arange(PIECE_BYTES).add(seed).to(torch.uint8).view(-1, 1)
    return {"gathered": column.expand(-1, 384), "step": seed}


def windowed_state(seed: int = 0) -> dict[str, Any]:
    """Returns tensors that `CopyingPlanner` saves in a window each."""
    return {f"t{i}": torch.full((PIECE_BYTES,), seed + i, dtype=torch.uint8) for i in range(6)}


class CopyingPlanner(DefaultSavePlanner):
    """Makes a copy of every tensor: each counts against the budget of temporaries."""

    def transform_object(self, write_item: Any, value: Any) -> Any:
        copied = super().transform_object(write_item, value)
        return copied.clone() if isinstance(copied, torch.Tensor) else copied


class Seen:
    """A progress function that notes its calls, and does something at one of them."""

    def __init__(self, at: Any = None, then: Any = None) -> None:
        """Args:
        at: of (done, total): whether `then` is to be called, at most once.
        """
        self.calls: list[tuple[int, int]] = []
        self.is_done = False
        self._at, self._then = at, then

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self.calls.append((done_bytes, total_bytes))
        if self._at is not None and not self.is_done and self._at(done_bytes, total_bytes):
            self.is_done = True
            self._then()
