"""Ranks, clients and servers that are lost, stopped and back while a job saves.

Each at one moment of a save, which is drawn; with DFS_MOMENTS=20 at 20 of them, spread over it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dfs.fixture import REDUNDANT, TWO_CLIENTS, on
from dfs.job import Job
from dfs.system import System

import torch_dcpx as dcpx

Start = Callable[..., Job]
TIMEOUT_S = 15.0
_MOMENTS = int(os.environ.get("DFS_MOMENTS", "1"))


@pytest.fixture(params=range(_MOMENTS))
def moment(request: pytest.FixtureRequest, seed: int) -> float:
    """A part of a save's time, 0 to 1."""
    drawn = random.Random(f"{seed} {request.param}").random()
    return float(request.param + drawn) / _MOMENTS


@pytest.fixture
def start(system: System, place: str, tmp_path: Path) -> Iterator[Start]:
    """Starts a job on a root of this test; each is ended with it."""
    jobs: list[Job] = []

    def started(*, timeout_s: float = TIMEOUT_S, **more: int) -> Job:
        notes = tmp_path / f"job{len(jobs)}"
        root = system.mounts[0] / place
        fresh = not jobs
        jobs.append(Job(system.mounts, root, notes, fresh=fresh, timeout_s=timeout_s, **more))
        return jobs[-1]

    yield started
    for job in jobs:
        job.close()


def end_of(job: Job, system: System) -> None:
    """Waits for a job's processes. GlusterFS may forget a request to a brick that stood still."""
    if not job.is_gone():
        for number in range(system.clients):
            system.kill_client(number)
            system.remount(number)
        assert job.is_gone(), job.output()


def goes_on_after(job: Job, system: System, start: Start) -> None:
    """A new job resumes a step that is not before the last one that returned, and saves."""
    end_of(job, system)
    saved = job.steps("saved")[-1]
    job = start(steps=2, timeout_s=200)  # a killed client may leave locks for two minutes
    job.wait_told((0, 1), 300)
    assert job.failures() == []
    for rank in (0, 1):
        resumed = job.steps("resumed", rank)
        assert resumed and resumed[0] >= saved, f"{resumed}, saved {saved}\n{job.output()}"
    assert len(job.steps("saved")) == 2


def some_time_into_a_save(job: Job, moment: float) -> None:
    job.wait_saved(2)
    job.wait_begun()
    time.sleep(moment * job.save_s())


@on(*TWO_CLIENTS)
def test_a_rank_killed_while_it_saves_fails_the_others_and_the_next_job_resumes_the_last_save(
    system: System, start: Start, moment: float
) -> None:
    job = start()
    some_time_into_a_save(job, moment)
    job.ranks[1].kill()
    told = job.wait_told((0,), 3 * TIMEOUT_S)
    assert "Error" in told[0]
    goes_on_after(job, system, start)


@on(*TWO_CLIENTS)
def test_a_client_that_stops_for_seconds_delays_a_save_and_fails_none(
    system: System, start: Start, moment: float
) -> None:
    job = start()
    some_time_into_a_save(job, moment)
    with system.stopped_client(1):
        time.sleep(3)
    job.wait_saved(2)
    job.finish()


@on(*TWO_CLIENTS)
def test_a_client_that_stops_for_ever_is_told_on_the_other_node_within_the_deadline(
    system: System, start: Start, moment: float
) -> None:
    job = start()
    some_time_into_a_save(job, moment)
    with system.stopped_client(1):
        told = job.wait_told((0,), TIMEOUT_S + 15)
        assert "RankLostError" in told[0] or "StorageError" in told[0], told
    job.wait_told((1,), 60)
    goes_on_after(job, system, start)


@on(*TWO_CLIENTS)
def test_a_killed_client_fails_the_save_on_all_nodes_and_the_next_job_resumes_the_last_one(
    system: System, start: Start, moment: float
) -> None:
    job = start()
    some_time_into_a_save(job, moment)
    system.kill_client(1)
    try:
        told = job.wait_told((0, 1), 3 * TIMEOUT_S)
        assert all("Error" in one for one in told), told
    finally:
        system.remount(1)
    goes_on_after(job, system, start)


@on(*REDUNDANT)
def test_a_server_killed_and_back_while_a_job_saves_loses_no_checkpoint(
    system: System, start: Start, moment: float
) -> None:
    for part in system.parts:
        job = start()
        some_time_into_a_save(job, moment)
        with system.lost(part):
            time.sleep(3)
        try:
            job.wait_saved(2, 180)
            job.finish()
        except AssertionError:
            if not job.failures():
                raise
            job.wait_told((0, 1), 60)
        end_of(job, system)
        system.settle()  # GlusterFS answers EIO until then, and a resume says so
        goes_on_after(job, system, start)


@on(*REDUNDANT)
def test_a_server_that_stops_for_seconds_loses_no_checkpoint(
    system: System, start: Start, moment: float
) -> None:
    for part in system.parts:
        job = start(timeout_s=60)
        some_time_into_a_save(job, moment)
        with system.stopped(part):
            time.sleep(3)
        job.wait_saved(2)
        job.finish()


@on(*REDUNDANT)
def test_a_server_that_stops_for_ever_is_told_within_the_deadline_or_done_without(
    system: System, start: Start, moment: float
) -> None:
    for part in system.parts:
        job = start()
        some_time_into_a_save(job, moment)
        with system.stopped(part):
            told = job.wait_saved_or_told(3, TIMEOUT_S + 30)
        if told:
            job.wait_told((0, 1), 60)
            assert all("Error" in one for one in told), told
        else:
            job.finish(180)
        end_of(job, system)
        system.settle()
        goes_on_after(job, system, start)


@on("gluster-distributed")
def test_nothing_goes_back_or_begins_anew_while_a_part_of_the_files_is_missing(
    system: System, place: str
) -> None:
    import torch

    def state(value: int) -> dict[str, object]:
        return {f"w{n}": torch.full((1 << 16,), float(value)) for n in range(4)} | {"v": value}

    root = system.mounts[0] / place
    with dcpx.CheckpointManager(root / "six", no_dist=True) as manager:
        for step in range(1, 7):
            manager.save(step, state=state(step))
        manager.wait()
    roots = {root / "six": 6}
    for n in range(3):  # the .metadata of each is on one of the parts
        roots[root / f"one{n}"] = 1
        with dcpx.CheckpointManager(root / f"one{n}", no_dist=True) as manager:
            manager.save(1, state=state(1))
            manager.wait()

    def resumed(one: Path, *, allow_fresh: bool) -> str:
        found = state(-1)
        with dcpx.CheckpointManager(one, allow_fresh=allow_fresh, no_dist=True) as manager:
            try:
                manager.resume(state=found)
            except dcpx.StorageError:
                return "refused"
        return str(found["v"])

    wrong = []
    for part in system.parts:
        with system.lost(part):
            time.sleep(3)  # a client keeps what it saw for a second
            for one, newest in roots.items():
                took = resumed(one, allow_fresh=newest == 1)
                if took not in ("refused", str(newest)):
                    wrong.append(f"part {part}, {one.name}: took {took}")
        time.sleep(3)
        for one, newest in roots.items():
            assert resumed(one, allow_fresh=False) == str(newest), f"{one}, all parts back"
    assert not wrong, f"{len(wrong)} of {3 * len(roots)}:\n" + "\n".join(wrong)
