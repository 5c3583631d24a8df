"""`save` and `async_save` on several ranks (gloo), agreed through the store alone."""

from __future__ import annotations

import errno
import fcntl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.no_collectives import no_collectives
from support.rank_fixture import StartRanks
from support.saves import save_ids
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torch_dcpx import (
    ConcurrentSaveError,
    DcpxError,
    RankError,
    StorageError,
    UnsupportedError,
    WriteOptions,
    async_save,
    save,
)
from torch_dcpx.checkpoint import pending as pending_saves

SAVES = {
    "save": lambda *args, **kwargs: save(*args, **kwargs).result(0),
    "async_save": lambda *args, **kwargs: async_save(*args, **kwargs).result(seconds(120)),
}


def state_of(seed: int) -> dict[str, Any]:
    """A sharded tensor, a replicated one, one of each rank, and bytes."""
    generator = torch.Generator().manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.rand(103, 17, generator=generator)
    return {
        "sharded": distribute_tensor(full, mesh, [Shard(0)]),
        "replicated": torch.rand(1000, generator=generator),
        f"own{dist.get_rank()}": torch.full((5,), float(seed)),
        "step": seed,
    }


def check_saved(path: Path, seed: int) -> None:
    """Every rank reads what all of them saved, with stock's reader."""
    expected = state_of(seed)
    found = state_of(seed + 1)
    dcp.load(found, storage_reader=FileSystemReader(path))
    for key, value in expected.items():
        assert is_same(value, found[key]), (key, value, found[key])


def is_same(value: Any, other: Any) -> bool:
    if isinstance(value, DTensor):
        return torch.equal(value.to_local(), other.to_local())
    return torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


def fails_on(rank: int, error: BaseException) -> WriteOptions:
    """Options whose save raises `error` while it writes, on one rank."""

    def fail(_done: int, _total: int) -> None:
        if dist.get_rank() == rank:
            raise error

    return WriteOptions(progress=fail)


def bad_planner(hook: str, rank: int) -> DefaultSavePlanner:
    """Returns a planner that fails in one of its hooks, on one rank."""
    planner = DefaultSavePlanner()

    def fail(*_: Any) -> None:
        raise ValueError(f"no {hook}")

    if dist.get_rank() == rank:
        setattr(planner, hook, fail)
    return planner


def caught(kind: type[DcpxError], saves: str, *args: Any, **kwargs: Any) -> DcpxError:
    """Returns what the save raised; on every rank it must raise an error of this class."""
    with pytest.raises(kind) as info:
        SAVES[saves](*args, **kwargs)
    return info.value


def saves_are_whole_on_every_rank(folder: Path) -> None:
    for seed, (name, saves) in enumerate(SAVES.items()):
        for again in range(2):  # over itself as well
            state = state_of(seed + again)
            with no_collectives():
                report = saves(state, folder / name)
            assert report.ranks == dist.get_world_size()
            dist.barrier()
            sizes = [path.stat().st_size for path in (folder / name).glob("*.distcp")]
            assert (report.files, report.file_bytes) == (len(sizes), sum(sizes))
            assert set(save_ids(folder / name).values()) == {report.save_id}
            check_saved(folder / name, seed + again)


def failure_of_one_rank_is_that_of_all(folder: Path) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for name in SAVES:
        path = folder / f"failing-{name}"
        save(state_of(1), path)
        dist.barrier()
        files = sorted(entry.name for entry in path.iterdir())
        for failing in (0, world - 1):
            error: BaseException = StorageError("no room", errno=errno.ENOSPC, path="here")
            options = fails_on(failing, error)
            found = caught(StorageError, name, state_of(2), path, options=options)
            assert (found.errno, found.path) == (errno.ENOSPC, "here")
            first = str(found).splitlines()[0]
            assert first.startswith(f"rank {failing} ("), first
            assert "writing: " in first, first
            assert "no room" in first, first
            options = fails_on(failing, KeyError("foreign"))
            found = caught(RankError, name, state_of(2), path, options=options)
            assert (found.rank, found.phase) == (failing, "writing")
            assert "KeyError" in str(found).splitlines()[0]
        dist.barrier()
        assert sorted(entry.name for entry in path.iterdir()) == files, rank
        check_saved(path, 1)
        save(state_of(3), path)
        check_saved(path, 3)


def failure_while_planning_is_that_of_all(folder: Path) -> None:
    for name in SAVES:
        path = folder / f"planning-{name}"
        for hook in ("create_local_plan", "create_global_plan"):
            failing = 0 if hook == "create_global_plan" else dist.get_world_size() - 1
            planner = bad_planner(hook, failing)
            found = caught(RankError, name, state_of(1), path, planner=planner)
            assert (found.rank, found.phase) == (failing, "planning"), found
            assert f"no {hook}" in str(found).splitlines()[0]
        for hook in ("finish_plan", "resolve_data"):  # after the ranks have agreed
            with pytest.raises((RankError, ValueError), match=rf"\A.*no {hook}"):
                SAVES[name](state_of(1), path, planner=bad_planner(hook, 1))
        dist.barrier()
        assert not list(path.glob("*.distcp"))
        save(state_of(2), path)
        check_saved(path, 2)


