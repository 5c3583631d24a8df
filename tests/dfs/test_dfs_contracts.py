"""What a save promises to all nodes, on real file systems with two clients (`make test-dfs`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from dfs.ceph import BUCKET, environment
from dfs.fixture import MOUNTED, TWO_CLIENTS, on
from dfs.system import System
from support.machine import points
from support.ranks import run_cases

import torch_dcpx as dcpx

WORKER = Path(__file__).with_name("contracts_worker.py")


class Nodes:
    """Runs cases of contracts_worker.py on two ranks, each on a node."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mounts: list[Path], root: Path) -> None:
        self._patch, self._root = monkeypatch, root
        self._patch.setenv("DFS_MOUNTS", ":".join(map(str, mounts)))
        self._patch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def run(self, case: str, *arguments: object, nodes: str = "0,1") -> None:
        self._patch.setenv("DFS_NODES", nodes)
        run_cases(WORKER, 2, case, self._root, *arguments)


@pytest.fixture
def nodes(system: System, place: str, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    (system.mounts[0] / place).mkdir()
    return Nodes(monkeypatch, system.mounts, system.mounts[0] / place)


@on(*TWO_CLIENTS)
def test_a_load_right_after_a_save_or_a_resave_sees_it_on_all_nodes(nodes: Nodes) -> None:
    nodes.run("load", points(12))


@on(*TWO_CLIENTS)
def test_another_job_that_loads_right_after_a_resave_gets_a_whole_one(nodes: Nodes) -> None:
    nodes.run("load-elsewhere", points(12))


@on(*TWO_CLIENTS)
def test_a_resume_right_after_each_save_takes_it_and_marks_nothing_as_damaged(
    nodes: Nodes,
) -> None:
    nodes.run("resume", points(12))


@on(*TWO_CLIENTS)
def test_retention_from_the_other_node_removes_what_the_first_one_wrote(nodes: Nodes) -> None:
    nodes.run("retention", 1, 3)
    nodes.run("retention", 4, 6, nodes="1,0")


@on(*TWO_CLIENTS)
def test_a_mount_that_is_missing_on_a_node_is_an_error_of_the_first_save(
    system: System, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(monkeypatch, [system.mounts[0], tmp_path], system.mounts[0] / place)
    nodes.run("not-shared")


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


def save_load_and_resume(root: str) -> None:
    import torch

    def state(value: int) -> dict[str, object]:
        return {"w": torch.full((1 << 18,), float(value)), "v": value}

    for value in range(3):
        dcpx.save(state(value), f"{root}/one", no_dist=True)
        found = state(-1)
        dcpx.load(found, f"{root}/one", no_dist=True)
        assert found["v"] == value
    with dcpx.CheckpointManager(f"{root}/many", keep_last=2, no_dist=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, state=state(step))
        manager.wait()
        assert manager.tags() == ["step-2", "step-3"]
    with dcpx.CheckpointManager(f"{root}/many", no_dist=True) as manager:
        found = state(-1)
        assert manager.resume(state=found).tag == "step-3"
        assert found["v"] == 3
