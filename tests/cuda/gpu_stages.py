"""The stages of on_gpu.sh, most telling first: what each runs, and its seconds at most."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from gpu_runner import OVERTIME_S

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = {"quick": 240, "full": 480}
RESERVE_S = OVERTIME_S + 1  # for the last stage to be ended, and the tables
PREFIX = f"dcpx-{os.getpid()}-"  # of the folders that stages make in memory and in /tmp
BUILD_S = 150  # to build the package where no wheel was carried


class Stage(NamedTuple):
    """One command.

    Attributes:
        command: `{python}`, `{mode}` and `{seconds}` (a little less than its limit) are filled in.
        quick, full: seconds at most. What a stage leaves over is the next ones'.
        needs: the stage without whose success it cannot run.
    """

    name: str
    title: str
    command: list[str]
    quick: float
    full: float
    needs: str = "install"

    def limit(self, mode: str) -> float:
        return self.quick if mode == "quick" else self.full


def _python(script: str, *arguments: str) -> list[str]:
    return ["{python}", script, *arguments]


def _figures(*kinds: str) -> list[str]:
    return _python("tests/bench/cuda.py", *kinds, "--size", "{mode}", "--seconds", "{seconds}")


STAGES = [
    Stage("install", "the package", _python("tests/cuda/gpu_install.py"), 35, 35, needs=""),
    Stage("doctor", "driver, torch, dcpx doctor", _python("tests/cuda/gpu_doctor.py"), 40, 40),
    Stage("tests", "the cuda tests, one by one", _python("tests/cuda/gpu_tests.py"), 65, 90),
    Stage("fsdp", "FSDP2: kill in a save, resume", _python("tests/cuda/fsdp_killed.py"), 35, 55),
    Stage("moves", "to the host and back", _figures("moves"), 30, 200),
    Stage("stalls", "stalls, steps beside a save", _figures("stalls"), 20, 40),
    Stage("pack", "page-locking; the kernel, batches", _figures("pinning", "pack"), 24, 45),
    Stage("sanitizer", "compute-sanitizer", _python("tests/cuda/gpu_sanitizer.py"), 40, 60),
    Stage("cpu", "save.py, load.py in memory", _python("tests/cuda/gpu_cpu.py"), 30, 60),
]


def read_plan(path: Path) -> list[Stage]:
    """Returns stages from a JSON file: a list of objects with `Stage`'s names."""
    return [Stage(**{"title": "", "needs": "", **one}) for one in json.loads(path.read_text())]


def filled(stage: Stage, python: str, mode: str, limit_s: float) -> list[str]:
    """Returns the stage's command."""
    values = {"python": python, "mode": mode, "seconds": f"{max(limit_s - 2, 1):.0f}"}
    parts = stage.command
    for name, value in values.items():
        parts = [part.replace(f"{{{name}}}", value) for part in parts]
    return parts


def environment(site: Path, mode: str, limit_s: float, stretch: float) -> dict[str, str]:
    """Returns what a stage's process has besides this one's environment."""
    paths = [str(site), str(ROOT / "tests")]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([str(site / "bin"), os.environ.get("PATH", os.defpath)]),
        "OMP_WAIT_POLICY": "passive",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "DCPX_SLOWNESS": os.environ.get("DCPX_SLOWNESS", "1"),  # 5 s to measure, each process
        "ON_GPU_SITE": str(site),
        "ON_GPU_PREFIX": PREFIX,
        "ON_GPU_MODE": mode,
        "ON_GPU_LIMIT_S": f"{limit_s:.0f}",
        "ON_GPU_STRETCH": str(stretch),
    }
