"""Tensors of which a rank holds chunks, saved and loaded in one process by DCP's own planner.

What 2 ranks would save comes from one process: two chunks of each tensor, in files of their own.
What 3 ranks would load is loaded by one process, rank after rank. So nothing is timed but the work,
and every side does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

SAVED_RANKS, LOADED_RANKS = 2, 3

Offsets = tuple[int, ...]


class ChunkedTensor(torch.Tensor):
    """A tensor by the chunks that are here. To DCP it is what a DTensor is, without a mesh."""

    chunks: Mapping[Offsets, torch.Tensor]

    @staticmethod
    def __new__(cls, shape: torch.Size, chunks: Mapping[Offsets, torch.Tensor]) -> ChunkedTensor:
        first = next(iter(chunks.values()))
        made: ChunkedTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype)
        made.chunks = chunks
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{func} of a tensor that is known by its chunks alone")

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(tensor), self.shape
                ),
            )
            for chunk, tensor in zip(
                self.__create_chunk_list__(), self.chunks.values(), strict=True
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), tensor.shape)
            for offsets, tensor in self.chunks.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.chunks[tuple(index.offset)]


def shares(whole: torch.Tensor, dim: int, ranks: int) -> list[dict[Offsets, torch.Tensor]]:
    """Returns each rank's part of the tensor, a view: as `Shard(dim)` cuts it."""
    found, at = [], 0
    for view in whole.chunk(ranks, dim):
        found.append({(at, 0) if dim == 0 else (0, at): view})
        at += view.shape[dim]
    return found


def saved_shards(state: Mapping[str, torch.Tensor], dim: int) -> dict[str, Any]:
    """Returns the state as two ranks hold it together."""
    return {
        key: ChunkedTensor(
            whole.shape, {k: v for part in shares(whole, dim, SAVED_RANKS) for k, v in part.items()}
        )
        for key, whole in state.items()
    }


def blank_shards(state: Mapping[str, torch.Tensor], dim: int, rank: int) -> dict[str, Any]:
    """Returns what one of three ranks loads: memory of its own for its part of each tensor."""
    return {
        key: ChunkedTensor(
            whole.shape,
            {
                offsets: torch.empty(view.shape, dtype=view.dtype)
                for offsets, view in shares(whole, dim, LOADED_RANKS)[rank].items()
            },
        )
        for key, whole in state.items()
    }


def chunks_of(state: Mapping[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """Returns the chunks that a rank holds, by names of their own."""
    return {
        f"{key} at {offsets} of rank {rank}": chunk
        for key, value in state.items()
        for offsets, chunk in value.chunks.items()
    }
