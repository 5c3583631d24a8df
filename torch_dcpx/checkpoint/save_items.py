"""The data of a plan's items at one moment, for a save that goes on in the background.

`stage_items` copies tensors into an arena, all at once, and serialises byte items. Its result gives
these data as a planner does, so that `write_data` sees no difference.

`ItemsInWaves` stages a state that is larger than its budget: the writer takes an item when it has
room, and the caller waits until it has taken the last one.
"""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from torch_dcpx.staging.arena import ArenaPool
from torch_dcpx.staging.snapshot import stage_guarded
from torch_dcpx.tensors import device as device_memory
from torch_dcpx.tensors.memory import is_plain_tensor
from torch_dcpx.writer.items import StagedItems, planned_bytes
from torch_dcpx.writer.table import (
    check_shapes,
    gives_state_as_it_is,
    is_kept_as_it_is,
    note_item,
    vetted,
)

_ARENA_BYTES = 2 << 20  # the smallest arena
_MAX_GROUP_BYTES = 32 << 20  # of small tensors that leave a device together
_MAX_LOOKED_AT = 8192  # items, to find those

StageFunction = Callable[[Sequence[torch.Tensor], Sequence[str]], list[torch.Tensor]]


def stage_items(
    plan: SavePlan, planner: SavePlanner, stage: StageFunction, *, is_transformed: bool = False
) -> StagedItems:
    """Returns the data of the items of this rank's final plan as they are now.

    Args:
        stage: copies tensors, with their names, to the host.
        is_transformed: whether the writer's extensions read the bytes of every byte item.

    Raises:
        AssertionError: the planner gave a wrong type (stock's texts).
        PlanError: it gave a tensor of another shape than planned.
        UnsupportedError: data that cannot be kept, by name.
        StagingError: no memory for the copies.
    """
    staged = StagedItems()
    is_stock = gives_state_as_it_is(planner)
    state: dict[str, Any] = planner.state_dict if is_stock else {}  # type: ignore[attr-defined]
    lookup, byte_io = state.get, WriteItemType.BYTE_IO
    whole: dict[str, torch.Tensor] = {}
    items: list[WriteItem] = []
    tensors: list[torch.Tensor] = []
    for item in plan.items:
        index = item.index
        value: Any = lookup(index.fqn, staged)
        if item.type is byte_io:
            if is_transformed or not is_kept_as_it_is(value):
                value = _own_bytes(planner, item, is_stock=is_stock)
            staged.keep(item, value)
        # Nearly all are like this. No check is made twice: `stage` makes the others.
        elif (
            is_plain_tensor(value)
            and item.tensor_data is not None
            and not any(index.offset or ())
            and not value.is_meta
        ):
            whole[index.fqn] = value
        else:
            items.append(item)
            data = planner.resolve_data(item)
            tensors.append(vetted(item, data, gives_state=is_stock)[0].detach())
    names = [*whole, *(item.index.fqn for item in items)]
    copies = stage([*whole.values(), *tensors], names)
    staged.state_dict.update(zip(whole, copies, strict=False))
    for item, tensor in zip(items, copies[len(whole) :], strict=True):
        staged.keep(item, tensor)
    return staged


def staged_bytes(nbytes: int) -> int:
    """Returns the most bytes of an arena that a tensor takes: a large one begins on a page."""
    return nbytes + (4096 if nbytes >= 64 << 10 else 64) if nbytes else 0


def _own_bytes(planner: SavePlanner, item: WriteItem, *, is_stock: bool) -> io.BytesIO:
    try:
        data: Any = planner.resolve_data(item)
    except Exception as error:
        if is_stock:
            note_item(error, item)
        raise
    if not isinstance(data, io.BytesIO):
        raise AssertionError("Data must be io.BytesIO for BYTE_IO write items")
    return io.BytesIO(data.getvalue())


