"""Times what ranks send each other while they plan: columns beside the pickles of stock's objects.

    python tests/bench/wire.py --ranks 64 --tensors 1000

Messages of an FSDP save and load: `plan` goes to the coordinator, `answer` comes back, `results`
go to the coordinator, `load` goes both ways. `stock planner` is the plan of torch's own planner
through our writer. One message is packed; those of all ranks are unpacked and kept, as the
coordinator does. Sides take turns; figures are medians of the rounds, in us an item.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from torch_dcpx.planners.kept_load_plan import KeptPlan
from torch_dcpx.ranks.plan_wire import RankPlan, WirePlan
from torch_dcpx.writer.commit import WriteResults

RANKS = 1024  # of the job, of which some are looked at
LAYER = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
    "input_layernorm": (4096, 1),
}


def names_of(tensors: int) -> list[tuple[str, torch.Size]]:
    """Returns names within the model and sizes, as of a model of this family."""
    parts = list(LAYER.items())
    return [
        (f"layers.{number // len(parts)}.{name}.weight", torch.Size(size))
        for number in range(tensors)
        for name, size in (parts[number % len(parts)],)
    ]


def items_of(rank: int, tensors: int, hint: int | None) -> list[WriteItem]:
    """Returns a rank's items, each of objects of its own, as a local plan has them."""
    items = []
    for name, size in names_of(tensors):
        rows = size[0] // RANKS
        chunk = ChunkStorageMetadata(torch.Size((rows * rank, 0)), torch.Size((rows, size[1])))
        data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size(size))
        index = MetadataIndex(f"model.{name}", chunk.offsets, hint)
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return items


def save_plan(kind: Any, rank: int, tensors: int, is_answer: bool) -> Any:
    items = items_of(rank, tensors, rank if is_answer else None)
    paths = {f"model.{name}": ("model", name) for name, _ in names_of(tensors)}
    prefix = _StoragePrefix(f"__{rank}_") if is_answer else None
    if kind is not RankPlan:
        return kind(items, prefix, paths)
    sent = paths if is_answer else None
    return RankPlan(items, prefix, paths, is_shared=True, has_paths=True, sent_paths=sent)


def results_of(kind: Any, rank: int, tensors: int) -> Any:
    written = []
    at = 4096
    for item in items_of(rank, tensors, rank):
        nbytes = item.tensor_data.chunk.sizes.numel() * 4 + 1_300 if item.tensor_data else 0
        info = _StorageInfo(f"__{rank}_0.distcp", at, nbytes)
        written.append(WriteResult(item.index, nbytes, info))
        at += nbytes
    return kind(written)


def load_plan(kind: Any, rank: int, tensors: int) -> Any:
    items = []
    for item in items_of(rank, tensors, rank):
        index, zeros = item.index, torch.Size((0, 0))
        sizes = item.tensor_data.chunk.sizes if item.tensor_data else zeros
        items.append(ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, sizes))
    return kind(items)


Make = Callable[[int, int], Any]  # of a rank and its tensors
CASES: dict[str, tuple[Make, Make]] = {
    "plan": (
        lambda rank, tensors: save_plan(RankPlan, rank, tensors, False),
        lambda rank, tensors: save_plan(SavePlan, rank, tensors, False),
    ),
    "answer": (
        lambda rank, tensors: save_plan(RankPlan, rank, tensors, True),
        lambda rank, tensors: save_plan(SavePlan, rank, tensors, True),
    ),
    "stock planner": (
        lambda rank, tensors: save_plan(WirePlan, rank, tensors, True),
        lambda rank, tensors: save_plan(SavePlan, rank, tensors, True),
    ),
    "results": (
        lambda rank, tensors: results_of(WriteResults, rank, tensors),
        lambda rank, tensors: results_of(list, rank, tensors),
    ),
    "load": (
        lambda rank, tensors: load_plan(KeptPlan, rank, tensors),
        lambda rank, tensors: load_plan(LoadPlan, rank, tensors),
    ),
}


class Cost(NamedTuple):
    pack_us: float  # an item
    unpack_us: float
    nbytes: float


def cost_of(make: Make, ranks: int, tensors: int) -> Cost:
    """Returns what the messages of one round cost an item."""
    messages = []
    pack_s = 0.0
    for rank in range(ranks):
        value = make(rank, tensors)
        began = time.perf_counter()
        messages.append(pickle.dumps(value))
        pack_s += time.perf_counter() - began
    del value
    gc.collect()
    began = time.perf_counter()
    kept = [pickle.loads(message) for message in messages]
    unpack_s = time.perf_counter() - began
    items = len(kept) * tensors
    return Cost(pack_s / items * 1e6, unpack_s / items * 1e6, sum(map(len, messages)) / items)


def row(case: str, ours: list[Cost], stock: list[Cost]) -> None:
    def told(costs: list[Cost]) -> str:
        pack, unpack, nbytes = (statistics.median(column) for column in zip(*costs, strict=True))
        return f"pack {pack:6.2f} us  unpack {unpack:6.2f} us  {nbytes:6.1f} B"

    ratios = [
        statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
        for mine, theirs in zip(zip(*ours, strict=True), zip(*stock, strict=True), strict=True)
    ]
    print(
        f"{case:14} ours {told(ours)}   stock {told(stock)}   x {ratios[0]:.1f} {ratios[1]:.1f} "
        f"{ratios[2]:.1f}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ranks", type=int, default=32, help="whose messages are unpacked")
    parser.add_argument("--tensors", type=int, default=1000, help="of each rank")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(argv)
    for case in given.cases:
        costs: tuple[list[Cost], list[Cost]] = ([], [])
        for number in range(given.rounds):
            for side in (0, 1) if number % 2 else (1, 0):
                costs[side].append(cost_of(CASES[case][side], given.ranks, given.tensors))
        row(case, *costs)


if __name__ == "__main__":
    main()
