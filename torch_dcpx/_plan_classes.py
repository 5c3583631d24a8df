"""DCP's plan items, made by C++ a whole plan at a time."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from torch_dcpx._compat import HAS_STRIDES
from torch_dcpx._native import _C

MAKER = _C.ItemMaker(
    {
        "Size": torch.Size,
        "MetadataIndex": MetadataIndex,
        "ReadItem": ReadItem,
        "WriteItem": WriteItem,
        "TensorWriteData": TensorWriteData,
        "TensorProperties": TensorProperties,
        "ChunkStorageMetadata": ChunkStorageMetadata,
        "TensorStorageMetadata": TensorStorageMetadata,
        "BytesStorageMetadata": BytesStorageMetadata,
        "WriteResult": WriteResult,
        "_StorageInfo": _StorageInfo,
        "READ_TENSOR": LoadItemType.TENSOR,
        "READ_BYTES": LoadItemType.BYTE_IO,
        "TENSOR": WriteItemType.TENSOR,
        "SHARD": WriteItemType.SHARD,
        "BYTE_IO": WriteItemType.BYTE_IO,
        "contiguous_format": torch.contiguous_format,
        "has_strides": HAS_STRIDES,
    }
)
