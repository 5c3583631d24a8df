"""A root that is renamed, mounted twice or left by an exec: who holds it, and who does no more."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from root_jobs import PROOFS, Job, elsewhere, locks, manager_of, put, save
from support.machine import seconds

from torch_dcpx import ConcurrentSaveError
from torch_dcpx.storage import root_lock
from torch_dcpx.storage.holder import Holder, now_text
from torch_dcpx.storage.names import root_lock_name
from torch_dcpx.storage.root_record import identity_of

# A job that becomes a launcher, whose child saves.
RESTARTED = """
import os, subprocess, sys, torch, torch_dcpx as dcpx
code, root = sys.argv[1:]
manager = dcpx.CheckpointManager(root, no_dist=True, async_save=False)
manager.save(1, state={"x": torch.ones(3)})
launch = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
os.execv(sys.executable, [sys.executable, "-c", launch, sys.executable, "-c", code, root])
"""
SAVES = """
import sys, torch, torch_dcpx as dcpx
from torch_dcpx.storage import root_lock
root_lock._ENDING_S = 0.0
dcpx.CheckpointManager(sys.argv[1], no_dist=True).save(2, state={"x": torch.ones(3)})
"""


@pytest.fixture(autouse=True)
def _proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PROOFS.items():
        monkeypatch.setattr(root_lock, name, value)


@pytest.mark.parametrize("goes_on", [True, False])
def test_renamed_root_is_given_back(tmp_path: Path, goes_on: bool) -> None:
    root, away = tmp_path / "run", tmp_path / "run.old"
    manager = manager_of(root)
    save(manager, 1)
    root.rename(away)
    if goes_on:
        save(manager, 2)
    else:
        manager.close()
    holder = Holder.decoded((away / root_lock_name(1)).read_bytes())
    assert holder is not None and holder.is_over
    with manager_of(away) as other:
        save(other, 3)


def test_holder_that_restarts_itself_by_exec_is_gone(tmp_path: Path) -> None:
    if identity_of(tmp_path).endswith("@0"):
        pytest.skip("this file system has no id: its flocks prove nothing")
    command = [sys.executable, "-c", RESTARTED, SAVES, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds(120))
    assert result.returncode == 0, result.stderr
    assert manager_of(tmp_path).tags() == ["step-1", "step-2"]


def test_holder_of_the_root_by_another_mount_lives(tmp_path: Path) -> None:
    """FUSE shows the inode without an id of the file system, and not the flock."""
    job = Job(tmp_path / "other")
    inode = identity_of(tmp_path).partition("@")[0]
    holder = Holder.own(f"{inode}@other")._replace(pid=job.process.pid, start="", has_flock=True)
    put(tmp_path, holder._replace(token="other"))
    with pytest.raises(ConcurrentSaveError, match=f"pid={job.process.pid} "):
        save(manager_of(tmp_path), 1)
    assert locks(tmp_path) == [root_lock_name(1)]
    job.kill()
    job.process.communicate()
    with manager_of(tmp_path) as manager:
        save(manager, 1)


def test_flock_tells_of_a_root_by_another_number(tmp_path: Path) -> None:
    """Some file systems in user space number what they hold anew at each mount."""
    put(tmp_path, Holder.own("inode:1@0")._replace(token="other", has_flock=True, space="pid:[1]"))
    with (tmp_path / root_lock_name(1)).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConcurrentSaveError, match=f"pid={os.getpid()} "):
            save(manager_of(tmp_path), 1)
    with manager_of(tmp_path) as manager:
        save(manager, 1)


def test_silence_adds_up_over_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, elsewhere())
    monkeypatch.setattr(root_lock, "_GONE_S", 1.5)
    monkeypatch.setattr(root_lock, "_LIMIT_S", 0.8)
    refusals = 0
    with manager_of(tmp_path) as manager:
        while not manager.tags() and refusals < 9:
            try:
                save(manager, 1)
            except ConcurrentSaveError:
                refusals += 1
                if refusals == 1:  # a renewal ends the silence
                    put(tmp_path, elsewhere(renewed=now_text()))
        assert (manager.tags(), refusals) == (["step-1"], 2)
