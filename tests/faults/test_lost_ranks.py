"""A rank is killed or stopped while all save: the others know in time, and nothing is mixed.

The store lives in the test's process, as it does in torchrun's agent.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.machine import EVERY_POINT, seconds
from support.rank_fixture import Handle, StartRanks
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import torch_dcpx
from torch_dcpx import DcpxWriter, WriteOptions, save
from torch_dcpx._waiting import Deadline
from torch_dcpx.ranks.store_client import client_of

RANKS = 3
TIMEOUT_S = seconds(8)  # also the time that a rank has which nobody ends
Lose = Callable[[str], None]


class Loss(NamedTuple):
    lost: int
    phase: str
    raised: str | None  # on the others, of our own saves
    step: int  # of the checkpoint that is there
    kind: str = ""
    how: signal.Signals = signal.SIGKILL


LOSSES = [
    Loss(1, "planning", "RankLostError", 1),
    Loss(0, "planning", "RankLostError", 1),
    Loss(2, "writing", "RankLostError", 1),
    Loss(0, "writing", "RankLostError", 1),
    Loss(0, "before the commit", "OutcomeUnknownError", 1),
    Loss(0, "after the commit", None, 2),
]
HOWS = (signal.SIGKILL, signal.SIGSTOP)
KINDS = ("save", "async_save")
DCP_KINDS = ("dcp.save", "dcp.async_save")


# ---- On each rank -------------------------------------------------------------------------------


class LosingPlanner(DefaultSavePlanner):
    def __init__(self, lose: Lose) -> None:
        super().__init__()
        self._lose = lose

    def create_local_plan(self) -> SavePlan:
        self._lose("planning")
        return super().create_local_plan()


class LosingWriter(DcpxWriter):
    def __init__(self, path: Path, lose: Lose) -> None:
        options = WriteOptions(save_timeout_s=TIMEOUT_S, progress=lambda *_: lose("writing"))
        super().__init__(path, options=options)
        self._lose = lose

    def finish(self, *args: Any, **kwargs: Any) -> None:
        self._lose("before the commit")
        super().finish(*args, **kwargs)
        self._lose("after the commit")


def state_of(step: int, ranks: range) -> dict[str, Any]:
    return {**{f"rank{rank}": torch.full((1000,), float(step)) for rank in ranks}, "step": step}


def one_is_lost(folder: Path, loss: Loss) -> tuple[str, str] | None:
    """Saves; the rank that is lost says so by a file, and waits to be killed or stopped."""
    rank, is_dcp = dist.get_rank(), loss.kind.startswith("dcp.")

    def lose(phase: str) -> None:
        if (rank, phase) == (loss.lost, loss.phase):
            if not is_dcp:  # a phase is posted, not waited for: the others must know it
                assert client_of(dist.group.WORLD).settle(Deadline(TIMEOUT_S))
            (folder / "lost-now").touch()
            time.sleep(600)

    # DCP's ranks wait for each other in collectives of the group, as long as that says.
    group = dist.new_group(timeout=timedelta(seconds=seconds(20))) if is_dcp else None
    path, own = folder / "checkpoint", range(rank, rank + 1)
    save(state_of(1, own), path)
    dist.barrier()
    call: Any = getattr(dcp if is_dcp else torch_dcpx, loss.kind.removeprefix("dcp."))
    writer, planner = LosingWriter(path, lose), LosingPlanner(lose)
    try:
        ended = call(state_of(2, own), storage_writer=writer, planner=planner, process_group=group)
        if "async" in loss.kind:
            ended.result(seconds(120))
    except Exception as error:  # noqa: BLE001  (told to the test)
        return type(error).__name__, str(error)
    return None


# ---- Tests --------------------------------------------------------------------------------------


def steps_in(path: Path) -> set[float]:
    """Returns what the checkpoint holds, by stock's reader: one value if it is not mixed."""
    found = state_of(0, range(RANKS))
    dcp.load(found, storage_reader=FileSystemReader(path), no_dist=True)
    values = {value for rank in range(RANKS) for value in found[f"rank{rank}"].tolist()}
    return values | {float(found["step"])}


def lose_when_it_says(folder: Path, loss: Loss, call: Handle) -> None:
    end = time.monotonic() + seconds(100)
    while not (folder / "lost-now").exists():
        assert time.monotonic() < end, f"{loss}: it did not come"
        assert any(process.poll() is None for process in call.processes), f"{loss}: all ended"
        time.sleep(0.01)
    call.processes[loss.lost].send_signal(loss.how)


def check(folder: Path, loss: Loss, call: Handle) -> None:
    said = call.wait(seconds(100), but={loss.lost})
    for survivor in set(range(RANKS)) - {loss.lost}:
        kind, text = said[survivor] or (None, "")
        if loss.kind in DCP_KINDS:  # collectives end by their own time limit, and name nobody
            assert kind is not None, loss
            continue
        assert kind == loss.raised, (loss, text)
        if kind == "RankLostError":
            first = text.splitlines()[0]
            assert f"rank {loss.lost} (" in first and loss.phase in first, (loss, first)
    path = folder / "checkpoint"
    assert steps_in(path) == {loss.step}, loss
    for process in call.processes:  # as DCP's survivors do, which hold the lock until then
        process.kill()
        process.wait(seconds(100))
    save(state_of(3, range(RANKS)), path, no_dist=True)
    assert steps_in(path) == {3}, loss
    assert len(list(path.glob("*.distcp"))) == 1, loss


def check_all(root: Path, ranks: StartRanks, losses: list[Loss]) -> None:
    """Loses ranks of several jobs at the same time: they wait, and need no core."""
    calls = []
    for number, loss in enumerate(losses):
        folder = root / str(number)
        folder.mkdir()
        calls.append((folder, loss, ranks(RANKS, anew=True).start(one_is_lost, folder, loss)))
    for one in calls:
        lose_when_it_says(*one)
    for one in calls:
        check(*one)


def test_lost_rank_is_named_in_time_and_nothing_is_mixed(tmp_path: Path, ranks: StartRanks) -> None:
    (loss,) = (one for one in LOSSES if one.lost == 2)
    check_all(tmp_path, ranks, [loss._replace(kind="async_save")])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_rank_lost_in_any_phase_ends_all_others_and_nothing_is_mixed(
    tmp_path: Path, ranks: StartRanks, seed: int
) -> None:
    draw = random.Random(seed)
    ways = list(itertools.product(KINDS, HOWS))
    losses = [loss._replace(kind=k, how=h) for loss in LOSSES for k, h in draw.sample(ways, 1)]
    others = [loss._replace(kind=k, how=h) for loss in LOSSES for k in DCP_KINDS for h in HOWS]
    sets = [[*losses, draw.choice(others)]]
    if EVERY_POINT:
        sets = [[loss._replace(kind=k, how=h) for loss in LOSSES] for k, h in ways]
        sets += [others[at : at + 6] for at in range(0, len(others), 6)]
    for number, some in enumerate(sets):
        (tmp_path / str(number)).mkdir()
        check_all(tmp_path / str(number), ranks, some)
