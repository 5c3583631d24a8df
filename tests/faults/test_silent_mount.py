"""A file system whose server stops: what waits for it raises, goes on, or is interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.machine import seconds

WORKER = Path(__file__).with_name("silent_mount_worker.py")
pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A FUSE mount (bindfs), and the process that answers for it."""
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


def test_operations_on_a_mount_without_answers_raise_go_on_or_are_interrupted(
    mount: tuple[Path, int],
) -> None:
    where, daemon = mount
    path = f"{WORKER.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    result = subprocess.run(
        [sys.executable, WORKER, where, str(daemon)],
        env={**os.environ, "PYTHONPATH": path, "DCPX_EXIT_TIMEOUT_S": "5"},
        capture_output=True,
        text=True,
        timeout=seconds(300),
        check=False,
    )  # it ends though its daemon is stopped again
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    said = result.stdout.splitlines()
    assert said.count("interrupted and works") == said.count("went on") == 1
    assert sum(line.startswith("raised and works") for line in said) == 8
