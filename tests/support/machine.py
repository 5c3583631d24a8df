"""How slow this machine is: tests take the number of points of a sweep, and deadlines, from that.

1.0 is one of two idle cores of a fast machine; 3.0 takes three times as long, be it old, as the one
that tests/durations.json was measured on, or busy. It is measured once, at the start of a run, and
handed on in the environment: DCPX_SLOWNESS. As a program, without torch or pytest, it prints it:

    python tests/support/machine.py
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SLOWNESS = "DCPX_SLOWNESS"
_MEASURED_S = 5.0
_UNITS_PER_S = 84.0  # of a process, on two idle cores of a fast machine
_PROCESSES = max(2, min(8, len(os.sched_getaffinity(0))))  # each a core of its own

# Sweeps try every point, not as many as the machine has time for: minutes to hours.
EVERY_POINT = os.environ.get("DCPX_EVERY_POINT", "") not in ("", "0")


@functools.cache
def slowness() -> float:
    """Returns how many times longer this machine takes; at the first call that may take 5 s.

    Raises:
        ValueError: DCPX_SLOWNESS is no such number.
    """
    given = os.environ.get(SLOWNESS)
    if given is None:
        given = os.environ[SLOWNESS] = f"{measured():.2f}"
    try:
        found = float(given)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ValueError(f"{SLOWNESS}={given!r}: expected a number above 0, such as 1.5")
    return found


def seconds(idle: float) -> float:
    """Returns a deadline for work to which an idle machine gives `idle` seconds."""
    return idle * max(1.0, slowness())


def points(idle: int) -> int:
    """Returns how many points a sweep tries in the time in which an idle machine tries `idle`."""
    return max(1, round(idle / slowness()))


def stride(idle: int) -> int:
    """Returns the distance between a sweep's points, where an idle machine's is `idle`."""
    return max(1, round(idle * slowness()))


def spread(most: int, seed: int, idle: int = 1) -> list[int]:
    """Returns the numbers below `most` that a sweep tries: 0, and from one that the seed chooses
    each `stride(idle)`-th."""
    step = stride(idle)
    return [0, *range(seed % step or step, most, step)]


def measured() -> float:
    """Returns the machine's slowness now: of processes that compute, start others, write, fsync."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder]
        working = [
            subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True)
            for n in range(_PROCESSES)
        ]
        done = [int(process.communicate(timeout=600)[0]) for process in working]
    return _UNITS_PER_S * _MEASURED_S * len(done) / max(1, sum(done))


def _work(path: Path) -> int:
    """Returns how many units of work fit into the time."""
    block = os.urandom(1 << 20)
    until, units = time.monotonic() + _MEASURED_S, 0
    while time.monotonic() < until:
        hashlib.sha256(block).hexdigest()
        len({str(number): number for number in range(20_000)})
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)
        with path.open("wb") as file:
            file.write(block)
            os.fsync(file.fileno())
        units += 1
    return units


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(_work(Path(*sys.argv[1:])))
    else:
        print(f"{measured():.2f}")
