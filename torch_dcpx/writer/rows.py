"""The rows that C++ writes, one an item, what many of them share, and DCP's results of them.

`SAVE_ROWS` makes the rows of plain tensors and all results in C++, a whole plan at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from torch_dcpx._compat import HAS_KNOWN_ITEMS, dtype_name, framing_of
from torch_dcpx._native import _C
from torch_dcpx.tensors.memory import HOOKS

TENSOR, BYTES, TORCH_TENSOR = 0, 1, 2  # ItemKind of csrc/format/file_footer.h
PICKLE = 3  # stored as BYTES: C++ puts the archive around it that torch.save would make

_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.channels_last: 1, torch.preserve_format: 2}


class ItemType(NamedTuple):
    """Fields that many items share, as `WriteJob.write` takes them."""

    storage_module: str  # `_compat.framing_of` of the dtype; empty for what is no plain tensor
    storage_name: str
    dtype_name: str
    elem_bytes: int
    flags: int
    memory_format: int
    dtype: str  # of the stored payload
    prop_dtype: str  # dtype and layout as the metadata says
    layout: str


class WriteRow(NamedTuple):
    """One item as `WriteJob.write` takes it. Sizes, strides, offsets in elements."""

    file: int
    kind: int
    type: int  # index into WriteTable.types
    source: Any  # address in memory of `device`, or an object with a buffer
    payload_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # of the source
    is_dense: bool  # the source's memory is the payload as it is
    fqn: str
    global_sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    path: tuple[str | int, ...] | None  # flatten's; anything else counts as None
    device: int = -1  # CUDA ordinal; -1 for host memory


class Resolved(NamedTuple):
    """A row and what it costs."""

    row: WriteRow
    owner: Any  # keeps the source alive until it is written
    temporary_bytes: int  # host memory that exists for this row alone


def stored_bytes(row: WriteRow) -> int:
    """Returns the bytes of a row in its file: C++ puts an archive around a pickle."""
    return row.payload_bytes + (_C.OBJECT_ZIP_OVERHEAD if row.kind == PICKLE else 0)


BYTES_TYPE = ItemType("", "", "", 1, 0, 0, "", "", "")  # index 0, of byte items


def item_type(dtype: torch.dtype, properties: TensorProperties, *, is_plain: bool) -> ItemType:
    """Returns the type of items of these properties of the metadata, whose payload is of `dtype`.

    Args:
        is_plain: addresses and strides say it all; else the item is in torch's serialisation.
    """
    return ItemType(
        *(framing_of(dtype) if is_plain else ("", "", "")),
        dtype.itemsize if is_plain else 1,
        int(properties.requires_grad) | 2 * int(properties.pin_memory),
        _MEMORY_FORMATS.get(properties.memory_format, 0),
        dtype_name(dtype),
        dtype_name(properties.dtype),
        str(properties.layout).removeprefix("torch."),
    )


SAVE_ROWS = _C.SaveRows(
    {
        "Tensor": torch.Tensor,
        "Parameter": torch.nn.Parameter,
        "DTensor": DTensor,
        "hooks": tuple(HOOKS),
        "strided": torch.strided,
        "BYTE_IO": WriteItemType.BYTE_IO,
        "WriteRow": WriteRow,
        "WriteResult": WriteResult,
        "StorageInfo": _StorageInfo,
    }
)


def write_results(
    items: Sequence[WriteItem],
    paths: Sequence[str],
    offsets: list[int],
    lengths: list[int],
    descriptors: list[str] | None,
) -> list[WriteResult]:
    """Returns the result of each item, by its file, offset and bytes, and the stream extensions."""
    if HAS_KNOWN_ITEMS:
        return SAVE_ROWS.results(items, paths, offsets, lengths, descriptors)
    return [
        WriteResult(item.index, nbytes, _StorageInfo(path, offset, nbytes, descriptors))
        for item, path, offset, nbytes in zip(items, paths, offsets, lengths, strict=True)
    ]
