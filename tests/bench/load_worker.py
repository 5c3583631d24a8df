"""A process of load.py: times the sides of some cases, or takes the memory of one."""

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
from load_sides import (
    READERS,
    Destination,
    LoadSides,
    files_of,
    load,
    load_safetensors,
    read_to_cache,
    write_checkpoints,
)
from meters import extra_peak_bytes


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


def memory_of(case: Case, size: str, side: str, folder: Path) -> dict[str, int]:
    """Returns by how much memory grew at most while the side loaded what is in `folder`."""
    destination = Destination(case, make_state(case, size))
    destination.make_blank()
    files = files_of(side, folder)
    read_to_cache(files)

    def load_all() -> None:
        for state in destination.states:
            if side == "safetensors":
                load_safetensors(state, files)
            else:
                load(side, state, READERS[side][1](files))

    found = extra_peak_bytes(load_all)
    destination.check(tensors_only=side == "safetensors")
    return {"extra_peak_bytes": found}


def save(*, case: str, side: str, size: str, folder: Path) -> None:
    """Writes what `meter` loads."""
    (folder / "saved").mkdir()
    write_checkpoints(
        LOAD_CASES[case], make_state(LOAD_CASES[case], size), folder / "saved", [side]
    )


def meter(*, case: str, side: str, size: str, folder: Path) -> dict[str, int]:
    """Returns what `memory_of` finds, after a load for imports and first uses."""
    tiny, tiny_case = folder / "tiny", LOAD_CASES["tiny"]
    tiny.mkdir()
    write_checkpoints(tiny_case, make_state(tiny_case, "full"), tiny, [side])
    memory_of(tiny_case, "full", side, tiny)
    return memory_of(LOAD_CASES[case], size, side, folder / "saved")
