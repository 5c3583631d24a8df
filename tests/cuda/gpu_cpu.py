"""The figures of save.py and load.py on this machine's cores, with files in memory."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[1] / "bench"
CANNOT_EXIT = 77
_COLUMNS = ["state", "side", "rounds", "s (min-max)", "speed of ours to it"]
_SIDES = {"save": ["ours", "dcpx", "stock", "safetensors"],
          "load": ["ours", "ours_unverified", "stock", "safetensors"]}  # fmt: skip


def main() -> int:
    mode = os.environ.get("ON_GPU_MODE", "quick")
    size = "smoke" if os.environ.get("ON_GPU_REHEARSAL") == "1" else "quick"
    memory = Path("/dev/shm")
    if size != "smoke" and shutil.disk_usage(memory).free < 3 << 30:
        print("CANNOT /dev/shm has less than 3 GiB")
        return CANNOT_EXIT
    with tempfile.TemporaryDirectory(
        dir=memory, prefix=os.environ.get("ON_GPU_PREFIX", "dcpx-") + "cpu-"
    ) as name:
        for bench in ("save", "load"):
            result = Path(name) / f"{bench}.json"
            command = [
                *(sys.executable, str(BENCH / f"{bench}.py"), "--size", size, "--no-meters"),
                *("--cases", "64mib", "64kib", "--folder", name, "--json", str(result)),
                *("--rounds", "3" if mode == "full" else "1", "--sides", *_sides(bench)),
            ]
            if bench == "save":
                command += ["--ranks", "1"]
            else:
                command += ["--caches", "warm"]
            print(f"$ {' '.join(command)}", flush=True)
            done = subprocess.run(command)
            if done.returncode != 0:
                print(f"REASON {bench}.py ended with {done.returncode}")
                return 1
            found = json.loads(result.read_text())
            print("FIGURES", json.dumps({_title(bench): table(found)}), flush=True)
    return 0


def _sides(bench: str) -> list[str]:
    try:
        import safetensors  # noqa: F401
    except ImportError:
        return [side for side in _SIDES[bench] if side != "safetensors"]
    return _SIDES[bench]


def _title(bench: str) -> str:
    return f"{bench}.py, files in memory"


def table(found: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns the times of all states, a row a side."""
    rows = []
    for result in found["results"]:
        times = result["times"]
        for side, seconds in times.items():
            median = statistics.median(seconds)
            spread = f"{median:.3g} ({min(seconds):.3g}-{max(seconds):.3g})"
            ratios = [b / a for a, b in zip(times["ours"], seconds, strict=False)]
            ratio = f"{statistics.median(ratios):.3g}" if side != "ours" and ratios else ""
            rows.append([result["case"], side, len(seconds), spread, ratio])
    return {"columns": _COLUMNS, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
