"""Copies from devices when the process ends, or is forked, while they are under way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import RunPython
from fake_cuda.fake import FakeCuda
from support.async_saves import assert_saved

pytestmark = pytest.mark.slow

BEGIN = """
import sys, torch
from pathlib import Path
from fake_cuda import seam
from fake_cuda.fake import HELD
from torch_dcpx import _C, DcpxStager, StagingError, UnsupportedError, WriteOptions, async_save
from torch_dcpx.staging.snapshot import stage_guarded
fake = seam.install()
source = torch.arange(500_000.0)
state = {"w": fake.device_tensor(source)}
options = WriteOptions(overlap=True)
"""

WANTED = {"w": torch.arange(500_000.0)}


@pytest.fixture
def environment(fake_cuda: FakeCuda) -> dict[str, str]:
    return fake_cuda.environment()


def test_exit_with_copies_under_way_waits_for_the_save(
    run_warm: RunPython, environment: dict[str, str], tmp_path: Path
) -> None:
    code = BEGIN + (
        "fake.set_pace(HELD)\n"
        "handle = async_save(state, sys.argv[1], no_dist=True, options=options)\n"
        "del state\n"
    )
    run_warm(code, str(tmp_path / "a"), env=environment)
    assert_saved(tmp_path / "a", WANTED)


def test_exit_with_copies_that_nobody_waits_for_is_an_exit(
    run_warm: RunPython, environment: dict[str, str]
) -> None:
    code = BEGIN + (
        "fake.set_pace(HELD)\n"
        "staged, guard = stage_guarded(list(state.values()))\n"
        "future = DcpxStager(overlap=True).stage(state)\n"
        "sys.exit(0)\n"
    )
    done = run_warm(code, env=environment)
    assert done.stderr == ""


def test_forked_child_refuses_and_the_parent_goes_on(
    run_warm: RunPython, environment: dict[str, str], tmp_path: Path
) -> None:
    code = BEGIN + (
        "import os\n"
        "stage_guarded(list(state.values()), overlap=False)\n"
        "fake.set_pace(HELD)\n"
        "handle = async_save(state, sys.argv[1], no_dist=True, options=options)\n"
        "staged, guard = stage_guarded(list(state.values()))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    refused = 0\n"
        "    for call in (handle.guard.wait, guard.wait, guard.finish, handle.result,\n"
        "                 lambda: _C.SourceEvents([(0, 0)])):\n"
        "        try:\n"
        "            call()\n"
        "        except (StagingError, UnsupportedError):\n"
        "            refused += 1\n"
        "    del handle, guard, staged\n"
        "    os._exit(refused)\n"
        "status = os.waitpid(pid, 0)[1]\n"
        "assert os.waitstatus_to_exitcode(status) in (4, 5), status\n"  # the save's may be done
        "guard.finish()\n"
        "assert torch.equal(staged[0], source)\n"
        "handle.result()\n"
    )
    run_warm(code, str(tmp_path / "a"), env=environment)
    assert_saved(tmp_path / "a", WANTED)
