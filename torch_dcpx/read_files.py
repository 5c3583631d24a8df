"""One rank's reads: windows of regions through one ReadJob.

Where every target exists already (stock's planner hooks, host tensors of the stored dtype) there is
one window, and one call to C++. What must be staged, decoded, or is made by a user's planner on the
fly counts against a budget: when it is used up, the window is read, handed over and dropped.

A planner that overrides both how targets are found and what happens to what was read may count on
stock's order, one item after the other: such planners give the same buffer for every item, or
remember the item whose commit they expect. For them every window holds one item.
"""

from __future__ import annotations

import bisect
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torch_dcpx import _C
from torch_dcpx.errors import CorruptionError, StorageError
from torch_dcpx.options import ReadOptions
from torch_dcpx.read_table import (
    ReadRow,
    Stored,
    TensorRead,
    finish_tensor_read,
    is_direct_target,
    load_by_torch,
    plan_tensor_read,
    stored_dtype,
)
from torch_dcpx.tensor_memory import has_strides
from torch_dcpx.trust import reencode_byte_item
from torch_dcpx.unpickle import MAX_MESSAGE

__all__ = ["read_items"]

_HOOKS = ("resolve_tensor", "lookup_tensor", "transform_tensor")
_TAKING_HOOKS = ("commit_tensor", "load_bytes")


class BytesRead(NamedTuple):
    """A read under way of an item whose bytes torch or the planner must understand."""

    item: ReadItem
    data: bytearray
    path: str
    descriptors: Sequence[str]


def has_stock_hooks(planner: LoadPlanner, names: Iterable[str] = _HOOKS) -> bool:
    """Returns whether the planner's hooks `names` are stock's; by default those whose stock form
    hands out views of the state's own tensors.
    """
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(type(planner), name) is getattr(DefaultLoadPlanner, name)
        and name not in vars(planner)
        for name in names
    )


class _Window:
    """Reads that are prepared together, read in one call, and then handed over in their order."""

    def __init__(
        self, job: _C.ReadJob, planner: LoadPlanner, transforms: Any, options: ReadOptions
    ) -> None:
        self._job = job
        self._planner = planner
        self._transforms = transforms
        self._options = options
        self._makes_targets = not has_stock_hooks(planner)
        self._is_single = self._makes_targets and not has_stock_hooks(planner, _TAKING_HOOKS)
        self._rows: list[ReadRow] = []
        self._reads: list[tuple[TensorRead, bool] | BytesRead] = []
        self._used_bytes = 0
        # Memory that the window's reads go to: (begin, end, whose), disjoint and sorted.
        self._spans: list[tuple[int, int, MetadataIndex]] = []
        self._touched: dict[str, None] = {}  # an ordered set, over all windows

    @property
    def touched(self) -> tuple[str, ...]:
        """Names of the items whose targets may hold new bytes."""
        return tuple(self._touched)

    def _make_room(self, nbytes: int) -> None:
        """Reads what is prepared when `nbytes` more would exceed the budget."""
        if self._reads and nbytes and self._used_bytes + nbytes > self._options.host_memory_bytes:
            self.flush()

    def _claim(self, item: ReadItem, target: torch.Tensor) -> None:
        """Reads what is prepared when it goes to memory of this item, as with tied weights.

        The later one stays, as with stock, and no checksum is taken of memory that another read
        fills. Parts of one target are disjoint by their plan.
        """
        if not has_strides(target) or not target.numel():
            return
        dims = zip(target.shape, target.stride(), strict=True)
        begin = target.data_ptr()
        last = sum((size - 1) * stride for size, stride in dims)
        end, owner = begin + (last + 1) * target.element_size(), item.dest_index
        first = after = bisect.bisect_left(self._spans, (begin,))
        if first and self._spans[first - 1][1] > begin:
            first -= 1
        while after < len(self._spans) and self._spans[after][0] < end:
            after += 1
        met = self._spans[first:after]
        if any(other != owner for _, _, other in met):
            self.flush()
            met, first, after = [], 0, 0
        begin = min([begin, *(span[0] for span in met)])
        end = max([end, *(span[1] for span in met)])
        self._spans[first:after] = [(begin, end, owner)]

    def add_tensor(self, item: ReadItem, stored: Stored) -> None:
        """Prepares the read of a plain tensor's region."""
        dtype = stored_dtype(stored, item.storage_index.fqn)
        is_big_endian = stored.located.is_big_endian
        target = self._planner.resolve_tensor(item)
        is_staged = not is_direct_target(target.detach(), dtype, is_big_endian)
        cost = math.prod(item.lengths) * dtype.itemsize if is_staged else 0
        if self._makes_targets:
            cost += target.numel() * target.element_size()
        self._make_room(cost)
        self._claim(item, target.detach())
        read = plan_tensor_read(item, stored, target, dtype)
        if read.row is not None:
            self._rows.append(read.row)
        self._add((read, is_big_endian), cost)

    def add_bytes(self, item: ReadItem, stored: Stored, descriptors: Sequence[str]) -> None:
        """Prepares the read of a whole item, whose bytes torch or the planner must understand."""
        located = stored.located
        self._make_room(located.payload_bytes)
        if item.type != LoadItemType.BYTE_IO and not self._makes_targets:
            self._claim(item, self._planner.resolve_tensor(item).detach())
        data = bytearray(located.payload_bytes)
        if data:
            row = ReadRow(
                stored.file, located.payload_offset, len(data), (), (), (), data, len(data),
                item.storage_index.fqn,
            )  # fmt: skip
            self._rows.append(row)
        self._add(BytesRead(item, data, stored.path, descriptors), len(data))

    def _add(self, read: tuple[TensorRead, bool] | BytesRead, cost: int) -> None:
        self._reads.append(read)
        self._used_bytes += cost
        if self._is_single:
            self.flush()

    def flush(self) -> None:
        """Reads everything prepared and hands it to the planner."""
        rows, reads = self._rows, self._reads
        self._rows, self._reads, self._spans, self._used_bytes = [], [], [], 0
        try:
            self._job.read(rows)
        finally:
            touched = zip(rows, self._job.touched(), strict=False)
            self._touched.update((row.fqn, None) for row, is_touched in touched if is_touched)
        for read in reads:
            if isinstance(read, BytesRead):
                self._finish_bytes(read)
            else:
                finish_tensor_read(*read, self._planner)

    def _finish_bytes(self, read: BytesRead) -> None:
        item = read.item
        data: bytes | bytearray = read.data
        if read.descriptors:
            data = _undo_extensions(read, self._transforms)
        if item.type != LoadItemType.BYTE_IO:
            load_by_torch(io.BytesIO(data), read.path, item, self._planner, self._options)
        elif self._options.trusted:
            self._planner.load_bytes(item, io.BytesIO(data))
        else:
            decoded = reencode_byte_item(
                memoryview(data),
                fqn=item.storage_index.fqn,
                path=read.path,
                safe_globals=self._options.safe_globals,
            )
            self._planner.load_bytes(item, decoded)


