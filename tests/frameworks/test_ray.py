"""Ray Train: workers that are lost begin again at the newest whole checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from support.frameworks import DEADLINE_S, Framework, check_all_ours


class Ray(Framework):
    """Runs of the example, each with a cluster of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__("ray", folder)
        self.variables = {"RAY_TMPDIR": str(folder / "ray"), "RAY_USAGE_STATS_ENABLED": "0"}

    def command(self, *arguments: object) -> list[str]:
        return [str(self.bin / "python"), str(self.script), *map(str, arguments)]


def _workers(folder: Path) -> list[int]:
    """Returns the processes that train in runs beneath a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_worker = b"RayTrainWorker" in (process / "cmdline").read_bytes()
            if is_worker and str(folder).encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def test_lost_worker_has_all_go_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    ray = Ray(tmp_path)
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
    os.kill(_workers(tmp_path)[-1], signal.SIGKILL)
    assert process.wait(DEADLINE_S) == 0, (witness / "output").read_text()
    result = [line for line in (witness / "output").read_text().splitlines() if line[:1] == "{"]
    assert f'"loss": {whole["loss"]!r}' in result[-1]
    assert '"start": 10' in result[-1] or '"start": 15' in result[-1]
    check_all_ours(tmp_path / "lost" / "ckpt" / "step-20")


def test_commands_of_the_page_run(tmp_path: Path) -> None:
    ray = Ray(tmp_path)
    for block in ray.commands():
        run = ray.run(["bash", "-euc", block], hook=False, **ray.variables)
        assert run.result["step"] == 20
