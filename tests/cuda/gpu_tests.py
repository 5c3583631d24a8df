"""Runs each `cuda` test in a process of its own, several at once: a crash of one loses no other.

Tests that look at the whole device, marked `alone`, run after the others, one by one. In a
rehearsal without a GPU they are all run as well, and each has to say that it finds none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CANNOT_EXIT = 77
TEST_S = 60.0
PATHS = ["tests/cuda"]
_AT_ONCE = 10  # each has a context of some 500 MiB on the device


class Outcome(NamedTuple):
    test: str
    outcome: str
    seconds: float
    reason: str


def collect(marks: str) -> list[str]:
    """Returns the tests that have these marks, by their names."""
    done = subprocess.run(
        [*pytest(), "--collect-only", "-q", "-m", marks, *_chosen(), *PATHS],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    if done.returncode not in (0, 5):
        print(done.stdout + done.stderr)
        print("REASON the tests cannot be collected")
        sys.exit(1)
    return [line for line in done.stdout.splitlines() if "::" in line]


def pytest() -> list[str]:
    # -P: without it the tree's torch_dcpx, which has no extension, hides the installed one.
    # A machine's many other plugins are left out, and of warnings that only a GPU brings the log is
    # to tell, rather than that each of them costs a test.
    options = ["-p", "timeout", "-p", "no:cacheprovider", "-W", "default"]
    return [sys.executable, "-P", "-X", "faulthandler", "-m", "pytest", *options]


def run(test: str, give_up_at: float, folder: Path) -> Outcome:
    """Runs one test, its files below `folder`; kills its processes where it takes too long."""
    began = time.monotonic()
    limit_s = min(TEST_S * stretch(), give_up_at - began)
    if limit_s < 1:
        return Outcome(test, "not begun", 0.0, "no time left")
    name = re.sub(r"[^\w]+", "-", test)[-80:]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [
                *pytest(), "-rs", f"--timeout={max(limit_s - 3, 1):.0f}",
                f"--basetemp={folder / name}", test,
            ],
            stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        text = output.read()
    seconds = round(time.monotonic() - began, 1)
    outcome, reason = judge(status, text)
    if outcome != "passed" or "warnings summary" in text:
        print(f"---- {test}: {outcome}\n{text}", flush=True)
    return Outcome(test, outcome, seconds, reason)


def judge(status: int | None, text: str) -> tuple[str, str]:
    """Returns what became of a test, by pytest's exit status and what it printed."""
    if status is None:
        return "timed out", "killed"
    if status < 0:
        return "crashed", signal.Signals(-status).name
    if status == 0 and re.search(r"\b1 passed\b", text):
        return "passed", ""
    if status == 0:
        skipped = re.search(r"^SKIPPED .*?: (.*)$", text, re.MULTILINE)
        return "skipped", skipped[1] if skipped else "nothing ran"
    errors = re.findall(r"^E +(.+)$", text, re.MULTILINE)
    return "failed", (errors[0] if errors else f"pytest ended with {status}")[:200]


def stretch() -> float:
    return float(os.environ.get("ON_GPU_STRETCH", "1"))


def _chosen() -> list[str]:
    """Returns the arguments that choose tests, of pytest's -k (ON_GPU_TESTS); by default all."""
    return ["-k", os.environ["ON_GPU_TESTS"]] if os.environ.get("ON_GPU_TESTS") else []


def run_all(
    tests: Sequence[str], at_once: int, give_up_at: float, folder: Path, found: list[Outcome]
) -> None:
    """Runs the tests, and adds to `found` what became of each."""
    with ThreadPoolExecutor(max(at_once, 1)) as pool:
        for done in as_completed([pool.submit(run, test, give_up_at, folder) for test in tests]):
            one = done.result()
            found.append(one)
            print(f"{one.outcome:9} {one.seconds:5.1f} s  {one.test}  {one.reason}", flush=True)
            print("FIGURES", json.dumps(figures(found)), flush=True)


def figures(found: Sequence[Outcome]) -> dict[str, object]:
    counts: dict[str, int] = {}
    for one in found:
        counts[one.outcome] = counts.get(one.outcome, 0) + 1
    said = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    bad = {one.test: f"{one.outcome}: {one.reason}" for one in found if one.outcome != "passed"}
    return {"short": said, "counts": counts, "not_passed": bad}


def main() -> int:
    give_up_at = time.monotonic() + float(os.environ.get("ON_GPU_LIMIT_S", "600")) - 5
    is_rehearsal = os.environ.get("ON_GPU_REHEARSAL") == "1"
    if not is_rehearsal:
        os.environ["DCPX_REQUIRE_CUDA"] = "1"
    if (Path(os.environ.get("ON_GPU_SITE", "/")) / "torch_dcpx").is_dir():
        os.environ["DCPX_REQUIRE_INSTALLED"] = "1"
    with ThreadPoolExecutor(2) as pool:
        together = pool.submit(collect, "cuda and not alone")
        alone = pool.submit(collect, "cuda and alone")
    print(f"{len(together.result())} tests, and {len(alone.result())} alone", flush=True)
    exclusive = "Exclusive" in _smi("compute_mode")
    at_once = 1 if exclusive else min(_AT_ONCE, len(os.sched_getaffinity(0)))
    found: list[Outcome] = []
    prefix = os.environ.get("ON_GPU_PREFIX", "dcpx-") + "tests-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        run_all(together.result(), at_once, give_up_at, Path(name), found)
        run_all(alone.result(), 1, give_up_at, Path(name), found)
    wrong = [one for one in found if one.outcome not in ("passed", "skipped")]
    skipped = [one for one in found if one.outcome == "skipped"]
    if wrong or not found:
        print(f"REASON {figures(found)['short']}: " + "; ".join(o.test for o in wrong[:4]))
        return 1
    if skipped:
        print(f"CANNOT {len(skipped)} of {len(found)} tests: {skipped[0].reason}")
        return CANNOT_EXIT
    return 0


def _smi(field: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


if __name__ == "__main__":
    sys.exit(main())
