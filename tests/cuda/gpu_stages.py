"""The stages of on_gpu.sh, most telling first: what each runs, and its seconds at most."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = {"quick": 240, "full": 480}
RESERVE_S = 4  # for the summary and the tables
BUILD_S = 150  # to build the package where no wheel was carried


class Stage(NamedTuple):
    """One command.

    Attributes:
        command: `{python}`, `{mode}`, `{out}` and `{seconds}` (a little less than its limit) are
            filled in.
        quick, full: seconds at most.
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


def _figures(name: str) -> list[str]:
    return _python(
        *("tests/bench/cuda.py", name, "--size", "{mode}", "--seconds", "{seconds}"),
        *("--json", f"{{out}}/{name}.json"),
    )


STAGES = [
    Stage("install", "the package", _python("tests/cuda/gpu_install.py"), 15, 20, needs=""),
    Stage("doctor", "driver, torch, dcpx doctor", _python("tests/cuda/gpu_doctor.py"), 15, 15),
    Stage("tests", "the cuda tests, one by one", _python("tests/cuda/gpu_tests.py"), 65, 90),
    Stage("fsdp", "FSDP2: kill in a save, resume", _python("tests/cuda/fsdp_killed.py"), 30, 45),
    Stage("moves", "to the host and back", _figures("moves"), 30, 110),
    Stage("stalls", "stalls, steps beside a save", _figures("stalls"), 20, 40),
    Stage("pinning", "page-locking", _figures("pinning"), 12, 25),
    Stage("pack", "the kernel, merged, batched", _figures("pack"), 12, 25),
    Stage("sanitizer", "compute-sanitizer", _python("tests/cuda/gpu_sanitizer.py"), 20, 50),
    Stage("cpu", "save.py, load.py in memory", _python("tests/cuda/gpu_cpu.py"), 15, 55),
]


def read_plan(path: Path) -> list[Stage]:
    """Returns stages from a JSON file: a list of objects with `Stage`'s names."""
    return [Stage(**{"title": "", "needs": "", **one}) for one in json.loads(path.read_text())]


def filled(stage: Stage, python: str, mode: str, out: Path, limit_s: float) -> list[str]:
    """Returns the stage's command."""
    values = {
        "python": python, "mode": mode, "out": str(out),
        "seconds": f"{max(limit_s - 4, 1):.0f}",
    }  # fmt: skip
    parts = stage.command
    for name, value in values.items():
        parts = [part.replace(f"{{{name}}}", value) for part in parts]
    return parts


def environment(site: Path, out: Path, mode: str, limit_s: float, stretch: float) -> dict[str, str]:
    """Returns what a stage's process has besides this one's environment."""
    paths = [str(site), str(ROOT / "tests")]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([str(site / "bin"), os.environ.get("PATH", os.defpath)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_WAIT_POLICY": "passive",
        "DCPX_SLOWNESS": os.environ.get("DCPX_SLOWNESS", "1"),  # 5 s to measure, each process
        "ON_GPU_SITE": str(site),
        "ON_GPU_OUT": str(out),
        "ON_GPU_MODE": mode,
        "ON_GPU_LIMIT_S": f"{limit_s:.0f}",
        "ON_GPU_STRETCH": str(stretch),
    }
