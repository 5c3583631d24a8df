"""Times what the entry point of `torch.backends` adds to `import torch` without DCPX_INSTALL.

    python tests/bench/entry_point.py --rounds 30

Each round is a process of its own that has imported torch without entry points, and then does with
ours what torch does with each: load it, and call it. Prints milliseconds; the package must be
installed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

ROUND = """
import importlib.metadata, time, torch
(entry,) = importlib.metadata.entry_points(group="torch.backends", name="torch_dcpx")
start = time.perf_counter()
entry.load()()
print((time.perf_counter() - start) * 1e3)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    rounds: int = parser.parse_args().rounds
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DCPX_INSTALL": ""}
    # Installers compile modules; a source tree does it in the first round, which is not counted.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", ROUND]
    taken = [
        float(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
        for _ in range(rounds + 1)
    ][1:]
    # "inclusive": the other way tells of few rounds what none took, also less than nothing.
    low, *_, high = statistics.quantiles(taken, n=10, method="inclusive")
    print(f"median {statistics.median(taken):.3f} ms, 10th {low:.3f}, 90th {high:.3f}")


if __name__ == "__main__":
    main()
