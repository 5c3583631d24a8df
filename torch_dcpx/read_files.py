"""One rank's reads: windows of regions through one ReadJob.

Where every target exists already (stock's planner hooks, host tensors of the stored dtype) there is
one window, and one call to C++. What must be staged, decoded, or is made by a user's planner on the
fly counts against a budget: when it is used up, the window is read, handed over and dropped.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    load_by_torch,
    plan_tensor_read,
    stored_dtype,
)
from torch_dcpx.trust import reencode_byte_item

__all__ = ["read_items"]

_HOOKS = ("resolve_tensor", "lookup_tensor", "transform_tensor")


class BytesRead(NamedTuple):
    """A read under way of an item whose bytes torch or the planner must understand."""

    item: ReadItem
    data: bytearray
    path: str
    descriptors: Sequence[str]


def has_stock_hooks(planner: LoadPlanner) -> bool:
    """Returns whether the planner hands out views of the state's own tensors."""
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(type(planner), name) is getattr(DefaultLoadPlanner, name)
        and name not in vars(planner)
        for name in _HOOKS
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
        self._rows: list[ReadRow] = []
        self._reads: list[tuple[TensorRead, bool] | BytesRead] = []
        self._used_bytes = 0
        self._touched: dict[str, None] = {}  # an ordered set, over all windows

    @property
    def touched(self) -> tuple[str, ...]:
        """Names of the items whose targets may hold new bytes."""
        return tuple(self._touched)

    def make_room(self, nbytes: int) -> None:
        """Reads what is prepared when `nbytes` more would exceed the budget."""
        if self._reads and nbytes and self._used_bytes + nbytes > self._options.host_memory_bytes:
            self.flush()
        self._used_bytes += nbytes

    def add_tensor(self, read: TensorRead, is_big_endian: bool) -> None:
        if read.row is not None:
            self._rows.append(read.row)
        self._reads.append((read, is_big_endian))

    def add_bytes(self, item: ReadItem, stored: Stored, descriptors: Sequence[str]) -> None:
        located = stored.located
        data = bytearray(located.payload_bytes)
        if data:
            row = ReadRow(
                stored.file, located.payload_offset, len(data), (), (), (), data, len(data),
                item.storage_index.fqn,
            )  # fmt: skip
            self._rows.append(row)
        self._reads.append(BytesRead(item, data, stored.path, descriptors))

    def flush(self) -> None:
        """Reads everything prepared and hands it to the planner."""
        rows, reads = self._rows, self._reads
        self._rows, self._reads, self._used_bytes = [], [], 0
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
            stream = self._transforms.transform_load_stream(
                item, read.descriptors, io.BytesIO(data)
            )
            try:
                data = stream.read(-1)
            except Exception as error:  # an extension raises what it likes
                fqn = item.storage_index.fqn
                raise CorruptionError(
                    f"undo {', '.join(read.descriptors)} of item '{fqn}' of '{read.path}': "
                    f"{type(error).__name__}: {error}",
                    fqn=fqn,
                    path=read.path,
                ) from error
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


def read_items(
    job: _C.ReadJob,
    items: Sequence[ReadItem],
    stored: Mapping[MetadataIndex, Stored],
    storage_data: Mapping[MetadataIndex, _StorageInfo],
    planner: LoadPlanner,
    transforms: Any,
    options: ReadOptions,
) -> int:
    """Reads `items` into the planner's tensors and objects.

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
        return _read_windows(window, items, stored, storage_data, planner)
    except (CorruptionError, StorageError) as error:
        error.touched = window.touched
        raise


def _read_windows(
    window: _Window,
    items: Sequence[ReadItem],
    stored: Mapping[MetadataIndex, Stored],
    storage_data: Mapping[MetadataIndex, _StorageInfo],
    planner: LoadPlanner,
) -> int:
    makes_targets = not has_stock_hooks(planner)
    torch_items = 0
    for item in items:
        place = stored[item.storage_index]
        located = place.located
        descriptors = storage_data[item.storage_index].transform_descriptors or ()
        if item.type == LoadItemType.BYTE_IO or descriptors or located.kind != "plain":
            torch_items += item.type != LoadItemType.BYTE_IO
            window.make_room(located.payload_bytes)
            window.add_bytes(item, place, descriptors)
            continue
        dtype = stored_dtype(place, item.storage_index.fqn)
        target = planner.resolve_tensor(item)
        read = plan_tensor_read(item, place, target, dtype)
        made_bytes = target.numel() * target.element_size() if makes_targets else 0
        window.make_room(read.staged_bytes + made_bytes)
        window.add_tensor(read, located.is_big_endian)
    window.flush()
    return torch_items
