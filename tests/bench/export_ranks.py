"""One rank of export.py: times the sides of a case, and writes what it found as JSON."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cases import EXPORT_CASES, EXPORT_SIDES
from export_sides import ExportSides
from harness import barrier, run_rounds, slowest
from meters import extra_peak_bytes
from support.worker import leave_well


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the times of the sides, and what each took of memory on the rank that took most."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    case = EXPORT_CASES[args.case]
    made = ExportSides(case, args.size, rank, ranks, args.folder)
    sides = [made.side(name) for name in EXPORT_SIDES if not args.sides or name in args.sides]

    def log(line: str) -> None:
        if rank == 0:
            print(f"{case.name}, {ranks} rank(s): {line}", file=sys.stderr, flush=True)

    rounds = args.rounds or case.rounds_at(args.size, ranks)
    quiet_s = 0.05 if args.size == "full" else 0.01
    times = run_rounds(sides, rounds, args.folder, log, quiet_s=quiet_s)
    if {"load", "save"} <= times.keys():
        pairs = zip(times["load"], times["save"], strict=True)
        times["load_and_save"] = [load + save for load, save in pairs]
    found: dict[str, Any] = {"bytes": made.nbytes, "items": case.size(args.size).items}
    found["times"] = times
    if not args.no_meters:
        found["meters"] = {}
        for side in sides:
            path = args.folder / f"{side.name}-metered"
            barrier()
            own = extra_peak_bytes(lambda: side.run(path) and None)  # noqa: B023 - called at once
            peak = slowest({"extra_peak_bytes": own})  # of the rank that took most
            found["meters"][side.name] = {name: int(value) for name, value in peak.items()}
            barrier()
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, choices=EXPORT_CASES)
    parser.add_argument("--sides", nargs="*", default=[])
    parser.add_argument("--size", default="full")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--no-meters", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    has_ranks = "WORLD_SIZE" in os.environ
    if has_ranks:
        dist.init_process_group("gloo")
    found = measure(args)
    if not has_ranks or dist.get_rank() == 0:
        args.result.write_text(json.dumps(found))
    if has_ranks:
        leave_well()


if __name__ == "__main__":
    main()
