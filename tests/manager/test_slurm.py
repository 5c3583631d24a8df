"""The recipe for Slurm: a job that is ended by SIGTERM saves, is queued again, and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

FOLDER = ROOT / "examples" / "slurm"
_DEADLINE_S = 600.0
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> requeued; fi
"""
# What Slurm signals is the step, not the batch script.
SRUN = """#!/bin/bash
echo $$ > step.part && mv step.part step
exec "$@"
"""


class Cluster:
    """A directory that jobs run in, with commands of Slurm's names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def start(self, *arguments: object) -> subprocess.Popen[bytes]:
        (self.folder / "step").unlink(missing_ok=True)
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        slurm = {
            "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node", "SLURM_JOB_NUM_NODES": "1",
            "SLURM_SUBMIT_DIR": str(FOLDER), "RANKS_PER_NODE": "2", "PORT": "0",
        }  # fmt: skip
        with (self.folder / "output").open("w") as out:
            return subprocess.Popen(
                ["bash", str(FOLDER / "train.sbatch"), "run", *map(str, arguments)],
                cwd=self.folder, env={**os.environ, **slurm, "PATH": path, "OMP_NUM_THREADS": "1"},
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def run(self, *arguments: object) -> tuple[int, dict[int, float]]:
        """Returns the status of a job that nobody ends, and its losses."""
        job = self.start(*arguments)
        return job.wait(_DEADLINE_S), self.losses()

    def said(self) -> str:
        return (self.folder / "output").read_text()

    def losses(self) -> dict[int, float]:
        found = [json.loads(line) for line in self.said().splitlines() if line.startswith("{")]
        return {one["step"]: one["loss"] for one in found}

    def requeued(self) -> list[str]:
        file = self.folder / "requeued"
        return file.read_text().splitlines() if file.exists() else []

    def newest(self) -> int:
        tag: str = json.loads((self.folder / "run" / "ckpt" / "newest").read_text())["tag"]
        return int(tag.removeprefix("step-"))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_job_that_is_ended_goes_on_in_the_next_one(cluster: Cluster) -> None:
    job = cluster.start("--steps", 10**6, "--save-every", 10**6, "--step-s", 0.05)
    give_up_at = time.monotonic() + _DEADLINE_S
    while 3 not in cluster.losses():
        assert job.poll() is None and time.monotonic() < give_up_at, cluster.said()
        time.sleep(0.05)
    os.kill(int((cluster.folder / "step").read_text()), signal.SIGTERM)
    assert job.wait(_DEADLINE_S) == 0, cluster.said()
    ended, first = cluster.newest(), cluster.losses()
    assert max(first) == ended
    assert cluster.requeued() == ["requeue 42"]

    status, second = cluster.run("--steps", ended + 3, "--save-every", 2)
    assert status == 0, cluster.said()
    assert f"begins behind step {ended}\n" in cluster.said()
    assert min(second) == ended + 1 and cluster.newest() == ended + 3
    assert (cluster.folder / "run" / "finished").exists()
    assert cluster.requeued() == ["requeue 42"]

    (cluster.folder / "run").rename(cluster.folder / "other")
    status, whole = cluster.run("--steps", ended + 3)
    assert status == 0, cluster.said()
    assert whole == {**first, **second}


def test_job_that_fails_before_it_has_saved_is_not_queued_again(cluster: Cluster) -> None:
    status, _ = cluster.run("--steps", "many")
    assert status != 0 and "invalid int value: 'many'" in cluster.said()
    assert not cluster.requeued()
