"""One rank of save.py: times the sides of some cases, and writes what it found as JSON."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from case_states import make_state, payload_bytes
from cases import CASES, Case
from harness import Side, run_rounds
from save_setup import sides_of
from save_sides import WRITERS, RawSide, dcp_side, dcpx_side, safetensors_side
from support.worker import leave_well


def measure(
    case: Case, size: str, folder: Path, only: Sequence[str] = (), rounds: int | None = None
) -> dict[str, Any]:
    """Returns the times of a case's sides, or of those in `only`, with what they wrote."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    state = make_state(case, size, rank, ranks)
    sides: list[Side] = []
    raw: RawSide | None = None
    for name in sides_of(case):
        if only and name not in only:
            continue
        if name in WRITERS:
            side = dcp_side(name, state)
        elif name == "dcpx":
            side = dcpx_side(state)
        elif name == "safetensors":
            side = safetensors_side(state)
        else:
            raw = RawSide(state, folder)
            side = raw.side()
        fewer = case.rounds_of.get(name) if size == "full" else None
        sides.append(side._replace(rounds=fewer))

    def log(line: str) -> None:
        if rank == 0:
            print(f"{case.name}, {ranks} rank(s): {line}", file=sys.stderr, flush=True)

    counted = rounds or case.rounds_at(size, ranks)
    quiet_s = 0.05 if size == "full" else 0.01
    times = run_rounds(sides, counted, folder, log, quiet_s=quiet_s)
    nbytes = payload_bytes(state) * ranks
    found: dict[str, Any] = {"bytes": nbytes, "items": case.size(size).items, "times": times}
    if raw is not None:
        found["raw"] = {"config": str(raw.config), "is_direct": raw.is_direct}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", required=True, choices=CASES)
    parser.add_argument("--sides", nargs="*", default=[])
    parser.add_argument("--size", default="full")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # DCP's, on every save
    torch.set_num_threads(1)
    if args.size != "full":
        gc.freeze()  # torch's objects make a collection take longer than a small save
    has_ranks = "WORLD_SIZE" in os.environ
    if has_ranks:
        dist.init_process_group("gloo")
    results = {
        name: measure(CASES[name], args.size, args.folder, args.sides, args.rounds)
        for name in args.cases
    }
    if not has_ranks or dist.get_rank() == 0:
        args.result.write_text(json.dumps(results))
    if has_ranks:
        leave_well()


if __name__ == "__main__":
    main()
