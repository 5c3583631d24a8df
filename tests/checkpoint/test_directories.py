"""Ranks that save to different directories: the same one under two names, or a refusal.

Each case has a directory of its own, which both ranks look at before and after.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.rank_fixture import StartRanks

import torch_dcpx as dcpx
from torch_dcpx import DcpxWriter, PlanError
from torch_dcpx.storage.names import root_lock_number

RANK = int(os.environ.get("RANK", "0"))


def state_of(number: float) -> dict[str, Any]:
    """This rank's own tensor, and one that both have."""
    return {f"rank{RANK}": torch.full((1000,), number), "both": torch.full((70,), number)}


def save(path: str, number: float) -> None:
    dcpx.save(state_of(number), path)


def async_save(path: str, number: float) -> None:
    dcpx.async_save(state_of(number), path).result(seconds(60))


def manager_save(path: str, number: float) -> None:
    with dcpx.CheckpointManager(path) as manager:
        manager.save(int(number), state=state_of(number))


SAVES = (save, async_save, manager_save)


def listed(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def left_by(way: Callable[..., None], root: Path, before: list[str]) -> list[str]:
    """Returns what a save has left, but for a manager's note of who saves in its root."""
    left = [one for one in listed(root) if one not in before]
    if way is manager_save:
        left = [one for one in left if not (root / one).is_dir()]
        assert len(left) <= 1
        left = [one for one in left if root_lock_number(Path(one).name) is None]
    return left


def both(value: Any) -> list[Any]:
    """Returns what each rank has of it; whoever returns knows that the other came as far."""
    found: list[Any] = [None, None]
    dist.all_gather_object(found, value)
    return found


def different_directories_are_refused_and_nothing_is_left(top: Path) -> None:
    """A relative path where each rank works in a directory of its own, as Hydra makes them."""
    for way in SAVES:
        root = top / "different" / way.__name__
        here = root / f"rank{RANK}"
        here.mkdir(parents=True)
        os.chdir(here)
        both(None)
        before = both((f"{here}/outputs/ckpt", listed(root)))
        with pytest.raises(PlanError) as caught:
            way("outputs/ckpt", 1)
        said = str(caught.value)
        assert all(one in said for one, _ in before), f"{way.__name__}: {said}"
        assert "rank 0" in said and "rank 1" in said and "node_local=True" in said
        both(None)
        left = left_by(way, root, before[RANK][1])
        assert not left, f"{way.__name__}: {left}"
        both(None)
        os.chdir(top)
        way(str(root / "common"), 1)  # and the next one works


def one_directory_under_two_names_is_one(top: Path) -> None:
    for way in SAVES:
        root = top / "same" / way.__name__
        (root / "real").mkdir(parents=True, exist_ok=True)
        os.chdir(root)
        path = f"{root}/../{root.name}/real/ckpt"
        if RANK:
            (root / "link").symlink_to(root / "real")
            path = "link/ckpt"
        both(None)
        for step in (1, 1, 2):  # again over what is there, by plans that are kept
            way(path, step)
            found = state_of(0)
            if way is manager_save:
                dcpx.load({"state": found}, f"{path}/step-{step}")
            else:
                dcpx.load(found, path)
            assert all(torch.equal(found[k], v) for k, v in state_of(step).items()), way
        both(None)
        assert not [one for one in listed(root) if one.endswith(".tmp")], way
        os.chdir(top)


def dcp_save_refuses_nothing(top: Path) -> None:
    for _ in range(2):
        path = top / f"dcp{RANK}"
        dcp.save(state_of(1), storage_writer=DcpxWriter(path))
        assert list(path.glob("*.distcp"))


@pytest.mark.slow
@pytest.mark.multirank
def test_ranks_that_save_to_different_directories_are_refused_unless_they_say_so(
    ranks: StartRanks, tmp_path: Path
) -> None:
    for case in (
        different_directories_are_refused_and_nothing_is_left,
        one_directory_under_two_names_is_one,
        dcp_save_refuses_nothing,
    ):
        ranks(2)(case, tmp_path)
