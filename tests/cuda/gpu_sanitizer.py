"""Runs compute-sanitizer's memcheck and racecheck on the pack kernel and on one save, side by side.

`COMPUTE_SANITIZER` names another program than that of PATH (a rehearsal's stand-in).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CANNOT_EXIT = 77
ERROR_EXIT = 9
_TOOLKIT = "/usr/local/cuda/bin/compute-sanitizer"
_REFUSALS = ("Device not supported", "not supported on this", "Unable to find injection library",
             "ERR_NVGPUCTRPERM", "Failed to initialize")  # fmt: skip
RUNS = [(tool, what) for what in ("pack", "save") for tool in ("memcheck", "racecheck")]


def command(program: str, tool: str, what: str) -> list[str]:
    """Returns the command line of one run."""
    options = ["--tool", tool, "--error-exitcode", str(ERROR_EXIT), "--print-limit", "20"]
    if tool == "memcheck":
        # What the driver refuses is ours to handle: a probe of an address is no error.
        options += ["--report-api-errors", "no"]
    return [program, *options, sys.executable, str(FOLDER / "sanitized.py"), what]


def judge(status: int | None, text: str) -> tuple[str, str]:
    """Returns what a run came to, and why."""
    # Of memcheck "ERROR SUMMARY: 0 errors", of racecheck "RACECHECK SUMMARY: 0 hazards ...".
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)", text)
    if found and int(found[1]):
        return "failed", found[0]
    if status == 0 and found:
        return "ok", ""
    refusal = next((line for line in text.splitlines() if any(r in line for r in _REFUSALS)), "")
    if refusal:
        return "cannot", refusal.strip("= ")
    if status is None:
        return "timed out", "killed"
    return "failed", f"ended with {status}, {found[0] if found else 'no summary'}"


def run(program: str, tool: str, what: str, give_up_at: float) -> tuple[str, str, str]:
    arguments = command(program, tool, what)
    try:
        done = subprocess.run(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(give_up_at - time.monotonic(), 1),
        )
        status: int | None = done.returncode
        text = done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        status, text = None, (late.stdout or b"").decode(errors="replace")
    outcome, reason = judge(status, text)
    print(f"$ {' '.join(arguments)}\n{text[-6000:]}\n{tool} {what}: {outcome} {reason}", flush=True)
    return f"{tool} {what}", outcome, reason


def main() -> int:
    program = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer") or _TOOLKIT
    if not Path(program).exists():
        print("CANNOT compute-sanitizer: not found")
        return CANNOT_EXIT
    give_up_at = time.monotonic() + float(os.environ.get("ON_GPU_LIMIT_S", "120")) - 3
    with ThreadPoolExecutor(len(RUNS)) as pool:
        waiting = [pool.submit(run, program, tool, what, give_up_at) for tool, what in RUNS]
        found = [one.result() for one in waiting]
    outcomes = {name: f"{outcome} {reason}".strip() for name, outcome, reason in found}
    short = "; ".join(f"{name}: {outcome}" for name, outcome in outcomes.items())
    print("FIGURES", json.dumps({"short": short, "runs": outcomes}), flush=True)
    kinds = {outcome for _, outcome, _ in found}
    if kinds - {"ok", "cannot"}:
        print(f"REASON {short}")
        return 1
    if "cannot" in kinds:
        print(f"CANNOT {next(reason for _, outcome, reason in found if outcome == 'cannot')}")
        return CANNOT_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
