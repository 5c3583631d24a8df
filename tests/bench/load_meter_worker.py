"""A fresh process of load.py: saves the state of a case, or loads it by a side and takes memory."""

from __future__ import annotations

from pathlib import Path

from case_states import make_state
from cases import LOAD_CASES, Case
from load_sides import (
    READERS,
    Destination,
    files_of,
    load,
    load_safetensors,
    read_to_cache,
    write_checkpoints,
)
from meters import extra_peak_bytes


def measure(case: Case, size: str, side: str, folder: Path) -> dict[str, int]:
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
    """Returns what `measure` finds, after a load for imports and first uses."""
    tiny, tiny_case = folder / "tiny", LOAD_CASES["tiny"]
    tiny.mkdir()
    write_checkpoints(tiny_case, make_state(tiny_case, "full"), tiny, [side])
    measure(tiny_case, "full", side, tiny)
    return measure(LOAD_CASES[case], size, side, folder / "saved")
