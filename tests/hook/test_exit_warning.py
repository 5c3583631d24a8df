"""The WARNING of a process that ends with the hook on and nothing replaced: not for one that does
not train, or whose saves another process makes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.machine import seconds

WARNING = "the hook of torch-dcpx was on, but nothing in this process made"

# A training that saves nothing itself, in several ways; each of them makes a planner at most.
SCRIPT = """
import os, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.utils.data import DataLoader

def nothing():
    pass

def loader(how):
    data = DataLoader(range(4), num_workers=2, multiprocessing_context=how)
    assert len(list(data)) == 4
    dcp.DefaultSavePlanner()  # only the workers made nothing

def forked():
    child = os.fork()
    if not child:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    dcp.DefaultSavePlanner()

def process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    metadata = dcp.async_save(
        {"w": torch.ones(3)}, checkpoint_id=sys.argv[2], async_stager=BlockingAsyncStager(),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    ).result()
    print(f"replaced {sorted(metadata.dcpx_report.replaced)}")  # in one piece: others print, too

def rank():
    dcp.DefaultSavePlanner()

if __name__ == "__main__":
    name, *given = sys.argv[1].split()
    globals()[name](*given)
    print(f"end of {name}")
"""


def output_of(tmp_path: Path, name: str, *before: str) -> str:
    """Returns what SCRIPT prints, with the hook on, and asserts that it ends well."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, *before, str(script), name, str(tmp_path / "saved")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=seconds(600),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    assert f"end of {name.split()[0]}" in ended.stdout, ended.stdout
    return ended.stdout


@pytest.fixture(autouse=True)
def hooked(hook_off: None, entry_point: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPX_INSTALL", "1")


def test_process_that_made_nothing_is_warned_once(tmp_path: Path) -> None:
    assert output_of(tmp_path, "nothing").count(WARNING) == 1


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_workers_of_a_data_loader_are_not_warned(tmp_path: Path, how: str) -> None:
    assert WARNING not in output_of(tmp_path, f"loader {how}")


def test_forked_child_is_not_warned(tmp_path: Path) -> None:
    assert WARNING not in output_of(tmp_path, "forked")


def test_training_whose_saves_are_another_process_is_not_warned(tmp_path: Path) -> None:
    said = output_of(tmp_path, "process")
    # torch 2.9 makes the writer in the process that trains.
    assert "replaced ['planners', 'writer']" in said or "replaced ['planners']" in said
    assert WARNING not in said


def test_agent_of_torchrun_is_not_warned(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    assert WARNING not in output_of(tmp_path, "rank", *launcher)
