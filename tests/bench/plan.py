"""Times planning for many ranks in one process: no group, no file, ours beside stock's in one run.

    python tests/bench/plan.py --ranks 64 256 1024 --tensors 1000

Cases: `tall` and `wide` are FSDP shards by rows, of tensors that are longer in the sharded and in
the other dimension; `moe` are experts of 64 KiB, each on one rank, 100 times as many; `hsdp` are
shards that four ranks hold. Steps: `save` is the coordinator's, from the plans of all ranks to
plans and metadata; `load` one rank's plan from the metadata. A side that would take longer than
`--limit-s`, by its growth so far, is left out. `B an item` are those of the pickle of a rank's
plan.
"""

from __future__ import annotations

import argparse
import gc
import math
import pickle
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torch_dcpx import DcpxLoadPlanner, DcpxSavePlanner

REPLICAS = 4


class Chunk(NamedTuple):
    """A box of tensor `number`, in elements."""

    number: int
    offsets: torch.Size
    sizes: torch.Size


def size_of(case: str, ranks: int) -> torch.Size:
    """Returns the sizes of a tensor of the case."""
    shards = ranks // REPLICAS if case == "hsdp" else ranks
    return torch.Size({"tall": (2 * shards, 8), "wide": (2 * shards, 8 * ranks)}.get(
        case, (16 * shards, 256) if case == "hsdp" else (128, 128)
    ))  # fmt: skip


def chunks_of(case: str, rank: int, ranks: int, tensors: int) -> list[Chunk]:
    """Returns what a rank holds."""
    size = size_of(case, ranks)
    if case == "moe":
        whole = torch.Size((0, 0))
        return [Chunk(number, whole, size) for number in range(rank, tensors, ranks)]
    shards = ranks // REPLICAS if case == "hsdp" else ranks
    rows = size[0] // shards
    offsets = torch.Size((rows * (rank % shards), 0))
    return [Chunk(number, offsets, torch.Size((rows, size[1]))) for number in range(tensors)]


def plans_of(case: str, ranks: int, tensors: int) -> list[SavePlan]:
    """Returns the local plans of all ranks, as they come out of their pickles."""
    size = size_of(case, ranks)
    names = [f"model.layers.{number}.mlp.weight" for number in range(tensors)]
    plans = []
    for rank in range(ranks):
        items = [
            WriteItem(
                MetadataIndex(names[chunk.number], chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(chunk.offsets, chunk.sizes),
                    TensorProperties(torch.float32),
                    size,
                ),
            )
            for chunk in chunks_of(case, rank, ranks, tensors)
        ]
        paths = {item.index.fqn: (item.index.fqn,) for item in items}
        plans.append(SavePlan(items, planner_data=paths))
    return plans


class Timing(NamedTuple):
    seconds: float
    rss_bytes: int  # more at the end than before; of the process's peak


def timed(step: Callable[[], Any]) -> tuple[Timing, Any]:
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    result = step()
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Timing(seconds, (after - before) * 1024), result


class Side:
    """One planner, and how its time has grown so far."""

    def __init__(self, name: str, limit_s: float) -> None:
        self.name = name
        self.limit_s = limit_s
        self.points: list[tuple[int, float]] = []  # items, seconds

    def exponent(self) -> float:
        """Returns the slope of the time over the items, both in logarithms."""
        if len(self.points) < 2:
            return math.nan
        (a, s), (b, t) = self.points[0], self.points[-1]
        return math.log(t / s) / math.log(b / a) if a != b else math.nan

    def may_run(self, items: int) -> bool:
        """Returns whether `items` are likely to be done in time."""
        if not self.points:
            return True
        last, seconds = self.points[-1]
        growth = self.exponent()
        return seconds * (items / last) ** (growth if growth > 0 else 2) <= self.limit_s

    def run(self, items: int, step: Callable[[], Any]) -> tuple[Timing | None, Any]:
        if not self.may_run(items):
            return None, None
        timing, result = timed(step)
        self.points.append((items, timing.seconds))
        return timing, result