def _undo_extensions(read: BytesRead, transforms: Any) -> bytes:
    """Returns the item as it was before the writer's stream extensions changed it.

    Raises:
        CorruptionError: an extension cannot read what is stored. Other errors are stock's: the
            registry lacks an extension.
    """
    stream = transforms.transform_load_stream(read.item, read.descriptors, io.BytesIO(read.data))
    try:
        data: bytes = stream.read(-1)
    except Exception as error:
        fqn = read.item.storage_index.fqn
        cause = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
        raise CorruptionError(
            f"undo {list(read.descriptors)} of item '{fqn}' of '{read.path}': {cause}",
            fqn=fqn,
            path=read.path,
        ) from error
    return data


def read_items(
    job: _C.ReadJob,
    items: Sequence[ReadItem],
    stored: Mapping[MetadataIndex, Stored],
    storage_data: Mapping[MetadataIndex, _StorageInfo],
    planner: LoadPlanner,
    transforms: Any,
    options: ReadOptions,
) -> int:
    """Reads `items` into the planner's tensors and objects, file by file as stock does.

    Args:
        job: has located `stored`.
        stored: where each storage entry lies.
        storage_data: the metadata's entries, for stream extensions.
        planner: gives targets, takes what was read.
        transforms: stock's `_StorageReaderTransforms`.
        options: memory bound and trust.

    Returns:
        How many tensor items went through torch's own loader.

    Raises:
        CorruptionError, StorageError: `touched` names the items whose targets may hold new bytes.
    """
    window = _Window(job, planner, transforms, options)
    try:
        return _read_windows(window, items, stored, storage_data)
    except (CorruptionError, StorageError) as error:
        error.touched = window.touched
        raise


def _read_windows(
    window: _Window,
    items: Sequence[ReadItem],
    stored: Mapping[MetadataIndex, Stored],
    storage_data: Mapping[MetadataIndex, _StorageInfo],
) -> int:
    torch_items = 0
    # Files are numbered in the order in which the plan names them first.
    for item in sorted(items, key=lambda item: stored[item.storage_index].file):
        place = stored[item.storage_index]
        descriptors = storage_data[item.storage_index].transform_descriptors or ()
        is_bytes = item.type == LoadItemType.BYTE_IO
        if is_bytes or descriptors or place.located.kind != "plain":
            torch_items += not is_bytes
            window.add_bytes(item, place, descriptors)
        else:
            window.add_tensor(item, place)
    window.flush()
    return torch_items