def another_job_at_the_same_id_is_refused_on_every_rank(folder: Path) -> None:
    path = folder / "two jobs"
    save(state_of(0), path)
    with (path / ".dcpx.lock").open("r+") as lock:
        if dist.get_rank() == 0:  # as another job's: it is not taken through this process's locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        dist.barrier()
        for saves in SAVES:
            error = caught(ConcurrentSaveError, saves, state_of(1), path)
            assert str(path) in str(error)
        check_saved(path, 0)
        dist.barrier()
    dist.barrier()
    save(state_of(2), path)
    check_saved(path, 2)


def groups_save_side_by_side(folder: Path) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group([r for r in range(world) if r % 2 == parity]) for parity in (0, 1)]
    path = folder / f"group{rank % 2}"
    state = {f"of{rank}": torch.full((3,), float(rank))}
    report = save(state, path, process_group=groups[rank % 2]).result()
    assert report is not None
    assert report.ranks == len(range(rank % 2, world, 2))
    found = {f"of{rank}": torch.zeros(3)}
    dcp.load(found, storage_reader=FileSystemReader(path), no_dist=True)
    assert torch.equal(found[f"of{rank}"], state[f"of{rank}"])
    alone = folder / f"alone{rank}"
    save(state, alone, no_dist=True)
    dcp.load(found, storage_reader=FileSystemReader(alone), no_dist=True)


def busy_rank_decides_for_all(folder: Path) -> None:
    opened = threading.Event()

    def hold(_done: int, _total: int) -> None:
        assert opened.wait(seconds(60))

    handle = None
    if dist.get_rank() == 1:
        options = WriteOptions(progress=hold)
        handle = async_save({"w": torch.ones(3)}, folder / "mine", no_dist=True, options=options)
    skipped = async_save(state_of(1), folder / "busy", options=WriteOptions(on_busy="skip"))
    assert skipped.result(0) is None
    opened.set()
    if handle is not None:
        handle.result(seconds(60))
    dist.barrier()
    assert not (folder / "busy").exists()


def cancelled_save_fails_on_every_rank(folder: Path) -> None:
    opened = threading.Event()

    def hold(_done: int, _total: int) -> None:
        assert opened.wait(seconds(60))

    path = folder / "cancelled"
    save(state_of(1), path)
    options = WriteOptions(progress=hold) if dist.get_rank() == 1 else None
    handle = async_save(state_of(2), path, options=options)
    if dist.get_rank() == 0:
        assert handle.cancel()
    dist.barrier()
    opened.set()
    with pytest.raises(DcpxError, match=r"\A.*cancel"):
        handle.result(seconds(60))
    dist.barrier()
    check_saved(path, 1)


def earlier_error_stops_the_next_save_of_all(folder: Path) -> None:
    handle = async_save(state_of(1), folder / "a", options=fails_on(1, StorageError("first")))
    if dist.get_rank() == 0:  # one rank asks, the others do not
        assert isinstance(handle.durable.exception(60), StorageError)
    found = caught(StorageError, "save", state_of(1), folder / "b")
    assert "first" in str(found).splitlines()[0], found
    save(state_of(1), folder / "b")
    pending_saves.wait()


def rank_that_cannot_begin_fails_all_and_the_next_save_works(folder: Path) -> None:
    class Raises:
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("no state")

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    path = folder / "begins"
    for name in SAVES:
        stock = dcp.FileSystemWriter(path) if dist.get_rank() == 1 else None
        caught(UnsupportedError, name, state_of(1), path, storage_writer=stock)
        state = {**state_of(1), "x": Raises()} if dist.get_rank() == 1 else state_of(1)
        assert caught(RankError, name, state, path).rank == 1
        SAVES[name](state_of(2), path)
        check_saved(path, 2)


def many_saves_beside_collectives(folder: Path) -> None:
    state = {"w": torch.rand(100), "rank": dist.get_rank()}
    total = torch.ones(1)
    for number in range(500):
        handle = async_save(state, folder / "many")
        dist.barrier()
        dist.all_reduce(total)
        total /= dist.get_world_size()
        if number % 100 == 0:
            handle.result(seconds(60))
    pending_saves.wait()
    assert total.item() == 1.0


CASES = [
    saves_are_whole_on_every_rank,
    failure_of_one_rank_is_that_of_all,
    failure_while_planning_is_that_of_all,
    another_job_at_the_same_id_is_refused_on_every_rank,
    groups_save_side_by_side,
    busy_rank_decides_for_all,
    cancelled_save_fails_on_every_rank,
    earlier_error_stops_the_next_save_of_all,
    rank_that_cannot_begin_fails_all_and_the_next_save_works,
]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_saves_of_several_ranks_are_whole_or_fail_on_all(
    tmp_path: Path, ranks: StartRanks, count: int, case: Callable[[Path], None]
) -> None:
    ranks(count)(case, tmp_path)


@pytest.mark.slow
def test_many_saves_go_on_beside_collectives(tmp_path: Path, ranks: StartRanks) -> None:
    ranks(2)(many_saves_beside_collectives, tmp_path)
