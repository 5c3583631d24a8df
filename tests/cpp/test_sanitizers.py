"""The C++ tests under sanitizers, as `make test-cpp` runs them: a slow test a binary."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from support.machine import points

CPP = Path(__file__).parent
OUT = ROOT / "build" / "cpp"


def make(target: str) -> None:
    """Fails where `make TARGET` in tests/cpp does, with what it printed."""
    done = subprocess.run(
        ["make", "--no-print-directory", f"-j{len(os.sched_getaffinity(0))}", target],
        cwd=CPP, env={**os.environ, "DCPX_FUZZ_ROUNDS": str(points(2500))},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)  # the first one compiles csrc
@pytest.mark.parametrize("sanitizer", ["asan", "tsan"])
def test_the_sanitizers_find_nothing(sanitizer: str) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "lock").open("w") as lock:  # the two take the same objects of csrc
        fcntl.flock(lock, fcntl.LOCK_EX)
        make(f"{os.path.relpath(OUT, CPP)}/{sanitizer}/suite")
    make(sanitizer)
