"""What a save makes in Python of each of its items, made by C++ a whole plan at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from torch_dcpx._compat import HAS_KNOWN_ITEMS
from torch_dcpx._native import _C
from torch_dcpx.tensors.own_chunks import HOOKS
from torch_dcpx.writer.rows import WriteRow

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
    """Returns the result of each item.

    Args:
        paths: of the item's file, beneath the directory.
        offsets, lengths: where it lies there, bytes.
        descriptors: of the stream extensions that were applied to it.
    """
    if HAS_KNOWN_ITEMS:
        return SAVE_ROWS.results(items, paths, offsets, lengths, descriptors)
    return [
        WriteResult(item.index, nbytes, _StorageInfo(path, offset, nbytes, descriptors))
        for item, path, offset, nbytes in zip(items, paths, offsets, lengths, strict=True)
    ]
