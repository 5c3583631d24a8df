"""The items of a save plan: their data in memory of their own, and the file that each goes to.

`split_items` weighs an item by the bytes of its chunk; the tensor's global size, by which DCP
splits, says nothing of this rank's part. The heaviest item goes first, to the file that has the
least so far: no file exceeds 4/3 of the fullest one of the best split.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType


class StagedItems:
    """The data of a plan's items: of whole entries by name, of others by index."""

    def __init__(self) -> None:
        self.state_dict: dict[str, Any] = {}
        self.by_index: dict[MetadataIndex, Any] = {}

    def keep(self, item: WriteItem, data: Any) -> None:
        if any(item.index.offset or ()):
            self.by_index[item.index] = data
        else:
            self.state_dict[item.index.fqn] = data

    def resolve_data(self, item: WriteItem) -> Any:
        """As a planner's."""
        return self.by_index.get(item.index, self.state_dict.get(item.index.fqn))


_FRAMING_BYTES = 1024  # about what an item takes in its file besides the payload


class Split(NamedTuple):
    """Items in the order of the files, and the file of each: from 0 on, ascending, no gaps."""

    items: Sequence[WriteItem]
    files: Sequence[int]


def planned_bytes(item: WriteItem) -> int:
    """Returns the payload bytes that the plan announces; 0 for a bytes item."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def split_items(items: Sequence[WriteItem], files_per_rank: int | None) -> Split:
    """Assigns every item of a plan to one of at most `files_per_rank` files; None: to its own file.

    No file is empty. Equal plans are split alike. Each file keeps the plan's order, bytes items
    first, as with stock.
    """
    if files_per_rank is None:
        return Split(items, range(len(items)))
    # Bytes items first: a reader finds the small ones together.
    ordered = sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)
    if files_per_rank == 1:
        return Split(ordered, [0] * len(ordered))
    weights = [planned_bytes(item) + _FRAMING_BYTES for item in ordered]
    files = [0] * len(ordered)
    loads = [(0, file) for file in range(files_per_rank)]  # a heap: the least loaded comes first
    for number in sorted(range(len(ordered)), key=lambda number: -weights[number]):
        load, file = loads[0]
        files[number] = file
        heapq.heapreplace(loads, (load + weights[number], file))
    by_file = sorted(range(len(ordered)), key=files.__getitem__)
    return Split([ordered[number] for number in by_file], [files[number] for number in by_file])
