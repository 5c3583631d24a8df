"""One rank of export.py: times the sides of a case."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from cases import EXPORT_CASES, EXPORT_SIDES
from export_sides import ExportSides
from harness import barrier, run_case, slowest
from meters import extra_peak_bytes


def measure(
    *,
    name: str,
    size: str,
    only: Sequence[str],
    rounds: int | None,
    has_meters: bool,
    folder: Path,
) -> dict[str, Any]:
    """Returns the times of the sides, and what each took of memory on the rank that took most."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    case = EXPORT_CASES[name]
    made = ExportSides(case, size, rank, ranks, folder)
    sides = [made.side(side) for side in EXPORT_SIDES if not only or side in only]
    counted = rounds or case.rounds_at(size, ranks)
    times = run_case(f"{case.name}, {ranks} rank(s)", sides, counted, size, folder)
    if {"load", "save"} <= times.keys():
        pairs = zip(times["load"], times["save"], strict=True)
        times["load_and_save"] = [load + save for load, save in pairs]
    found: dict[str, Any] = {"bytes": made.nbytes, "items": case.size(size).items}
    found["times"] = times
    if has_meters:
        found["meters"] = {}
        for side in sides:
            path = folder / f"{side.name}-metered"
            barrier()
            own = extra_peak_bytes(lambda: side.run(path) and None)  # noqa: B023 - called at once
            peak = slowest({"extra_peak_bytes": own})  # of the rank that took most
            found["meters"][side.name] = {what: int(value) for what, value in peak.items()}
            barrier()
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
    return found
