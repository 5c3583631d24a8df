"""Runs behind call_shim: forks a child for each call of a save, which is killed before it.

    python killed_saves.py LIBRARY DIRECTORY STRIDE OFFSET IS_HALF SCENARIO

The parent looks at what the child left, saves again, and looks once more. It prints, as JSON, the
points [n, exit status, what is there, data files left], and ends with a child that was not killed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from call_sweep import MOST_CALLS, state_of, state_there
from forks import alone
from support.call_shim import Action, Kind, Shim
from support.saves import assert_whole, data_files, load, save, save_rank_local
from support.states import assert_same

import torch_dcpx
from torch_dcpx import DcpxWriter, WriteOptions
from torch_dcpx.staging import arena
from torch_dcpx.staging.arena import ArenaPool

OPTIONS = WriteOptions(workers=2, slot_bytes=256 << 10)
OLD, NEW, NEXT = (state_of(seed) for seed in range(3))
STATES = {"old": OLD, "new": NEW}

Save = Callable[[dict[str, Any], Path], Any]


def _files(state: dict[str, Any], directory: Path) -> None:
    save(state, directory, single_file_per_rank=False, options=OPTIONS)


def _buffered(state: dict[str, Any], directory: Path) -> None:
    options = WriteOptions(workers=2, slot_bytes=256 << 10, direct_io=False)
    save(state, directory, options=options)


def _background(state: dict[str, Any], directory: Path) -> None:
    torch_dcpx.async_save(state, directory, no_dist=True).result()


def _stocks_background(state: dict[str, Any], directory: Path) -> None:
    dcp.async_save(state, storage_writer=DcpxWriter(directory), no_dist=True).result()


def _rank_local(state: dict[str, Any], directory: Path) -> None:
    save_rank_local(state, directory, 0)


def _stock(state: dict[str, Any], directory: Path) -> None:
    save(state, directory, "stock")


def _other_ranks_too(state: dict[str, Any], directory: Path) -> None:
    save_rank_local(state, directory, 1)
    save_rank_local(state, directory, 0)


# name -> what saves the old state (None: nothing is there) and what is killed
SCENARIOS: dict[str, tuple[Save | None, Save]] = {
    "first save": (None, save),
    "save over ours": (save, save),
    "save over stock's": (_stock, save),
    "a file each": (_files, _files),
    "buffered": (_buffered, _buffered),
    "dcp.async_save": (save, _stocks_background),
    "torch_dcpx.async_save": (save, _background),
    "first rank-local save": (None, _rank_local),
    "rank-local save": (_other_ranks_too, _rank_local),
    "save over rank-local": (_other_ranks_too, save),
}


def _there(directory: Path, is_rank_local: bool) -> str:
    """Returns what is there: "none", "old" or "new", whole, of this rank or of all."""
    if (directory / ".metadata").exists() or not is_rank_local:
        return state_there(directory, STATES)
    if not (directory / "__0.metadata").exists():
        return "none"
    loaded = load(OLD, directory)
    found = "old" if loaded["step"] == OLD["step"] else "new"
    assert_same(STATES[found], loaded)
    return found


def _killed(shim: Shim, save_new: Save, directory: Path, nth: int, action: Action) -> int:
    """Returns the status of a child that saves, killed at its `nth` call if it has so many."""
    child = os.fork()
    if child == 0:
        try:
            arena._pool = ArenaPool()  # the parent's is refused, and has staged nothing
            kinds = Kind.WRITES if action is Action.HALF_KILL else Kind.CHANGES
            shim.arm(nth, action, 0, kinds)
            save_new(NEW, directory)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def main() -> None:
    library, root, stride, offset, is_half, name = sys.argv[1:]
    save_old, save_new = SCENARIOS[name]
    is_rank_local = _other_ranks_too is save_old or save_new is _rank_local
    action = Action.HALF_KILL if int(is_half) else Action.KILL
    shim = Shim(library)
    tree = Path(root).resolve()
    shim.watch(tree)
    save(OLD, tree / "warm")  # imports what is imported late, before the first child
    points: list[list[Any]] = []
    for nth in (0, *range(int(offset) or int(stride), MOST_CALLS, int(stride))):
        directory = tree / str(nth)
        if save_old is not None:
            save_old(OLD, directory)
        status = _killed(shim, save_new, directory, nth, action)
        there = _there(directory, is_rank_local)
        leftovers = len(data_files(directory)) if directory.exists() else 0
        next_save = _rank_local if save_new is _rank_local else save
        next_save(NEXT, directory)
        if next_save is save:
            for lock in directory.glob(".dcpx.?.lock"):  # of rank-local saves: they stay
                lock.unlink()
            assert_whole(NEXT, directory)
        else:
            assert_same(NEXT, load(OLD, directory))
            assert len(list(directory.glob("__0_*.distcp"))) == 1
        shutil.rmtree(directory)
        points.append([nth, status, there, leftovers])
        if status == 0:
            break
    print(json.dumps(points))


if __name__ == "__main__":
    alone()
    main()
