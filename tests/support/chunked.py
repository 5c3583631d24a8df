"""A tensor of which one process holds any boxes, by DCP's hooks: reshards without ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Box(NamedTuple):
    """A part of a tensor, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + n) for at, n in zip(self.offsets, self.sizes, strict=True))


class Chunked(torch.Tensor):
    """Says it is `whole_size`, and holds `parts` of that at `boxes`."""

    whole_size: torch.Size
    boxes: list[Box]
    parts: list[torch.Tensor]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in self.boxes
        ]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.whole_size),
            )
            for number, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        begins, begin = [box.offsets for box in self.boxes], tuple(index.offset or ())
        at = index.index  # of all ranks: another box's, where this rank has few of them
        if at is None or at >= len(begins) or begins[at] != begin:
            at = begins.index(begin)
        return self.parts[at]

    def size(self, *_: Any) -> torch.Size:
        return self.whole_size


def chunked(
    boxes: Sequence[Box], parts: Sequence[torch.Tensor], whole_size: Sequence[int]
) -> Chunked:
    made = torch.empty(0, dtype=parts[0].dtype if parts else None).as_subclass(Chunked)
    made.whole_size = torch.Size(whole_size)
    made.boxes, made.parts = list(boxes), list(parts)
    return made


def grid(sizes: Sequence[int], counts: Sequence[int]) -> list[Box]:
    """Returns the shards of a mesh of `counts`, as torch.chunk cuts them: the last ones may be
    shorter, or empty.
    """
    cuts = []
    for size, count in zip(sizes, counts, strict=True):
        step = -(-size // count) if size else 0
        ends = [min(size, step * (i + 1)) for i in range(count)]
        cuts.append(list(zip([0, *ends[:-1]], ends, strict=True)))
    return [
        Box(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))
        for ranges in itertools.product(*cuts)
    ]
