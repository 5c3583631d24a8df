"""Checkpoints as others wrote them: stock's metadata around items of any making; plans by hand."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.zip_samples import rezipped, saved
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from torch_dcpx import DcpxReader


class Piece(NamedTuple):
    """One stored item: a chunk of a tensor, or (`chunk` None) bytes."""

    fqn: str
    data: bytes
    chunk: torch.Tensor | None = None  # what the item holds
    offsets: tuple[int, ...] = ()  # of the chunk; () for the start
    path: str = "__0_0.distcp"
    descriptors: Sequence[str] | None = None
    hint: int | None = None

    @property
    def index(self) -> MetadataIndex:
        if self.chunk is None:
            return MetadataIndex(self.fqn)
        return MetadataIndex(self.fqn, self.start, self.hint)

    @property
    def start(self) -> torch.Size:
        return torch.Size(self.offsets or (0,) * (0 if self.chunk is None else self.chunk.dim()))


def write_foreign(
    directory: Path,
    pieces: Iterable[Piece],
    *,
    change: Callable[[Metadata], None] | None = None,
    encode: Callable[[Metadata], bytes] = pickle.dumps,
) -> None:
    """Writes pieces behind one another, each to its file, and stock's metadata of them.

    Args:
        change: gets the metadata before it is pickled.
        encode: pickles it.
    """
    entries: dict[str, Any] = {}
    places = {}
    for piece in pieces:
        path = directory / piece.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            info = _StorageInfo(piece.path, file.tell(), len(piece.data), piece.descriptors)
            file.write(piece.data)
        places[piece.index] = info
        if piece.chunk is None:
            entries[piece.fqn] = BytesStorageMetadata()
            continue
        chunk = ChunkStorageMetadata(piece.start, piece.chunk.shape)
        ends = [a + b for a, b in zip(piece.start, piece.chunk.shape, strict=True)]
        known = entries.setdefault(
            piece.fqn,
            TensorStorageMetadata(TensorProperties(dtype=piece.chunk.dtype), torch.Size(ends), []),
        )
        known.size = torch.Size(map(max, known.size, ends))
        known.chunks.append(chunk)
    metadata = Metadata(entries, {fqn: (fqn,) for fqn in entries}, places, version="1.0.0")
    if change is not None:
        change(metadata)
    (directory / ".metadata").write_bytes(encode(metadata))


def big_endian(tensor: torch.Tensor) -> bytes:
    """Returns the item that a big-endian machine makes of the tensor."""
    swapped = tensor.detach().clone(memory_format=torch.preserve_format)
    swapped.untyped_storage().byteswap(tensor.dtype)
    made = torch.nn.Parameter(swapped) if isinstance(tensor, torch.nn.Parameter) else swapped
    return rezipped(saved(made), {"byteorder": b"big"})


class Region(NamedTuple):
    """A box of a stored chunk, in elements from the chunk's start."""

    index: MetadataIndex
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class ByHand(LoadPlanner):
    """No subclass of the default planner: gives the targets of a list, by the plan's dest index."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        self.targets = targets
        self.committed: list[int] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.targets[int(read_item.dest_index.fqn)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(int(read_item.dest_index.fqn))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError

    set_up_planner = create_local_plan = create_global_plan = finish_plan = load_bytes  # type: ignore[assignment]


def read_regions(reader: Any, regions: Sequence[Region], targets: Sequence[torch.Tensor]) -> ByHand:
    """Reads each region into its target, past DCP's own planning."""
    planner = ByHand(targets)
    items = [
        ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex(str(number)),
            torch.Size([0] * len(region.lengths)),
            region.index,
            torch.Size(region.offsets),
            torch.Size(region.lengths),
        )
        for number, region in enumerate(regions)
    ]
    reader.set_up_storage_reader(reader.read_metadata(), True)
    reader.read_data(LoadPlan(items), planner)
    assert sorted(planner.committed) == list(range(len(items)))
    return planner


def torch_items(reader: DcpxReader) -> int:
    """Returns how many items of the last load went through torch's own loader."""
    assert reader.last_report is not None
    return reader.last_report.torch_items
