"""What many ranks hold, save and load, without ranks and without memory behind the tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from torch_dcpx._plan_classes import MAKER

REPLICAS = 4
CASES = ("tall", "wide", "moe", "hsdp")


class Chunk(NamedTuple):
    """A box of tensor `number`, in elements."""

    number: int
    offsets: torch.Size
    sizes: torch.Size


def name_of(number: int) -> str:
    """Returns the name of a tensor, as a string of its own: plans come out of pickles."""
    return f"model.layers.{number}.mlp.weight"


def shards_of(case: str, ranks: int) -> int:
    return ranks // REPLICAS if case == "hsdp" else ranks


def size_of(case: str, ranks: int) -> torch.Size:
    """Returns the sizes of a tensor of the case."""
    shards = shards_of(case, ranks)
    sizes = {"tall": (2 * shards, 8), "wide": (2 * shards, 8 * ranks), "hsdp": (16 * shards, 256)}
    return torch.Size(sizes.get(case, (128, 128)))


def chunks_of(case: str, rank: int, ranks: int, tensors: int) -> list[Chunk]:
    """Returns what a rank holds."""
    size = size_of(case, ranks)
    if case == "moe":
        whole = torch.Size((0, 0))
        return [Chunk(number, whole, size) for number in range(rank, tensors, ranks)]
    shards = shards_of(case, ranks)
    rows = size[0] // shards
    offsets = torch.Size((rows * (rank % shards), 0))
    return [Chunk(number, offsets, torch.Size((rows, size[1]))) for number in range(tensors)]


def plans_of(kind: Callable[[], Any], case: str, ranks: int, tensors: int) -> list[SavePlan]:
    """Returns the local plans of all ranks for a planner, no object of which two of them share."""
    planner = kind()
    planner.set_up_planner({}, None, True)
    empty = planner.create_local_plan()
    size = size_of(case, ranks)
    plans = []
    for rank in range(ranks):
        chunks = chunks_of(case, rank, ranks, tensors)
        local = torch.empty(1).expand(chunks[0].sizes if chunks else size)
        rows: list[Any] = []
        for number, offsets, sizes in chunks:
            if case == "moe":
                rows.append((name_of(number), local))
            else:
                box = (torch.Size(offsets), torch.Size(sizes), torch.Size(size))
                rows.append((name_of(number), local, False, *box))
        paths = {row[0]: ("model", "layers", row[0]) for row in rows}
        plans.append(dataclasses.replace(empty, items=MAKER.write_items(rows), planner_data=paths))
    return plans


def results_of(plan: SavePlan) -> list[WriteResult]:
    """Returns what a rank tells the coordinator when it has written its part."""
    return [
        WriteResult(item.index, 2048, _StorageInfo("__0_0.distcp", 2048 * number, 2048))
        for number, item in enumerate(plan.items)
    ]


def metadata_of(case: str, ranks: int, tensors: int) -> Metadata:
    """Returns the metadata of a save of the case."""
    size = size_of(case, ranks)
    entries: dict[str, Any] = {}
    for rank in range(shards_of(case, ranks)):
        for chunk in chunks_of(case, rank, ranks, tensors):
            name = name_of(chunk.number)
            entry = entries.get(name)
            if entry is None:
                entry = entries[name] = TensorStorageMetadata(TensorProperties(), size, [])
            entry.chunks.append(ChunkStorageMetadata(chunk.offsets, chunk.sizes))
    return Metadata(entries)


class Wanted:
    """A target of a load that wants one chunk of a tensor, and has no memory."""

    def __init__(self, chunk: Chunk, size: torch.Size) -> None:
        self.chunk, self.sizes = chunk, size

    def size(self) -> torch.Size:
        return self.sizes

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(self.chunk.offsets, self.chunk.sizes)]


def load_planner(kind: Any, case: str, ranks: int, tensors: int, metadata: Metadata) -> Any:
    """Returns the planner of the second of half as many ranks, ready to plan."""
    size = size_of(case, ranks)
    wanted = chunks_of(case, 0, ranks, tensors)
    rows = 2 * wanted[0].sizes[0] if case != "moe" else 0
    planner = kind(flatten_state_dict=False)
    planner.metadata, planner.is_coordinator = metadata, False
    planner.state_dict = {
        name_of(number): Wanted(
            Chunk(number, torch.Size((rows, 0)), torch.Size((rows, size[1]))) if rows else chunk,
            size,
        )
        for chunk in wanted
        for number in (chunk.number,)
    }
    return planner
