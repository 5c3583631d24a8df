"""One rank of test_object_ranks.py: saves to a store with the others, and loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from object_outcomes import LatePut, interrupted, retries, state_of, unanswered
from support.placements import distribute
from support.states import assert_same
from support.worker import rank_case
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_dcpx
from torch_dcpx import (
    ConcurrentSaveError,
    DcpxReader,
    DcpxWriter,
    OutcomeUnknownError,
    PlanError,
    RankError,
    StorageError,
)

PLACEMENTS = {"weight": Shard(0), "bias": Replicate()}
Save = Callable[[dict[str, Any], str], Any]


def state(seed: int) -> dict[str, Any]:
    """Returns this rank's part of `state_of(seed)`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = state_of(seed)
    return {
        name: distribute(value, mesh, (PLACEMENTS[name],)) if name in PLACEMENTS else value
        for name, value in whole.items()
    }


def by_dcp(state: dict[str, Any], url: str) -> None:
    dcp.save(state, storage_writer=DcpxWriter(url))


def in_background(state: dict[str, Any], url: str) -> None:
    torch_dcpx.async_save(state, url).result()


SAVES: dict[str, Save] = {"dcpx": torch_dcpx.save, "dcp": by_dcp, "async": in_background}


def error_of(call: Callable[[], Any]) -> BaseException:
    """Returns what this rank raises, out of what DCP wraps it in."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - looked at
        call()
    error: BaseException = caught.value
    if isinstance(error, CheckpointException):
        (failure,) = {type(each[0]): each[0] for each in error.failures.values()}.values()
        return failure
    return error


@rank_case("save")
def save(root: Path, url: str) -> None:
    for seed in (1, 2):  # the second one over the first
        for name, save_all in SAVES.items():
            save_all(state(seed), f"{url}/{name}")


@rank_case("load")
def load(root: Path, url: str) -> None:
    expected = state(2)
    for name in SAVES:
        target, stocks = state(3), state(3)
        torch_dcpx.load(target, f"{url}/{name}")
        dcp.load(stocks, storage_reader=DcpxReader(f"{url}/{name}"))
        assert_same(_local(expected), _local(target), name)
        assert_same(_local(expected), _local(stocks), name)


def _local(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.to_local() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


@rank_case("fail")
def one_rank_cannot_upload(root: Path, url: str) -> None:
    """The rank's number ends the URL's name."""
    for name, save_all in SAVES.items():
        for failing in range(dist.get_world_size()):
            error = error_of(lambda s=save_all, p=f"{url}/{name}{failing}": s(state(2), p))
            assert type(error) is StorageError, error
            assert f"/__{failing}_" in str(error.path)
            dist.barrier()


@rank_case("overtaken")
def another_save_commits_meanwhile(root: Path, url: str) -> None:
    for name, save_all in SAVES.items():
        error = error_of(lambda s=save_all, p=f"{url}/{name}": s(state(2), p))
        assert type(error) is ConcurrentSaveError, error
        dist.barrier()


@rank_case("silent")
def store_falls_silent_at_the_commit(root: Path, url: str) -> None:
    with retries(0):
        error = error_of(lambda: torch_dcpx.save(state(2), url))
    assert type(error) is OutcomeUnknownError, error


@rank_case("late")
def commit_arrives_after_all_have_given_it_up(root: Path, url: str, end: str) -> None:
    """The store answers again by then: what it shows is the old checkpoint, for the moment."""
    with retries(0), pytest.MonkeyPatch.context() as patch:
        late = LatePut(patch)
        late.before_next = interrupted if end == "interrupt" else unanswered
        error = error_of(lambda: torch_dcpx.save(state(2), url))
        if end == "interrupt":
            assert type(error) is (RankError if dist.get_rank() else KeyboardInterrupt), error
        else:
            assert type(error) is OutcomeUnknownError, error
        dist.barrier()
        if dist.get_rank() == 0:
            late.arrive()


@rank_case("apart")
def prefixes_differ(root: Path, url: str) -> None:
    rank = dist.get_rank()
    for names in (("a", "b"), ("a", "a/b"), ("a", "a1")):
        for name in ("dcpx", "async"):
            error = error_of(lambda n=name, p=f"{url}/{names[rank]}": SAVES[n](state(2), p))
            assert type(error) is PlanError, error
            assert all(f"{url}/{one}'" in str(error) for one in names), error
            dist.barrier()
    torch_dcpx.save(state(2), f"{url}/common/" if rank else f"{url}/common")
    target = {"weight": torch.zeros(3000)}
    torch_dcpx.load(target, f"{url}/common")
    assert_same(state_of(2)["weight"], target["weight"])
