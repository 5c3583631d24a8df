"""What a save promises to all nodes, on real file systems with two clients (`make test-dfs`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dfs.ceph import BUCKET, environment
from dfs.fixture import MOUNTED, TWO_CLIENTS, on
from dfs.system import System
from support.machine import points
from support.nodes import enter_node
from support.rank_fixture import StartRanks

import torch_dcpx as dcpx

Problems = list[str]


# ---- On each rank -------------------------------------------------------------------------------


def on_node(
    contract: Callable[..., None],
    mounts: list[Path],
    nodes: tuple[int, int],
    root: Path,
    *arguments: int,
) -> None:
    """Runs a contract on this rank's node, where the first mount's path shows its own mount."""
    node = nodes[dist.get_rank()]
    enter_node(node, mounts[0], mounts[node])
    contract(root, *arguments)


def state(value: int) -> dict[str, object]:
    return {f"w{dist.get_rank()}": torch.full((1 << 18,), float(value)), "v": value}


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
    tensor = found[f"w{dist.get_rank()}"]
    assert isinstance(tensor, torch.Tensor) and bool((tensor == found["v"]).all()), "a mix"
    return int(str(found["v"]))


def a_load_right_after_a_save_sees_it_on_each_node(root: Path, rounds: int) -> None:
    problems: Problems = []
    for value in range(rounds):
        for name in (f"new{value}", "same"):
            dcpx.save(state(value), root / name)
            check(problems, f"{name}, save {value}", lambda name=name: load(root / name), value)
    agree(problems, 4 * rounds)


def a_load_that_knows_no_save_gets_a_whole_one(root: Path, rounds: int) -> None:
    problems: Problems = []
    for value in range(rounds):
        found = {"w0": torch.full((1 << 20,), float(value)), "v": value}
        if dist.get_rank() == 0:
            dcpx.save(found, root / "one", no_dist=True)
        dist.barrier()

        def one(value: int = value) -> int:
            wanted = {"w0": torch.full((1 << 20,), -1.0), "v": -1}
            dcpx.load(wanted, root / "one", no_dist=True)
            tensor = wanted["w0"]
            assert isinstance(tensor, torch.Tensor) and bool((tensor == wanted["v"]).all()), "a mix"
            # A save that it does not know may not be seen yet: the one before is a whole one, too.
            return value if wanted["v"] == value - 1 else int(str(wanted["v"]))

        if dist.get_rank() == 1:
            check(problems, f"save {value}", one, value)
        dist.barrier()
    agree(problems, rounds)


def a_resume_right_after_a_save_takes_it(root: Path, rounds: int) -> None:
    problems: Problems = []
    with dcpx.CheckpointManager(root, keep_last=3) as manager:
        for step in range(1, rounds + 1):
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
    agree(problems, 2 * rounds)


def retention_keeps_two_and_removes_what_another_node_wrote(
    root: Path, first: int, last: int
) -> None:
    with dcpx.CheckpointManager(root, keep_last=2) as manager:
        if first > 1:
            found = state(-1)
            manager.resume(state=found)
            assert found["v"] == first - 1, found["v"]
        for step in range(first, last + 1):
            manager.save(step, state=state(step))
        manager.wait()
        tags = manager.tags()
    kept = {f"step-{step}" for step in (last - 1, last)}
    assert set(tags) == kept, tags
    give_up_at = time.monotonic() + 60
    while {name for name in os.listdir(root) if name.startswith("step-")} != kept:
        assert time.monotonic() < give_up_at, sorted(os.listdir(root))
        time.sleep(0.2)


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


# ---- The tests ----------------------------------------------------------------------------------


class Nodes:
    """Runs a contract on two ranks, each on a node."""

    def __init__(self, ranks: StartRanks, mounts: list[Path], root: Path) -> None:
        self._ranks, self._mounts, self._root = ranks, mounts, root

    def run(
        self, contract: Callable[..., None], *arguments: int, nodes: tuple[int, int] = (0, 1)
    ) -> None:
        ranks = self._ranks(2, anew=True)
        ranks(on_node, contract, self._mounts, nodes, self._root, *arguments)


@pytest.fixture
def nodes(ranks: StartRanks, system: System, place: str, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (system.mounts[0] / place).mkdir()
    return Nodes(ranks, system.mounts, system.mounts[0] / place)


@on(*TWO_CLIENTS)
def test_a_load_right_after_a_save_or_a_resave_sees_it_on_all_nodes(nodes: Nodes) -> None:
    nodes.run(a_load_right_after_a_save_sees_it_on_each_node, points(12))


@on(*TWO_CLIENTS)
def test_another_job_that_loads_right_after_a_resave_gets_a_whole_one(nodes: Nodes) -> None:
    nodes.run(a_load_that_knows_no_save_gets_a_whole_one, points(12))


@on(*TWO_CLIENTS)
def test_a_resume_right_after_each_save_takes_it_and_marks_nothing_as_damaged(
    nodes: Nodes,
) -> None:
    nodes.run(a_resume_right_after_a_save_takes_it, points(12))


@on(*TWO_CLIENTS)
def test_retention_from_the_other_node_removes_what_the_first_one_wrote(nodes: Nodes) -> None:
    nodes.run(retention_keeps_two_and_removes_what_another_node_wrote, 1, 3)
    nodes.run(retention_keeps_two_and_removes_what_another_node_wrote, 4, 6, nodes=(1, 0))


@on(*TWO_CLIENTS)
def test_a_mount_that_is_missing_on_a_node_is_an_error_of_the_first_save(
    ranks: StartRanks, system: System, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    nodes = Nodes(ranks, [system.mounts[0], tmp_path], system.mounts[0] / place)
    nodes.run(a_manager_on_directories_that_are_not_one_refuses_on_all_ranks)


@on(*MOUNTED)
def test_one_node_saves_saves_again_loads_and_resumes(system: System, place: str) -> None:
    save_load_and_resume(str(system.mounts[0] / place))


@on("rgw")
def test_ceph_gateway_takes_saves_over_a_save_and_a_manager(
    system: System, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    save_load_and_resume(f"s3://{BUCKET}/{place}")


def single(value: int) -> dict[str, object]:
    return {"w": torch.full((1 << 18,), float(value)), "v": value}


def save_load_and_resume(root: str) -> None:
    for value in range(3):
        dcpx.save(single(value), f"{root}/one", no_dist=True)
        found = single(-1)
        dcpx.load(found, f"{root}/one", no_dist=True)
        assert found["v"] == value
    with dcpx.CheckpointManager(f"{root}/many", keep_last=2, no_dist=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, state=single(step))
        manager.wait()
        assert manager.tags() == ["step-2", "step-3"]
    with dcpx.CheckpointManager(f"{root}/many", no_dist=True) as manager:
        found = single(-1)
        assert manager.resume(state=found).tag == "step-3"
        assert found["v"] == 3
