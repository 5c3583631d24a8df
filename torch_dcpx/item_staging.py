"""What a plan's items are at one moment, kept for a save that goes on in the background.

`stage_items` copies tensors into an arena, all at once, and serialises bytes items. What comes back
gives nothing but these, as a planner does, so that `write_data` takes no notice.

A state larger than its budget is staged in waves, by `ItemsInWaves`: the writer asks for an item
when it has room, and the caller waits until the last one was asked for.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from torch_dcpx import device_memory
from torch_dcpx.arena import ArenaPool
from torch_dcpx.staged_items import StagedItems
from torch_dcpx.staging import stage_guarded
from torch_dcpx.write_table import has_stock_hooks, is_kept_as_it_is, looked_up, vetted

__all__ = ["ItemsInWaves", "stage_items"]

_ARENA_BYTES = 2 << 20  # the least of an arena

StageFunction = Callable[[Sequence[torch.Tensor], Sequence[str]], list[torch.Tensor]]


def stage_items(
    plan: SavePlan, planner: SavePlanner, stage: StageFunction, *, is_transformed: bool = False
) -> StagedItems:
    """Returns the data of the plan's items as they are now.

    Args:
        plan: this rank's final one.
        planner: gives the data.
        stage: copies tensors, with their names, to the host.
        is_transformed: the writer's extensions will ask for bytes of every bytes item.

    Raises:
        AssertionError: the planner gave a wrong type (stock's texts).
        UnsupportedError: data that cannot be kept, by name.
        StagingError: no memory for the copies.
    """
    staged = StagedItems()
    is_stock = has_stock_hooks(planner)
    state: dict[str, Any] = planner.state_dict if is_stock else {}  # type: ignore[attr-defined]
    items: list[WriteItem] = []
    tensors: list[torch.Tensor] = []
    for item in plan.items:
        if item.type is WriteItemType.BYTE_IO:
            value = state.get(item.index.fqn, staged)
            if is_transformed or not is_kept_as_it_is(value):
                value = _own_bytes(planner.resolve_data(item))
            staged.keep(item, value)
            continue
        data = looked_up(item, state) if is_stock else None
        tensor, _ = vetted(item, planner.resolve_data(item) if data is None else data)
        items.append(item)
        tensors.append(tensor.detach())
    names = [item.index.fqn for item in items]
    for item, tensor in zip(items, stage(tensors, names), strict=True):
        staged.keep(item, tensor)
    return staged


def _own_bytes(data: Any) -> io.BytesIO:
    """Returns a stream of its own."""
    if not isinstance(data, io.BytesIO):
        raise AssertionError("Data must be io.BytesIO for BYTE_IO write items")
    return io.BytesIO(data.getvalue())


class ItemsInWaves:
    """A planner's data, copied when they are asked for, `dcpx_window_bytes` at one time.

    Made by the thread that called, which then waits in `wait` while the thread that writes asks.
    What the former has queued on devices is waited for.
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner, window_bytes: int) -> None:
        self._streams = device_memory.streams_in_use()
        self._pool = ArenaPool()
        # Small ones pass through an arena that is none of the window's copies.
        taken_bytes = min(_ARENA_BYTES, window_bytes // 2) if self._streams else 0
        self.dcpx_window_bytes = window_bytes - taken_bytes
        self._planner: Any = planner
        self._left = len(plan.items)
        self._ended = threading.Event()

    def resolve_data(self, item: WriteItem) -> Any:
        """As a planner's: gives a copy of the item's data."""
        data = self._planner.resolve_data(item)
        if item.type is WriteItemType.BYTE_IO:
            data = _own_bytes(data)
        else:
            data = self._copy(vetted(item, data)[0].detach())
        self._left -= 1
        if self._left == 0:
            self._planner = None  # and with it the caller's state
            self._ended.set()
        return data

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if device_memory.is_host(tensor):
            return tensor.clone()
        if device_memory.ordinal_of(tensor) < 0:
            return tensor.cpu()
        copies, _ = stage_guarded([tensor], pool=self._pool, overlap=False, streams=self._streams)
        # An arena is of 2 MiB at least, and lent as long as there is something over it.
        return copies[0] if copies[0].nbytes >= _ARENA_BYTES else copies[0].clone()

    def end(self) -> None:
        """Says that nobody will ask any more."""
        self._planner = None
        self._pool.close()
        self._ended.set()

    def wait(self) -> None:
        """Waits until the last item was copied, or `end`."""
        self._ended.wait()
