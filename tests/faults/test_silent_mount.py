"""A file system whose server stops: what waits for it raises, goes on, or is interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.machine import seconds

WORKER = Path(__file__).with_name("silent_mount_worker.py")
LIMITS = {"DCPX_EXIT_TIMEOUT_S": "5", "DCPX_SAVE_TIMEOUT_S": "2", "DCPX_LOAD_TIMEOUT_S": "2"}
pytestmark = [pytest.mark.root, pytest.mark.slow]


@contextmanager
def mounted(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A FUSE mount (bindfs) for the block, and the process that answers for it."""
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is missing: apt-get install bindfs")
    if not Path("/dev/fuse").exists():
        pytest.skip("there is no FUSE here (/dev/fuse)")
    stored, where = tmp_path / "stored", tmp_path / "fuse"
    stored.mkdir()
    where.mkdir()
    command = ["setpriv", "--pdeathsig", "KILL", "bindfs", "-f", str(stored), str(where)]
    with subprocess.Popen(command) as daemon:
        try:
            while str(where) not in Path("/proc/self/mountinfo").read_text():
                assert daemon.poll() is None
                time.sleep(0.01)
            yield where, daemon.pid
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
            daemon.terminate()
            daemon.wait(seconds(30))
            subprocess.run(["umount", "--lazy", str(where)], check=False, capture_output=True)


def environment() -> dict[str, str]:
    path = f"{WORKER.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "PYTHONPATH": path, **LIMITS}


def test_operations_on_a_mount_without_answers_raise_go_on_or_are_interrupted(
    tmp_path: Path,
) -> None:
    with mounted(tmp_path) as (where, daemon):
        result = subprocess.run(
            [sys.executable, WORKER, where, str(daemon)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=seconds(300),
            check=False,
        )  # it ends though its daemon is stopped again
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    said = result.stdout.splitlines()
    assert said.count("went on") == 1
    assert sum(line.startswith("interrupted and works") for line in said) == 4
    assert sum(line.startswith("raised and works") for line in said) == 16


LATE = """
import os, signal, sys, time
from pathlib import Path
import torch, torch_dcpx
state, place = {"w": torch.ones(1 << 20)}, Path(sys.argv[1])
torch_dcpx.save(state, place.parent / "local", no_dist=True)
print("imported", flush=True)
daemon = int(sys.stdin.readline())
torch_dcpx.save(state, place / "ckpt", no_dist=True)
os.kill(daemon, signal.SIGSTOP)
for call in (torch_dcpx.save, torch_dcpx.load):
    try:
        call(state, place / "ckpt", no_dist=True)
    except torch_dcpx.StorageError as error:
        print(error, flush=True)
"""


def test_mount_that_is_made_after_the_import_is_bounded_once_a_save_has_seen_it(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", LATE, str(tmp_path / "fuse")]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "imported\n"
            with mounted(tmp_path) as (where, daemon):
                said, _ = child.communicate(f"{daemon}\n", timeout=seconds(90))
        finally:
            child.kill()
    assert said.count(f"'{where}/ckpt") == said.count("no answer for") == 2, said
