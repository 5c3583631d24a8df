"""Runs power_cuts.py for the tests, and says why where it cannot run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.call_shim import compiled, preloaded
from support.machine import EVERY_POINT, seconds

DRIVER = Path(__file__).with_name("power_cuts.py")
FILE_SYSTEMS = ["ext4", "xfs"]
MODES = {1: "journal flushed", 2: "journal not flushed"}  # of FS_IOC_SHUTDOWN
TIMEOUT_S = seconds(3000 if EVERY_POINT else 1150)


def cut(folder: Path, kind: str, sweeps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the sweeps (power_cuts.sweep) with their points: [call, its name, found, is bad]."""
    for tool, package in (("mkfs.ext4", "e2fsprogs"), ("mkfs.xfs", "xfsprogs")):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: apt-get install {package}")
    if not Path("/dev/loop-control").exists():
        pytest.skip("there are no loop devices (/dev/loop-control)")
    library = compiled(folder)
    result = subprocess.run(
        ["unshare", "--mount", "--propagation", "private",
         sys.executable, DRIVER, library, folder, kind, json.dumps(sweeps)],
        env={**preloaded(library), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == len(sweeps)
    return found


def table(kind: str, found: list[dict[str, Any]]) -> str:
    """Returns a line a sweep: file system, way of cutting, save, points, bad ones."""
    lines = [f"{'fs':5}{'cut':21}{'save':38}{'mutant':33}{'points':>7}{'bad':>5}"]
    for sweep in found:
        bad = [point for point in sweep["points"] if point[3]]
        lines.append(
            f"{kind:5}{MODES[sweep['mode']]:21}{sweep['scenario']:38}"
            f"{sweep.get('mutant') or '-':33}{len(sweep['points']):7}{len(bad):5}"
        )
        lines += [f"     before '{at}': {text}" for _, at, text, _ in bad[:3]]
    return "\n".join(lines)
