"""One of two ranks is killed before any of its system calls under `dcp.save` or `dcp.async_save`:
the other one's save ends, old or new is there, and the next save works and cleans up."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from call_sweep import MOST_CALLS, new_arena, of_all, of_rank, state_there
from forks import Ended, Rows, assert_none_bad, in_children, run_alone
from support.call_shim import Action, Shim, compiled
from support.machine import EVERY_POINT, seconds, stride
from support.saves import assert_whole, save
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import DcpxWriter

RANKS = 2
# Of the process group's collectives; a lost peer is noticed at once.
LIMIT = timedelta(seconds=seconds(60))
FEWEST_CALLS = 10  # that a rank makes, or a few more: a sample kills each rank at least once
OLD, NEW, NEXT = range(3)
STATES = {"old": of_all(OLD), "new": of_all(NEW)}


def _async_save(state: dict[str, Any], storage_writer: DcpxWriter) -> None:
    future: Any = dcp.async_save(state, storage_writer=storage_writer)
    future.result(seconds(120))


WAYS: dict[str, Callable[..., object]] = {"dcp.save": dcp.save, "dcp.async_save": _async_save}


def bad_of(ended: list[Ended], path: Path, victim: int) -> str:
    """Returns what is bad after the victim was killed, or nobody was."""
    if ended[victim].code == 0:
        is_new = [end.said.get("value") for end in ended] == [["", "new"]] * RANKS
        is_there = is_new and state_there(path, STATES) == "new"
        return "" if is_there else f"nobody was killed: {ended}"
    survivor = ended[1 - victim]
    if ended[victim].is_hung or "value" not in survivor.said:
        return f"the survivor: {survivor}"
    raised, there = survivor.said["value"]
    if not raised:
        return "the survivor's save returned"
    if there not in STATES or (victim != 0 and there != "old"):
        return f"{there} is there after: {raised}"
    try:
        assert_whole(of_all(NEXT), path)
    except AssertionError as error:
        return f"after the next save: {error!r} {sorted(map(str, path.iterdir()))}"
    return ""


def kills(library: Path, root: Path, step: int, seed: int) -> Rows:
    """Kills each rank at each call, or at one in `step`, until there is no such call."""
    shim, chosen, rows = Shim(library), random.Random(seed), Rows()
    path, store = root / "tree" / "checkpoint", root / "store"
    shim.watch(root / "tree")
    save(of_all(OLD), path)  # imports what is imported late, before the first child

    def rank_of(way: str, rank: int, victim: int, nth: int) -> tuple[str, str]:
        """In a child: saves, looks at what is there, and saves once more by itself."""
        new_arena()
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=LIMIT
        )
        dist.barrier()
        if rank == victim:
            shim.arm(nth, Action.KILL)
        try:
            WAYS[way](of_rank(NEW, rank), storage_writer=DcpxWriter(path))
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - told
            there = state_there(path, STATES)
            save(of_all(NEXT), path)
            return repr(error) or "?", there
        finally:
            shim.disarm()
        return "", "new"

    for way in WAYS:
        for victim in range(RANKS):
            nth, is_killed = chosen.randrange(min(step, FEWEST_CALLS)), True
            while is_killed and nth < MOST_CALLS:
                shutil.rmtree(path)
                store.unlink(missing_ok=True)
                save(of_all(OLD), path)
                bodies = [partial(rank_of, way, r, victim, nth) for r in range(RANKS)]
                ended = in_children(bodies, 600.0)
                is_killed = ended[victim].code != 0
                case = f"{way}, rank {victim} killed, call {nth if is_killed else 'none'}"
                rows.append((case, bad_of(ended, path, victim)))
                nth += chosen.randrange(1, 2 * step) if step > 1 else 1
    return rows


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(3000)
def test_rank_killed_at_any_call_ends_the_other_and_leaves_old_or_new(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    library, step = compiled(tmp_path), 1 if EVERY_POINT else stride(12)
    arguments = library, tmp_path.resolve(), step, seed
    rows = run_alone(kills, *arguments, library=library, deadline_s=2900)
    assert_none_bad(rows)
    assert len({case.split(", call")[0] for case, _ in rows if "call none" not in case}) == 4
