"""Times planning for many ranks in one process: no group, no file, ours beside stock's in one run.

    python tests/bench/plan.py --ranks 64 256 1024 --tensors 1000

Cases: `tall` and `wide` are FSDP shards by rows, of tensors that are longer in the sharded and in
the other dimension; `moe` are experts of 64 KiB, each on one rank, 100 times as many; `hsdp` are
shards that four ranks hold. Steps: `save` is the coordinator's, from the plans of all ranks to
plans and metadata; `load` one rank's plan from the metadata. Each runs in a process of its own: `+`
is the most memory that it takes beside its input, `peak` that of the process. A side that would
take longer than `--limit-s`, by its growth so far, is left out. `wire` are the bytes an item of the
pickles of the first rank: its plan to the coordinator, the final one back, its results.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from plan_cases import CASES, load_planner, metadata_of, plans_of, results_of, shards_of
from plan_meter import MIB, Side, Timing, timed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from torch_dcpx import DcpxLoadPlanner, DcpxSavePlanner
from torch_dcpx._gc import paused_gc


def balance_of(plans: list[SavePlan]) -> float:
    """Returns the most bytes of a rank over the mean."""
    loads = [
        sum(item.tensor_data.chunk.sizes.numel() for item in plan.items if item.tensor_data)
        for plan in plans
    ]
    return max(loads) * len(loads) / sum(loads)


def wire_of(value: Any, items: int) -> float:
    """Returns the bytes an item of a pickle."""
    return len(pickle.dumps(value)) / max(1, items)


def save(kind: Any, case: str, ranks: int, tensors: int) -> tuple[Timing, Any]:
    """Returns what a global plan took, and (items, balance, bytes an item of each phase)."""
    with paused_gc():
        plans = plans_of(kind, case, ranks, tensors)
    items = sum(len(plan.items) for plan in plans)
    up = wire_of(plans[0], len(plans[0].items))
    timing, (final, _) = timed(partial(kind().create_global_plan, plans))
    count = len(final[0].items)
    wire = (up, wire_of(final[0], count), wire_of(results_of(final[0]), count))
    return timing, (items, balance_of(final), wire)


def load(kind: Any, case: str, ranks: int, tensors: int) -> tuple[Timing, Any]:
    """Returns what a rank's plan took, and (stored chunks, the plan)."""
    with paused_gc():
        metadata = metadata_of(case, ranks, tensors)
    chunks = sum(len(entry.chunks) for entry in metadata.state_dict_metadata.values())
    planner = load_planner(kind, case, ranks, tensors, metadata)
    timing, plan = timed(planner.create_local_plan)
    return timing, (chunks, plan.items)


def items_of(case: str, step: str, ranks: int, tensors: int) -> int:
    """Returns how many items, or stored chunks, a step is about."""
    if case == "moe":
        return tensors
    return tensors * (shards_of(case, ranks) if step == "load" else ranks)


def row(case: str, step: str, ranks: int, items: int, ours: Any, stock: Any, more: str) -> None:
    def told(timing: Timing | None) -> str:
        if timing is None:
            return f"{'-':>9}{'-':>9}{'-':>14}"
        more_mib, peak_mib = timing.more_bytes / MIB, timing.peak_bytes / MIB
        return f"{timing.seconds:8.3f}s +{more_mib:5.0f}M {peak_mib:6.0f}M peak"

    ratio = f"{stock.seconds / ours.seconds:6.1f}x" if stock and ours else f"{'-':>7}"
    print(
        f"{case:5} {step:5} {ranks:5} ranks {items:8} items  ours {told(ours)}  stock "
        f"{told(stock)} {ratio}  {more}",
        flush=True,
    )


def told_saves(found: list[Any], sides: tuple[Side, Side]) -> str:
    texts = []
    for side, result in zip(sides, found, strict=True):
        if result is not None:
            _, balance, wire = result
            phases = "/".join(f"{nbytes:.0f}" for nbytes in wire)
            texts.append(f"{side.name} max/mean {balance:.3f} wire {phases} B")
    return ", ".join(texts)


def told_loads(found: list[Any], sides: tuple[Side, Side]) -> str:
    if None not in found and found[0] != found[1]:
        raise SystemExit("the two load plans differ")
    return f"{len(found[0][1])} read items" if found[0] is not None else ""


STEPS: dict[str, tuple[Callable[..., Any], tuple[Any, Any], Callable[..., str]]] = {
    "save": (save, (DcpxSavePlanner, DefaultSavePlanner), told_saves),
    "load": (load, (DcpxLoadPlanner, DefaultLoadPlanner), told_loads),
}


def run_case(
    case: str, step: str, ranks: list[int], tensors: int, limit_s: float, only: str
) -> None:
    measure, kinds, tell = STEPS[step]
    sides = (Side("ours", limit_s), Side("stock", limit_s if only != "ours" else -1.0))
    for count in ranks:
        items = items_of(case, step, count, tensors)
        timings, found = [], []
        for side, kind in zip(sides, kinds, strict=True):
            if side.limit_s < 0:
                timing, result = None, None
            else:
                timing, result = side.run(items, partial(measure, kind, case, count, tensors))
            timings.append(timing)
            found.append(result)
        row(case, step, count, items, *timings, tell(found, sides))
    told = ", ".join(
        f"{side.name} time {side.exponent():.2f} memory {side.exponent('more_bytes'):.2f}"
        for side in sides
    )
    print(f"{case:5} {step:5} growth exponents in items: {told}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--limit-s", type=float, default=60.0, help="a side's, a step")
    parser.add_argument("--only", choices=["ours", "both"], default="both")
    given = parser.parse_args(argv)
    for case in given.cases:
        tensors = 100 * given.tensors if case == "moe" else given.tensors
        for step in given.steps:
            run_case(case, step, given.ranks, tensors, given.limit_s, given.only)


if __name__ == "__main__":
    main()
