"""Ranks that are nodes of their own: what each save promises to whoever looks right after it.

DFS_MOUNTS: the mounts of the nodes, ":" between them; DFS_NODES: the node of each rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from support.nodes import enter_node

RANK = int(os.environ["RANK"])
_MOUNTS = os.environ["DFS_MOUNTS"].split(":")
_NODE = int(os.environ["DFS_NODES"].split(",")[RANK])
enter_node(_NODE, _MOUNTS[0], _MOUNTS[_NODE])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from support.worker import rank_case  # noqa: E402

import torch_dcpx as dcpx  # noqa: E402

Problems = list[str]


def state(value: int) -> dict[str, object]:
    return {f"w{RANK}": torch.full((1 << 18,), float(value)), "v": value}


def check(problems: Problems, what: str, load: Callable[[], int], value: int) -> None:
    """Notes what a load raises, and an old value."""
    try:
        found = load()
        if found != value:
            problems.append(f"{what}: {found}, expected {value}")
    except Exception as error:  # noqa: BLE001 -- all are shown
        problems.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")


def agree(problems: Problems, of: int) -> None:
    """Fails on all ranks if anything was wrong on any."""
    everybody: list[Problems] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, problems)
    told = [f"rank {rank}: {one}" for rank, each in enumerate(everybody) for one in each]
    assert not told, f"{len(told)} of {of} went wrong:\n  " + "\n  ".join(told)


def load(path: Path, *, no_dist: bool = False, value: int = -1) -> int:
    found = state(value)
    dcpx.load(found, path, no_dist=no_dist)
    tensor = found[f"w{RANK}"]
    assert isinstance(tensor, torch.Tensor) and bool((tensor == found["v"]).all()), "a mix"
    return int(str(found["v"]))


@rank_case("load")
def a_load_right_after_a_save_sees_it_on_each_node(root: Path, rounds: str) -> None:
    problems: Problems = []
    for value in range(int(rounds)):
        for name in (f"new{value}", "same"):
            dcpx.save(state(value), root / name)
            check(problems, f"{name}, save {value}", lambda name=name: load(root / name), value)
    agree(problems, 4 * int(rounds))


@rank_case("load-elsewhere")
def a_load_that_knows_no_save_gets_a_whole_one(root: Path, rounds: str) -> None:
    problems: Problems = []
    for value in range(int(rounds)):
        found = {"w0": torch.full((1 << 20,), float(value)), "v": value}
        if RANK == 0:
            dcpx.save(found, root / "one", no_dist=True)
        dist.barrier()

        def one(value: int = value) -> int:
            wanted = {"w0": torch.full((1 << 20,), -1.0), "v": -1}
            dcpx.load(wanted, root / "one", no_dist=True)
            tensor = wanted["w0"]
            assert isinstance(tensor, torch.Tensor) and bool((tensor == wanted["v"]).all()), "a mix"
            # A save that it does not know may not be seen yet: the one before is a whole one, too.
            return value if wanted["v"] == value - 1 else int(str(wanted["v"]))

        if RANK == 1:
            check(problems, f"save {value}", one, value)
        dist.barrier()
    agree(problems, int(rounds))


@rank_case("resume")
def a_resume_right_after_a_save_takes_it(root: Path, rounds: str) -> None:
    problems: Problems = []
    with dcpx.CheckpointManager(root, keep_last=3) as manager:
        for step in range(1, int(rounds) + 1):
            manager.save(step, state=state(step))
            manager.wait()

            def resumed() -> int:
                found = state(-1)
                manager.resume(state=found)
                return int(str(found["v"]))

            check(problems, f"step {step}", resumed, step)
    pointer = (root / "newest").read_text()
    assert "damaged" not in pointer or '"damaged": {}' in pointer or '"damaged": []' in pointer, (
        pointer
    )
    agree(problems, 2 * int(rounds))


@rank_case("retention")
def retention_keeps_two_and_removes_what_another_node_wrote(
    root: Path, first: str, last: str
) -> None:
    with dcpx.CheckpointManager(root, keep_last=2) as manager:
        if int(first) > 1:
            found = state(-1)
            manager.resume(state=found)
            assert found["v"] == int(first) - 1, found["v"]
        for step in range(int(first), int(last) + 1):
            manager.save(step, state=state(step))
        manager.wait()
        tags = manager.tags()
    kept = {f"step-{step}" for step in (int(last) - 1, int(last))}
    assert set(tags) == kept, tags
    give_up_at = time.monotonic() + 60
    while {name for name in os.listdir(root) if name.startswith("step-")} != kept:
        assert time.monotonic() < give_up_at, sorted(os.listdir(root))
        time.sleep(0.2)


@rank_case("not-shared")
def a_manager_on_directories_that_are_not_one_refuses_on_all_ranks(root: Path) -> None:
    with dcpx.CheckpointManager(root, keep_last=2) as manager:
        try:
            manager.save(1, state=state(1))
            manager.wait()
        except dcpx.PlanError as error:
            said = str(error)
        else:
            said = "returned"
    everybody = [""] * dist.get_world_size()
    dist.all_gather_object(everybody, said)
    assert all("node" in one and str(root) in one for one in everybody), everybody
    assert not (root / "step-1" / ".metadata").exists()
