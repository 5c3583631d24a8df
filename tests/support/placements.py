"""The placements of the matrix: how one global tensor lies on the ranks.

Each makes this rank's object from the whole tensor, which every rank makes from the same seed. No
communication, but where torch insists on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


class Meshes(NamedTuple):
    """Of all ranks, of all in two dimensions, and of all but the last (or the only one)."""

    line: DeviceMesh
    grid: DeviceMesh
    part: DeviceMesh


def make_meshes() -> Meshes:
    world = dist.get_world_size()
    columns = 2 if world % 2 == 0 else 1
    part = DeviceMesh("cpu", list(range(max(1, world - 1))))
    grid = init_device_mesh("cpu", (world // columns, columns))
    return Meshes(init_device_mesh("cpu", (world,)), grid, part)


def chunk(tensor: torch.Tensor, dim: int, parts: int, part: int) -> torch.Tensor:
    """Returns a shard as DTensor does: torch.chunk, and nothing for ranks it leaves out."""
    size = tensor.size(dim)
    step = max(1, -(-size // parts))
    begin = min(part * step, size)
    return tensor.narrow(dim, begin, min(step, size - begin))


def distribute(full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Any:
    """Returns the DTensor whose shard on this rank is a view of `full`."""
    local, here = full, mesh.get_coordinate()
    # A strided shard is cut after the plain ones that follow it: FSDP over tensor parallelism.
    order = sorted(range(mesh.ndim), key=lambda i: isinstance(placements[i], _StridedShard))
    for i in order:
        placement = placements[i]
        if isinstance(placement, (Shard, _StridedShard)):
            parts, part = mesh.size(i), 0 if here is None else here[i]
            local = chunk(local, placement.dim, parts, part)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def _dtensor(*placements: Placement, mesh: str = "line") -> Callable[..., Any]:
    def place(full: torch.Tensor, meshes: Meshes) -> Any:
        return distribute(full, getattr(meshes, mesh), placements)

    return place


def _strided(full: torch.Tensor, meshes: Meshes) -> Any:
    """FSDP over tensor parallelism; the split factor is the size of the second dimension."""
    if meshes.grid.size(1) == 1:
        return distribute(full, meshes.grid, (Shard(0), Shard(0)))
    return distribute(full, meshes.grid, (_StridedShard(0, split_factor=2), Shard(0)))


def _rows_of_rank(full: torch.Tensor, pieces: int) -> list[tuple[int, torch.Tensor]]:
    """Returns (first row, rows) of this rank's pieces; they are dealt out in turn."""
    world, rank = dist.get_world_size(), dist.get_rank()
    parts = world * pieces
    step = max(1, -(-full.size(0) // parts))
    mine = range(rank, parts, world)
    return [
        (part * step, full[part * step : (part + 1) * step])
        for part in mine
        if part == 0 or part * step < full.size(0)
    ]


def _sharded_tensor(full: torch.Tensor, _: Meshes, pieces: int = 1) -> Any:
    rank = dist.get_rank()
    shards = [
        sharded_tensor.Shard(
            rows.contiguous(),
            ShardMetadata(
                shard_offsets=[first] + [0] * (full.dim() - 1),
                shard_sizes=list(rows.shape),
                placement=f"rank:{rank}/cpu",
            ),
        )
        for first, rows in _rows_of_rank(full, pieces)
    ]
    return sharded_tensor.init_from_local_shards(shards, *full.shape)


class Hooked(torch.Tensor):
    """A tensor with DCP's hooks: rows of a global tensor, in several chunks."""

    global_size: torch.Size
    first_rows: list[int]
    chunk_rows: list[torch.Tensor]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        zeros = [0] * (len(self.global_size) - 1)
        return [
            ChunkStorageMetadata(torch.Size([first, *zeros]), rows.shape)
            for first, rows in zip(self.first_rows, self.chunk_rows, strict=True)
        ]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(torch.empty(0, dtype=self.dtype))
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.global_size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.chunk_rows[self.first_rows.index(index.offset[0])]


def _hooked(full: torch.Tensor, _: Meshes) -> Any:
    pieces = _rows_of_rank(full, 3)
    made: Any = torch.empty(full.shape, dtype=full.dtype).as_subclass(Hooked)
    made.global_size = full.shape
    made.first_rows = [first for first, _ in pieces]
    made.chunk_rows = [rows for _, rows in pieces]
    return made


def _checkpointable(full: torch.Tensor, _: Meshes) -> Any:
    """torch 2.14's CheckpointableTensor: a plain tensor whose attributes say what it is part of."""
    pieces = _rows_of_rank(full, 2)
    tail = tuple(full.shape[1:])
    zeros = (0,) * len(tail)
    # The rows lie in one buffer behind padding of one row.
    rows = sum(piece.size(0) for _, piece in pieces)
    made: Any = torch.zeros((rows + 1, *tail), dtype=full.dtype)
    at, local_offsets = 1, []
    for _, piece in pieces:
        made[at : at + piece.size(0)] = piece
        local_offsets.append((at, *zeros))
        at += piece.size(0)
    made.global_shape = tuple(full.shape)
    made.global_offsets = tuple((first, *zeros) for first, _ in pieces)
    made.local_offsets = tuple(local_offsets)
    made.local_sizes = tuple(tuple(piece.shape) for _, piece in pieces)
    return made


PLACEMENTS: dict[str, Callable[[torch.Tensor, Meshes], Any]] = {
    "Shard(0)": _dtensor(Shard(0)),
    "Shard(1)": _dtensor(Shard(1)),
    "Replicate": _dtensor(Replicate()),
    "Shard(0), some ranks": _dtensor(Shard(0), mesh="part"),
    "Shard(0), Shard(1)": _dtensor(Shard(0), Shard(1), mesh="grid"),
    "Shard(0), Shard(0)": _dtensor(Shard(0), Shard(0), mesh="grid"),
    "Replicate, Shard(0)": _dtensor(Replicate(), Shard(0), mesh="grid"),
    "_StridedShard(0), Shard(0)": _strided,
    "Partial": _dtensor(Partial()),
    "ShardedTensor": _sharded_tensor,
    "ShardedTensor, 2 shards": lambda full, meshes: _sharded_tensor(full, meshes, 2),
    "hooks, 3 chunks": _hooked,
}
if hasattr(torch.distributed.checkpoint, "CheckpointableTensor"):
    PLACEMENTS["CheckpointableTensor"] = _checkpointable

# Where a load asks for other regions than were saved: rows of columns, grids of rows.
OTHER_WAY = {
    "Shard(0)": "Shard(1)",
    "Shard(1)": "Shard(0)",
    "Replicate": "Shard(0)",
    "Shard(0), Shard(1)": "Shard(1)",
    "Replicate, Shard(0)": "Shard(0), Shard(1)",
    "_StridedShard(0), Shard(0)": "Shard(0), Shard(1)",
    "hooks, 3 chunks": "Shard(1)",
    "CheckpointableTensor": "Shard(0), Shard(1)",
    "ShardedTensor": "Shard(0)",
}
ROWS = {"Shard(0)", "Replicate", "Shard(0), some ranks", "Replicate, Shard(0)"}
TWO_DIMS = {"Shard(1)", "Shard(0), Shard(1)"}


def fits(placement: str, tensor: torch.Tensor) -> bool:
    """Returns whether the placement means something for the tensor."""
    if placement == "Partial":  # one odd case: DTensor refuses
        return False
    if placement == "Replicate":
        return True
    if tensor.dim() == 0:
        return False
    if placement in TWO_DIMS:
        return tensor.dim() > 1
    if placement in ROWS:
        return True
    if placement == "_StridedShard(0), Shard(0)":
        return tensor.size(0) % 8 == 0  # torch's own arithmetic for others is not that of chunks
    # The rest takes what an optimizer holds: memory of its own, elements that add up.
    return tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_inference()
