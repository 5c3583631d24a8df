"""Times the first asynchronous saves of fresh processes, beside stock's.

    python tests/bench/async_first.py --rounds 12
    python tests/bench/async_first.py --size smoke --before ../built-before

Each round runs each side in a process of its own (with --ranks 2: two), in an order of its own.
`first` and `second` are the seconds of those calls, `system` the CPU seconds of the first one in
the system, which a busy machine stretches less; of the slowest rank. A round before them, which
compiles the modules, is not counted. Sides: `ours`, `prewarmed` (`torch_dcpx.prewarm` before; its
own seconds are `prewarm`), `stock` (`dcp.async_save` in a thread) and `before` (another build of
the package, in the folder of --before).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from driver import ROOT, run_worker

MIB = 1 << 20
SIDES = ("ours", "prewarmed", "stock", "before")
COLUMNS = ("first", "second", "prewarm", "system")
SIZES = {"full": {1: (12, 64 * MIB), 2: (10, 40 * MIB)}, "smoke": {1: (2, MIB), 2: (2, MIB)}}


def system_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime


def work(*, side: str, items: int, item_bytes: int, folder: Path) -> dict[str, float]:
    """Saves twice in this process; returns its seconds by column."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import torch_dcpx

    if not dist.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    names = [f"rank{dist.get_rank()}.{i}" for i in range(items)]
    state = {n: torch.randint(0, 255, (item_bytes,), dtype=torch.uint8) for n in names}
    found: dict[str, float] = {}

    def timed(column: str, call: Callable[[], Any]) -> Any:
        dist.barrier()
        system, began = system_seconds(), time.perf_counter()
        result = call()
        found[column] = time.perf_counter() - began
        if column == "first":
            found["system"] = system_seconds() - system
        return result

    if side == "prewarmed":
        timed("prewarm", lambda: torch_dcpx.prewarm({"model": state}))
    for column in ("first", "second"):
        path = folder / column

        def save(path: Path = path) -> Any:
            if side == "stock":
                return dcp.async_save({"model": state}, checkpoint_id=path)
            return torch_dcpx.async_save({"model": state}, path)

        timed(column, save).result()
        dist.barrier()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {column: max(one[column] for one in everyone) for column in found}


def table(rounds: Sequence[dict[str, dict[str, float]]], sides: Sequence[str]) -> list[str]:
    """Returns the lines of a table: medians and quartiles; ratios within each round."""
    lines = [
        "| side | first, s | of stock's | second, s | prewarm, s | system, s |",
        "| --- " * 6 + "|",
    ]

    def shown(values: Sequence[float]) -> str:
        if len(values) < 2:
            return f"{values[0]:.3g}"
        lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
        return f"{middle:.3g} ({lower:.3g}-{upper:.3g})"

    for side in sides:
        cells = {c: shown([r[side][c] for r in rounds]) for c in COLUMNS if c in rounds[0][side]}
        ratios = [r[side]["first"] / r["stock"]["first"] for r in rounds if "stock" in r]
        cells["ratio"] = shown(ratios) if ratios else ""
        order = ("first", "ratio", "second", "prewarm", "system")
        lines.append(f"| {side} | {' | '.join(cells.get(c, '') for c in order)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sides", nargs="+", choices=SIDES[:3], default=list(SIDES[:3]))
    parser.add_argument("--before", type=Path, help="folder with another build of torch_dcpx")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    args = parser.parse_args(arguments)

    items, item_bytes = SIZES[args.size][args.ranks]
    args.folder.mkdir(parents=True, exist_ok=True)
    sides = [*args.sides, *(["before"] if args.before else [])]
    order, rounds = random.Random(0), []
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="first-") as scratch:
        for number in range(args.rounds + 1):
            taken: dict[str, dict[str, float]] = {}
            for side in order.sample(sides, len(sides)):
                root = args.before.resolve() if side == "before" else ROOT
                folder = Path(tempfile.mkdtemp(dir=scratch))
                taken[side] = run_worker(
                    "async_first:work",
                    folder,
                    args.ranks,
                    # As an installed package, whose modules are compiled already.
                    environment={
                        "PYTHONPATH": str(root),
                        "PYTHONPYCACHEPREFIX": f"{scratch}/compiled",
                        "PYTHONDONTWRITEBYTECODE": "",
                    },
                    side=side,
                    items=items,
                    item_bytes=item_bytes,
                )
                shutil.rmtree(folder)
                os.sync()
            if number > 0:  # the first one compiled
                rounds.append(taken)
            shown = ", ".join(f"{side} {taken[side]['first']:.3f}" for side in sides)
            print(f"round {number} of {args.rounds}: {shown} s", file=sys.stderr, flush=True)
    print("\n".join(table(rounds, sides)))
    if args.json is not None:
        args.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
