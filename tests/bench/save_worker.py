"""One rank of save.py: times the sides of some cases."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from case_states import make_state, payload_bytes
from cases import CASES, Case
from harness import Side, run_case
from save_setup import sides_of
from save_sides import WRITERS, RawSide, dcp_side, dcpx_side, safetensors_side


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
    counted = rounds or case.rounds_at(size, ranks)
    times = run_case(f"{case.name}, {ranks} rank(s)", sides, counted, size, folder)
    nbytes = payload_bytes(state) * ranks
    found: dict[str, Any] = {"bytes": nbytes, "items": case.size(size).items, "times": times}
    if raw is not None:
        found["raw"] = {"config": str(raw.config), "is_direct": raw.is_direct}
    return found


def measure_all(
    *, cases: Sequence[str], size: str, sides: Sequence[str], rounds: int | None, folder: Path
) -> dict[str, Any]:
    """Returns what `measure` finds of each case."""
    if size != "full":
        gc.freeze()  # torch's objects make a collection take longer than a small save
    return {name: measure(CASES[name], size, folder, sides, rounds) for name in cases}