def balance_of(plans: list[SavePlan]) -> float:
    """Returns the most bytes of a rank over the mean."""
    loads = [
        sum(item.tensor_data.chunk.sizes.numel() for item in plan.items if item.tensor_data)
        for plan in plans
    ]
    return max(loads) * len(loads) / sum(loads)


def metadata_of(case: str, ranks: int, tensors: int) -> Metadata:
    """Returns the metadata of a save of the case."""
    size = size_of(case, ranks)
    entries: dict[str, Any] = {}
    for rank in range(ranks // REPLICAS if case == "hsdp" else ranks):
        for chunk in chunks_of(case, rank, ranks, tensors):
            name = f"model.layers.{chunk.number}.mlp.weight"
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
        f"model.layers.{number}.mlp.weight": Wanted(
            Chunk(number, torch.Size((rows, 0)), torch.Size((rows, size[1]))) if rows else chunk,
            size,
        )
        for chunk in wanted
        for number in (chunk.number,)
    }
    return planner


def row(case: str, step: str, ranks: int, items: int, ours: Any, stock: Any, more: str) -> None:
    def told(timing: Timing | None) -> str:
        if timing is None:
            return f"{'-':>9} {'-':>8}"
        return f"{timing.seconds:8.3f}s {timing.rss_bytes / 2**20:5.0f}MiB"

    ratio = f"{stock.seconds / ours.seconds:6.1f}x" if stock and ours else f"{'-':>7}"
    print(
        f"{case:5} {step:5} {ranks:6} ranks {items:8} items  ours {told(ours)}  stock "
        f"{told(stock)} {ratio}  {more}",
        flush=True,
    )


def run_saves(case: str, ranks: int, tensors: int, sides: tuple[Side, Side]) -> None:
    plans = plans_of(case, ranks, tensors)
    items = sum(len(plan.items) for plan in plans)
    timings = []
    more = f"{len(pickle.dumps(plans[0])) / max(1, len(plans[0].items)):.0f} B an item"
    for side, kind in zip(sides, (DcpxSavePlanner, DefaultSavePlanner), strict=True):
        timing, planned = side.run(items, partial(kind().create_global_plan, plans))
        timings.append(timing)
        if planned is not None:
            more += f", {side.name} max/mean {balance_of(planned[0]):.3f}"
        del planned
    row(case, "save", ranks, items, *timings, more)


def run_loads(case: str, ranks: int, tensors: int, sides: tuple[Side, Side]) -> None:
    metadata = metadata_of(case, ranks, tensors)
    chunks = sum(len(entry.chunks) for entry in metadata.state_dict_metadata.values())
    timings, plans = [], []
    for side, kind in zip(sides, (DcpxLoadPlanner, DefaultLoadPlanner), strict=True):
        planner = load_planner(kind, case, ranks, tensors, metadata)
        timing, plan = side.run(chunks, planner.create_local_plan)
        timings.append(timing)
        plans.append(plan)
    if None not in plans and plans[0].items != plans[1].items:
        raise SystemExit(f"{case}: the two load plans differ")
    items = len(plans[0].items) if plans[0] is not None else "-"
    row(case, "load", ranks, chunks, *timings, f"{items} read items")


def run_case(case: str, ranks: list[int], tensors: int, limit_s: float) -> None:
    steps = {"save": run_saves, "load": run_loads}
    for step, run in steps.items():
        sides = (Side("ours", limit_s), Side("stock", limit_s))
        for count in ranks:
            run(case, count, tensors, sides)
        told = ", ".join(f"{side.name} {side.exponent():.2f}" for side in sides)
        print(f"{case:5} {step:5} growth exponent in items: {told}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--cases", nargs="+", default=["tall", "wide", "moe", "hsdp"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--limit-s", type=float, default=60.0, help="a side's, a step")
    given = parser.parse_args(argv)
    gc.freeze()  # what is there already is not walked before each step
    try:
        for case in given.cases:
            tensors = 100 * given.tensors if case == "moe" else given.tensors
            run_case(case, given.ranks, tensors, given.limit_s)
    finally:
        gc.unfreeze()


if __name__ == "__main__":
    main()
