"""Random tensors on random ranks: how they lie when they are saved, and when they are loaded."""

from __future__ import annotations

from typing import Any, NamedTuple

import hypothesis.strategies as st
import torch
from support.chunked import Box, Chunked
from support.placements import distribute
from support.plan_states import mesh_of
from support.states import DTYPES, random_bytes
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, TensorProperties
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

CANARY = 0x5A


class Layout(NamedTuple):
    """How a tensor lies on ranks."""

    kind: str  # "dtensor", "hooks" or "sharded tensor"
    mesh: tuple[int, ...]  # sizes of its dimensions
    placements: tuple[Placement, ...]  # one a dimension of the mesh
    cuts: tuple[int, ...]  # of a flat buffer: where the part of each rank begins, and the end


class Case(NamedTuple):
    """A tensor, as it is saved and as it is loaded."""

    whole: torch.Tensor
    saved: Layout
    loaded: Layout


class Rows(Chunked):
    """Rows of a tensor, or none, found by where they begin: a planner renumbers the chunks."""

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.parts[[box.offsets for box in self.boxes].index(tuple(index.offset or ()))]


def local_parts(value: Any) -> list[torch.Tensor]:
    if isinstance(value, DTensor):
        return [value._local_tensor]
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return list(getattr(value, "parts", [value]))


def place(whole: torch.Tensor, layout: Layout, rank: int) -> Any:
    """Returns what this rank holds of a tensor, in memory of its own."""
    if layout.kind == "dtensor":
        mesh = mesh_of(layout.mesh)
        view = distribute(whole, mesh, layout.placements)
        return DTensor.from_local(
            view.to_local().clone(memory_format=torch.contiguous_format),
            mesh,
            layout.placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    begin, end = layout.cuts[rank], layout.cuts[rank + 1]
    tail, zeros = tuple(whole.shape[1:]), (0,) * (whole.dim() - 1)
    own = whole[begin:end].clone()
    if layout.kind == "hooks":
        made = torch.empty(0, dtype=whole.dtype).as_subclass(Rows)
        made.whole_size = whole.shape
        made.boxes = [Box((begin, *zeros), (end - begin, *tail))] if begin < end else []
        made.parts = [own] if begin < end else []
        return made
    shards = [
        ShardMetadata([a, *zeros], [b - a, *tail], f"rank:{owner}/cpu")
        for owner, (a, b) in enumerate(zip(layout.cuts, layout.cuts[1:], strict=False))
        if a < b
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [
            LocalShard(own, shard)
            for shard in shards
            if (shard.shard_offsets[0], begin < end) == (begin, True)
        ],
        ShardedTensorMetadata(shards, whole.shape, TensorProperties(dtype=whole.dtype)),
        sharding_spec=EnumerableShardingSpec(shards),
    )


def fill_with_canaries(value: Any) -> None:
    for part in local_parts(value):
        if part.numel():
            byte = 1 if part.dtype == torch.bool else CANARY
            torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage()).fill_(byte)


@st.composite
def layouts(draw: st.DrawFn, sizes: tuple[int, ...], ranks: int) -> Layout:
    """A DTensor on a mesh of one or two dimensions, or what flat parameters are cut into."""
    if sizes and sizes[0] >= ranks and draw(st.integers(0, 2)) == 0:
        kind = draw(st.sampled_from(["hooks", "sharded tensor"]))
        # Some ranks may have nothing; ShardedTensor wants a part on each.
        is_each = kind == "sharded tensor"
        inner = st.integers(int(is_each), max(int(is_each), sizes[0] - int(is_each)))
        count = ranks - 1
        cuts = draw(st.lists(inner, min_size=count, max_size=count, unique=is_each))
        return Layout(kind, (), (), (0, *sorted(cuts), sizes[0]))
    meshes = [(ranks,)] + [(n, ranks // n) for n in range(1, ranks + 1) if ranks % n == 0]
    mesh = draw(st.sampled_from(meshes))
    dims = st.integers(0, len(sizes) - 1)
    if len(mesh) == 2 and mesh[1] > 1 and sizes and draw(st.integers(0, 2)) == 0:
        # FSDP over tensor parallelism. Torch finds the shards of all sizes that the inner
        # dimension divides.
        dim = draw(dims)
        if sizes[dim] % mesh[1] == 0:
            strided = _StridedShard(dim, split_factor=mesh[1])
            return Layout("dtensor", mesh, (strided, Shard(dim)), ())
    shards = st.one_of(st.just(Replicate()), st.builds(Shard, dims)) if sizes else st.just(
        Replicate()
    )  # fmt: skip
    placements = draw(st.lists(shards, min_size=len(mesh), max_size=len(mesh)))
    return Layout("dtensor", mesh, tuple(placements), ())


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, list[Case]]:
    """(ranks that save, ranks that load, tensors)."""
    saving, loading = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    cases = []
    for _ in range(draw(st.integers(1, 3))):
        ndim = draw(st.sampled_from([0, 1, 1, 2, 2, 3]))
        sizes = tuple(draw(st.integers(0, 13)) for _ in range(ndim))
        if ndim == 1 and draw(st.booleans()):
            # A flat parameter, cut at odd offsets; above 64 KiB replicas are cut by rows.
            sizes = (draw(st.integers(1, 3000) | st.integers(20_000, 40_000)),)
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
        whole = random_bytes(sizes, draw(st.sampled_from(DTYPES)), generator)
        cases.append(Case(whole, draw(layouts(sizes, saving)), draw(layouts(sizes, loading))))
    return saving, loading, cases
