"""A fresh process of load.py: saves the state of a case, or loads it by a side and takes memory."""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path

import torch
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, choices=LOAD_CASES)
    parser.add_argument("--side", required=True)
    parser.add_argument("--size", default="full")
    parser.add_argument("--save", action="store_true", help="only writes what a second run loads")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    case, saved = LOAD_CASES[args.case], args.folder / "saved"
    found: dict[str, int] = {}
    if args.save:
        saved.mkdir()
        write_checkpoints(case, make_state(case, args.size), saved, [args.side])
    else:
        tiny = args.folder / "tiny"  # imports, first uses
        tiny.mkdir()
        write_checkpoints(
            LOAD_CASES["tiny"], make_state(LOAD_CASES["tiny"], "full"), tiny, [args.side]
        )
        measure(LOAD_CASES["tiny"], "full", args.side, tiny)
        found = measure(case, args.size, args.side, saved)
    args.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
