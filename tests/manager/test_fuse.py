"""Removals on a real FUSE mount (bindfs), which keeps an open file under a name of its own.

Such a file system, like NFS, cannot remove what somebody has open: it renames the file
(`.fuse_hidden...`), and the directory is not empty until the file is closed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.call_shim import compiled
from support.machine import seconds, stride
from test_killed_manager import rows_of
from trainings import Log, manager_of, on_disk, save_steps, warnings_of

from torch_dcpx.storage.names import root_lock_number

pytestmark = pytest.mark.root


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[Path]:
    """An empty directory on a FUSE mount. bindfs unmounts it as the test ends, or its process."""
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is missing: apt-get install bindfs")
    if not Path("/dev/fuse").exists():
        pytest.skip("there is no FUSE here (/dev/fuse)")
    stored, where = tmp_path / "stored", tmp_path / "fuse"
    stored.mkdir()
    where.mkdir()
    command = ["setpriv", "--pdeathsig", "TERM", "bindfs", "-f", str(stored), str(where)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as daemon:
        try:
            while not where.is_mount():
                if daemon.poll() is not None:
                    pytest.fail(f"bindfs: {daemon.communicate()[1]}")
                time.sleep(0.01)
            yield where
        finally:
            daemon.terminate()  # and so it unmounts
            try:
                daemon.wait(seconds(30))
            finally:
                if where.is_mount():
                    subprocess.run(
                        ["umount", "--lazy", str(where)], check=True, timeout=seconds(60)
                    )
    assert not where.is_mount()


def names(root: Path) -> set[str]:
    """Names in a directory, apart from the file that says who saves there."""
    return {path.name for path in root.iterdir() if root_lock_number(path.name) is None}


@pytest.mark.usefixtures("no_leaks")
def test_retention_and_delete_on_fuse_leave_and_say_nothing(fuse: Path, caplog: Log) -> None:
    manager = manager_of(fuse, keep_last=2)
    for step in range(1, 5):
        save_steps(manager, step)
        kept = {f"step-{each}" for each in (step - 1, step) if each}
        assert names(fuse) == {"newest", *kept}
    manager.delete(3)
    assert names(fuse) == {"newest", "step-4"}
    manager.close()
    assert warnings_of(caplog) == []
    assert names(fuse / "step-4") >= {".metadata"}


def test_data_file_that_is_open_on_fuse_goes_with_the_next_retention(
    fuse: Path, caplog: Log
) -> None:
    manager = manager_of(fuse, keep_last=1)
    save_steps(manager, 1)
    with next((fuse / "step-1").glob("*.distcp")).open("rb"):  # a stock reader: it holds no lock
        save_steps(manager, 2)
        assert on_disk(fuse) == {"step-1", "step-2"}
        assert manager.tags() == ["step-2"]
    save_steps(manager, 3)
    assert names(fuse) == {"newest", "step-3"}
    assert warnings_of(caplog) == []


def test_lock_file_that_is_open_on_fuse_does_not_fail_a_delete(fuse: Path, caplog: Log) -> None:
    manager = manager_of(fuse)
    save_steps(manager, 1, 2, 3)
    with (fuse / "step-1" / ".dcpx.lock").open("rb"):
        manager.delete(1)
        assert manager.tags() == ["step-2", "step-3"]
    save_steps(manager, 4)
    assert on_disk(fuse) == {"step-2", "step-3", "step-4"}
    assert warnings_of(caplog) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_any_call_on_fuse_leaves_a_whole_checkpoint_or_trash_that_retention_removes(
    fuse: Path, tmp_path: Path, seed: int
) -> None:
    step = 1 if os.environ.get("DCPX_MANAGER_KILLS") == "all" else stride(17) | 1
    rows = rows_of(compiled(tmp_path), fuse, "sweep on FUSE", seed % step, step, 0)
    assert rows[-1][1] == 0 and len(rows) > 200 // step
    assert (rows[0][2], rows[-1][2]) == (3, 6)
