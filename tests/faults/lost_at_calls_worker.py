"""Two ranks save, and one of them is killed before one of its system calls: the driver of
test_lost_at_calls.py, behind call_shim.

python lost_at_calls_worker.py LIBRARY DIRECTORY STRIDE SEED

The other rank's save ends, the old or the new checkpoint is there, and the next save works.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from call_sweep import MOST_CALLS, of_all, of_rank, state_there
from forks import Ended, Table, alone, in_children
from support.call_shim import Action, Shim
from support.machine import seconds
from support.saves import assert_whole, save
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import DcpxWriter
from torch_dcpx.staging import arena
from torch_dcpx.staging.arena import ArenaPool

RANKS = 2
# Of the process group's collectives; a lost peer is noticed at once.
LIMIT = timedelta(seconds=seconds(60))
DEADLINE_S = 600.0  # of both ranks of a case
FEWEST_CALLS = 10  # that a rank makes, or a few more: a sample kills each rank at least once
OLD, NEW, NEXT = range(3)
STATES = {"old": of_all(OLD), "new": of_all(NEW)}


def _save(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, storage_writer=DcpxWriter(path))


def _async_save(state: dict[str, Any], path: Path) -> None:
    future: Any = dcp.async_save(state, storage_writer=DcpxWriter(path))
    future.result(seconds(120))


WAYS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "dcp.save": _save,
    "dcp.async_save": _async_save,
}


class Sweep:
    """One way to save, one rank that is killed: call by call."""

    def __init__(self, shim: Shim, tree: Path, store: Path, way: str, victim: int) -> None:
        self._shim, self._tree, self._store = shim, tree, store
        self._way, self._victim = way, victim
        self._number = 0

    def run(self, table: Table, stride: int, chosen: random.Random) -> None:
        """Tries each call, or a sample of one in `stride`, until a save has no such call."""
        group = f"{self._way}, rank {self._victim} killed"
        found: Counter[str] = Counter()
        nth = chosen.randrange(min(stride, FEWEST_CALLS))
        while nth < MOST_CALLS:
            is_killed, there, bad = self._once(nth)
            table.add(group, f"call {nth}" if is_killed else "no call", bad)
            found[f"{there} there"] += 1
            if not is_killed:
                break
            nth += chosen.randrange(1, 2 * stride) if stride > 1 else 1
        sys.stderr.write(f"{group}: {dict(found)}, to call {nth}\n")

    def _once(self, nth: int) -> tuple[bool, str, str | None]:
        """Returns whether the victim was killed, what was there then, and what is bad."""
        self._number += 1
        path = self._tree / str(self._number)
        store = self._store / f"{self._way}-{self._victim}-{self._number}"
        save(of_all(OLD), path)
        ended = in_children(
            [lambda rank=rank: self._rank(rank, nth, path, store) for rank in range(RANKS)],
            DEADLINE_S,
        )
        is_killed = ended[self._victim].code == -9 and not ended[self._victim].is_hung
        there, bad = self._judged(ended, path, is_killed)
        shutil.rmtree(path)
        store.unlink(missing_ok=True)
        return is_killed, there, bad

    def _rank(self, rank: int, nth: int, path: Path, store: Path) -> dict[str, str]:
        """One rank, in a child: saves, looks at what is there, and saves once more by itself."""
        arena._pool = ArenaPool()  # the parent's is refused, and has staged nothing
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=LIMIT
        )
        dist.barrier()
        if rank == self._victim:
            self._shim.arm(nth, Action.KILL)
        raised = ""
        try:
            WAYS[self._way](of_rank(NEW, rank), path)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - told
            raised = repr(error) or "?"
        self._shim.disarm()
        if not raised:
            return {"raised": "", "there": "new"}
        there = state_there(path, STATES)
        save(of_all(NEXT), path)
        return {"raised": raised, "there": there}

    def _judged(self, ended: list[Ended], path: Path, is_killed: bool) -> tuple[str, str | None]:
        """Returns what was there after the kill, and what is bad."""
        if not is_killed:
            if [end.said.get("value", {}).get("raised") for end in ended] != ["", ""]:
                return "?", f"nobody was killed: {ended}"
            there = state_there(path, STATES)
            return there, None if there == "new" else "both returned, and it is not there"
        said = ended[1 - self._victim].said.get("value")
        if said is None:
            return "?", f"the survivor: {ended[1 - self._victim]}"
        there = said["there"]
        if not said["raised"]:
            return there, "the survivor's save returned"
        if there not in STATES or (self._victim != 0 and there != "old"):
            return there, f"{there} is there after: {said['raised']}"
        try:
            assert_whole(of_all(NEXT), path)
        except AssertionError as error:
            return there, f"after the next save: {error!r} {sorted(map(str, path.iterdir()))}"
        return there, None


def main() -> None:
    library, root, stride, seed = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    shim, table = Shim(library), Table()
    tree, store = Path(root).resolve() / "tree", Path(root).resolve() / "store"
    store.mkdir()
    shim.watch(tree)
    save(of_all(OLD), tree / "warm")  # imports what is imported late, before the first child
    chosen = random.Random(int(seed))
    for way in WAYS:
        for victim in range(RANKS):
            Sweep(shim, tree, store, way, victim).run(table, int(stride), chosen)
    table.print()


if __name__ == "__main__":
    alone()
    main()
