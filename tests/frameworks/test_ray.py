"""Ray Train: workers that are lost begin again at the newest whole checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.frameworks import DEADLINE_S, Framework, check_all_ours


class Ray(Framework):
    """Runs of the example, each with a cluster of its own."""

    def __init__(self, folder: Path, cluster: str) -> None:
        super().__init__("ray", folder)
        self.variables = {"RAY_TMPDIR": cluster, "RAY_USAGE_STATS_ENABLED": "0"}

    def command(self, *arguments: object) -> list[str]:
        return [str(self.bin / "python"), str(self.script), *map(str, arguments)]


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[Ray]:
    with tempfile.TemporaryDirectory(prefix="ray-") as cluster:  # names of sockets are short
        yield Ray(tmp_path, cluster)


def _workers(cluster: str) -> list[int]:
    """Returns the processes that train in a cluster."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_worker = b"RayTrainWorker" in (process / "cmdline").read_bytes()
            if is_worker and cluster.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def test_lost_worker_has_all_go_on_from_the_newest_checkpoint(ray: Ray, tmp_path: Path) -> None:
    whole = ray.run(ray.command("whole"), hook=False, **ray.variables).result
    assert (whole["step"], whole["start"]) == (20, 0)
    assert whole["checkpoint"] == str(tmp_path / "whole" / "ckpt" / "step-20")

    witness = ray._witness()
    with (witness / "output").open("w") as output:
        process = subprocess.Popen(
            ray.command("lost", "--step-s", 0.5), cwd=tmp_path,
            env=ray._environment(witness, False, ray.variables),
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    end = time.monotonic() + DEADLINE_S
    while not (tmp_path / "lost" / "ckpt" / "step-10" / ".metadata").exists():
        assert process.poll() is None and time.monotonic() < end, (witness / "output").read_text()
        time.sleep(0.05)
    os.kill(_workers(ray.variables["RAY_TMPDIR"])[-1], signal.SIGKILL)
    assert process.wait(DEADLINE_S) == 0, (witness / "output").read_text()
    result = [line for line in (witness / "output").read_text().splitlines() if line[:1] == "{"]
    assert f'"loss": {whole["loss"]!r}' in result[-1]
    assert '"start": 10' in result[-1] or '"start": 15' in result[-1]
    check_all_ours(tmp_path / "lost" / "ckpt" / "step-20")


def test_commands_of_the_page_run(ray: Ray) -> None:
    for block in ray.commands():
        run = ray.run(["bash", "-euc", block], hook=False, **ray.variables)
        assert run.result["step"] == 20