class ItemsInWaves:
    """A planner's data, copied when the writer takes them, `dcpx_window_bytes` at one time.

    The caller's thread makes it, and then waits in `wait` while the thread that writes takes items.
    A copy waits for work that the caller has queued on devices. Small tensors of devices come with
    the next ones in one snapshot: a snapshot costs a stream and its events.
    """

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner, window_bytes: int) -> None:
        """Prepares to give `items` in this order, at most `window_bytes` of copies at one time.

        Raises:
            PlanError: a plain tensor or DTensor of a stock planner has another shape than planned:
                others would be written before the writer takes it.
        """
        check_shapes(items, planner)
        self.dcpx_gives_state = gives_state_as_it_is(planner)
        self._streams = device_memory.streams_in_use()
        self._pool = ArenaPool()
        # Small ones pass through an arena, which is not part of the window.
        most = min(max(_ARENA_BYTES, window_bytes // 8), _MAX_GROUP_BYTES, window_bytes // 2)
        self._group_bytes = most if self._streams else 0
        self.dcpx_window_bytes = window_bytes - self._group_bytes
        self._planner: Any = planner
        self._items = items
        self._next = 0  # number of the first item that the writer has not taken
        self._ahead: dict[MetadataIndex, torch.Tensor] = {}  # in the arena, not taken yet
        self._ended = threading.Event()

    def resolve_data(self, item: WriteItem) -> Any:
        """As a planner's: returns a copy of the item's data."""
        self._next += 1
        if item.type is WriteItemType.BYTE_IO:
            data: Any = _own_bytes(self._planner, item, is_stock=self.dcpx_gives_state)
        elif item.index in self._ahead:
            data = self._ahead.pop(item.index).clone()
        else:
            data = self._copy(item, self._tensor_of(item))
        if self._next == len(self._items):
            self._planner = None  # lets go of the caller's state
            self._ended.set()
        return data

    def _tensor_of(self, item: WriteItem) -> torch.Tensor:
        data = self._planner.resolve_data(item)
        return vetted(item, data, gives_state=self.dcpx_gives_state)[0].detach()

    def _copy(self, item: WriteItem, tensor: torch.Tensor) -> torch.Tensor:
        if device_memory.is_host(tensor):
            return tensor.clone()
        if device_memory.ordinal_of(tensor) < 0:
            return tensor.cpu()
        if not self._group_bytes or tensor.nbytes >= self._group_bytes:
            return self._staged([tensor])[0]
        # The arena is free for the next group once the writer has taken all of this one.
        others = self._small_ones_behind(item, self._group_bytes - staged_bytes(tensor.nbytes))
        first, *rest = self._staged([tensor, *others.values()])
        self._ahead.update(zip(others, rest, strict=True))
        return first.clone()

    def _staged(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return stage_guarded(tensors, pool=self._pool, overlap=False, streams=self._streams)[0]

    def _small_ones_behind(
        self, item: WriteItem, room_bytes: int
    ) -> dict[MetadataIndex, torch.Tensor]:
        """Returns the tensors of devices that the writer takes next, as far as there is room."""
        found: dict[MetadataIndex, torch.Tensor] = {}
        is_next = self._items[self._next - 1].index == item.index
        # Else a user's hook would be called early.
        if self._ahead or not is_next or not gives_state_as_it_is(self._planner):
            return found
        for other in itertools.islice(self._items, self._next, self._next + _MAX_LOOKED_AT):
            is_large = planned_bytes(other) >= self._group_bytes
            if is_large or other.type is WriteItemType.BYTE_IO or other.index in found:
                continue
            tensor = self._tensor_of(other)
            if device_memory.is_host(tensor) or device_memory.ordinal_of(tensor) < 0:
                continue
            room_bytes -= staged_bytes(tensor.nbytes)
            if room_bytes < 0:
                break
            found[other.index] = tensor
        return found

    def end(self) -> None:
        """Ends the waiting: the writer takes no more."""
        self._planner = None
        self._ahead.clear()
        self._pool.close()
        self._ended.set()

    def wait(self) -> None:
        """Waits until the last item is copied, or `end` is called."""
        self._ended.wait()
