"""The process of load.py that times the sides of some cases."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from case_states import make_state, payload_bytes
from cases import LOAD_CASES, SHARD_DIMS, Case
from harness import run_case
from load_setup import sides_of
from load_sides import Destination, LoadSides, write_checkpoints


def measure(
    case: Case,
    size: str,
    folder: Path,
    caches: Sequence[str],
    only: Sequence[str] = (),
    rounds: int | None = None,
) -> list[dict[str, Any]]:
    """Returns for each state of the page cache the times of a case's sides, or of those in `only`,
    and what they read."""
    state = make_state(case, size)
    names = [name for name in sides_of(case) if not only or name in only]
    write_checkpoints(case, state, folder, names)
    destination = Destination(case, state)
    nbytes = payload_bytes(state)
    results = []
    for cache in caches:
        maker = LoadSides(destination, nbytes, folder, cache)
        sides = [maker.side(name) for name in names]
        if size == "full":
            sides = [side._replace(rounds=case.rounds_of.get(side.name)) for side in sides]
        counted = rounds or case.rounds_at(size)
        times = run_case(f"{case.name}, {cache}", sides, counted, size, folder)
        found: dict[str, Any] = {
            "case": case.name,
            "ranks": 1,
            "cache": cache,
            "bytes": nbytes,
            "items": case.size(size).items,
            "times": times,
            "bytes_read": maker.bytes_read,
        }
        if case.name in SHARD_DIMS:
            # Two ranks want one stored chunk of each tensor, the one between them wants both.
            found["item_bytes"] = 2 * nbytes
        if maker.raw is not None:
            found["raw"] = {"config": str(maker.raw.config), "is_direct": maker.raw.is_direct}
        results.append(found)
    return results


def measure_all(
    *,
    cases: Sequence[str],
    size: str,
    caches: Sequence[str],
    sides: Sequence[str],
    rounds: int | None,
    folder: Path,
) -> list[dict[str, Any]]:
    """Returns what `measure` finds of each case."""
    if size != "full":
        gc.freeze()  # torch's objects make a collection take longer than a small load
    results = []
    for name in cases:
        own = folder / name
        own.mkdir()
        results += measure(LOAD_CASES[name], size, own, caches, sides, rounds)
        shutil.rmtree(own)
    return results
