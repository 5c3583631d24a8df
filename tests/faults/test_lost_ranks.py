"""A rank is killed or stopped while all save: the others know in time, and nothing is mixed.

The store lives in the test's process, as it does in torchrun's agent.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.machine import EVERY_POINT, seconds
from support.warm import WarmProcess, warm_parent
from torch.distributed.checkpoint import FileSystemReader

from torch_dcpx import DcpxWriter, save

WORKER = Path(__file__).with_name("lost_rank_worker.py")
RANKS = 3
DEADLINE_S = seconds(100)  # of a test: the workers' own is seconds(8)


@pytest.fixture
def workers() -> Iterator[list[WarmProcess]]:
    started: list[WarmProcess] = []
    yield started
    for process in started:
        process.kill()
        process.wait(DEADLINE_S)


def start(folder: Path, workers: list[Any], *args: str) -> Any:
    store = dist.TCPStore("127.0.0.1", 0, RANKS, is_master=True, wait_for_workers=False)
    for rank in range(RANKS):
        command = [str(WORKER), str(rank), str(RANKS), str(store.port), *args]
        with (folder / f"out-{rank}").open("w") as out:
            workers.append(warm_parent().start(command, out, out, env=os.environ))
    return store


def wait_for(path: Path, workers: list[Any]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        assert any(process.poll() is None for process in workers), "all workers have ended"
        time.sleep(0.01)


def what_survivors_say(folder: Path, workers: list[Any], lost: int) -> list[dict[str, Any]]:
    said = []
    for rank in range(RANKS):
        if rank == lost:
            continue
        assert workers[rank].wait(DEADLINE_S) == 0, (folder / f"out-{rank}").read_text()
        said.append(json.loads((folder / f"said-{rank}").read_text()))
    return said


def steps_in(path: Path) -> set[float]:
    """Returns what the checkpoint holds, by stock's reader: one value if it is not mixed."""
    found: dict[str, Any] = {f"rank{rank}": torch.zeros(1000) for rank in range(RANKS)}
    found["step"] = 0
    dcp.load(found, storage_reader=FileSystemReader(path), no_dist=True)
    values = {value for r in range(RANKS) for value in found[f"rank{r}"].tolist()}
    return values | {float(found["step"])}


# (who, in which phase, what the others raise, which checkpoint is there)
LOSSES = [
    (1, "planning", "RankLostError", 1.0),
    (0, "planning", "RankLostError", 1.0),
    (2, "writing", "RankLostError", 1.0),
    (0, "writing", "RankLostError", 1.0),
    (0, "before the commit", "OutcomeUnknownError", 1.0),
    (0, "after the commit", None, 2.0),
]
# Of all combinations, those that every run of the suite looks at.
ALWAYS = {
    (2, "writing", "async_save", signal.SIGKILL),
}
CASES = [
    pytest.param(
        *loss, kind, how, marks=[] if (*loss[:2], kind, how) in ALWAYS else [pytest.mark.slow]
    )
    for loss in LOSSES
    for kind in ("save", "async_save")
    for how in (signal.SIGKILL, signal.SIGSTOP)
]


@pytest.mark.parametrize(("lost", "phase", "raised", "step", "kind", "how"), CASES)
def test_lost_rank_is_named_in_time_and_nothing_is_mixed(
    tmp_path: Path,
    workers: list[WarmProcess],
    lost: int,
    phase: str,
    raised: str | None,
    step: float,
    kind: str,
    how: signal.Signals,
) -> None:
    store = start(tmp_path, workers, str(tmp_path), kind, str(lost), phase)
    wait_for(tmp_path / "lost-now", workers)
    os.kill(workers[lost].pid, how)
    for said in what_survivors_say(tmp_path, workers, lost):
        assert said["raised"] == raised, said
        if raised == "RankLostError":
            first = said["text"].splitlines()[0]
            assert f"rank {lost} (" in first, first
            assert phase in first, first
    path = tmp_path / "checkpoint"
    assert steps_in(path) == {step}
    workers[lost].kill()
    workers[lost].wait(DEADLINE_S)
    state = {f"rank{r}": torch.full((1000,), 3.0) for r in range(RANKS)} | {"step": 3}
    report = save(state, path).result()
    assert steps_in(path) == {3.0}
    names = {entry.name for entry in path.glob("*.distcp")}
    assert len(names) == report.files == 1, names
    del store


DCP_CASES = [
    (lost, phase, step, kind, how)
    for lost, phase, _, step in LOSSES
    for kind in ("dcp.save", "dcp.async_save")
    for how in (signal.SIGKILL, signal.SIGSTOP)
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_rank_lost_under_dcp_ends_all_others_and_nothing_is_mixed(
    tmp_path: Path, workers: list[WarmProcess], seed: int
) -> None:
    """DCP's collectives end by the process group's own time limit, and name nobody."""
    cases = DCP_CASES if EVERY_POINT else random.Random(seed).sample(DCP_CASES, 1)
    for number, (lost, phase, step, kind, how) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        workers.clear()
        store = start(folder, workers, str(folder), kind, str(lost), phase)
        wait_for(folder / "lost-now", workers)
        os.kill(workers[lost].pid, how)
        for said in what_survivors_say(folder, workers, lost):
            assert said["raised"] is not None, (lost, phase, kind, how)
        path = folder / "checkpoint"
        assert steps_in(path) == {step}, (lost, phase, kind, how)
        workers[lost].kill()
        workers[lost].wait(DEADLINE_S)
        state = {f"rank{r}": torch.full((1000,), 3.0) for r in range(RANKS)} | {"step": 3}
        dcp.save(state, storage_writer=DcpxWriter(path), no_dist=True)
        assert steps_in(path) == {3.0}, (lost, phase, kind, how)
        assert len(list(path.glob("*.distcp"))) == 1, (lost, phase, kind, how)
        print(f"rank {lost} lost while {phase}, {kind}, {how.name}: well")
        del store
    print(f"{len(cases)} cases, bad = 0")
