"""Runs the stages of on_gpu.sh one after the other, and says what each came to.

    tests/cuda/on_gpu.sh quick                     at most 4 minutes
    tests/cuda/on_gpu.sh full                      at most 8
    tests/cuda/on_gpu.sh full --only moves pack    these, and what installs the package

Each stage has a limit of its own, and whatever it does the next one goes on. `$OUT` then has what
it printed in stages.log and a line in results.jsonl, the figures as figures.md, and summary.txt.
Exit status: 0 every stage is ok; 1 one failed or timed out; 2 none, but one cannot run here.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_install import wheel_of
from gpu_runner import (
    CANNOT,
    FAILED,
    OK,
    TIMED_OUT,
    Log,
    Result,
    Stop,
    adopt_orphans,
    run_stage,
    say,
)
from gpu_stages import (
    BUILD_S,
    PREFIX,
    RESERVE_S,
    ROOT,
    STAGES,
    TOTAL_S,
    Stage,
    environment,
    filled,
    read_plan,
)
from gpu_tables import figures_page, summary_lines

_LEAST_S = 3.0  # less than that is no time for a stage,
_LEAST_SHARE = 0.4  # nor is less than that of its limit


class Run:
    """One run: its stages, how long they have, and where they write."""

    def __init__(self, args: argparse.Namespace, out: Path) -> None:
        self.mode: str = args.mode
        self.stretch: float = args.stretch
        self.out = out
        # Another plan may install nothing, and is to find nothing that another Python has left.
        self.site = (out if args.plan else ROOT / "build" / "on_gpu") / "site"
        self.stop = Stop()
        self.results: list[Result] = []
        self.end_at = time.monotonic() + (args.total or TOTAL_S[self.mode]) * self.stretch
        self.stages = read_plan(args.plan) if args.plan else STAGES
        if args.only:
            wanted = {"install", *args.only}
            self.stages = [stage for stage in self.stages if stage.name in wanted]
        self._lines = Log(out / "results.jsonl")
        self._log = Log(out / "stages.log")

    def left_s(self) -> float:
        return self.end_at - RESERVE_S - time.monotonic()

    def go(self) -> None:
        """Runs every stage; each has its line and its tables before the next one begins."""
        for stage in self.stages:
            result = self._one(stage)
            clear_up()
            self.results.append(result)
            self._lines.write((result.as_json() + "\n").encode())
            # Who sees the last few thousand characters of stdout alone is to see every stage.
            say(result.as_json(is_short=not self._lines.is_lost))
            self._write("figures.md", figures_page(self.results, is_rehearsal()))
            self._write("summary.txt", "\n".join(self._summary()) + "\n")
        for log in (self._lines, self._log):
            log.close()

    def _summary(self) -> list[str]:
        return summary_lines(self.results, is_rehearsal())

    def _write(self, name: str, text: str) -> None:
        log = Log(self.out / name)
        log.write(text.encode())
        log.close()

    def _one(self, stage: Stage) -> Result:
        if self.stop.signal:
            return Result(stage.name, CANNOT, 0.0, None, "not begun: the run was ended", {})
        outcomes = {result.stage: result.outcome for result in self.results}
        if outcomes.get(stage.needs, OK) != OK:
            return Result(stage.name, CANNOT, 0.0, None, f"{stage.needs} did not succeed", {})
        limit_s = stage.limit(self.mode) * self.stretch
        if stage.name == "install" and wheel_of("torch-dcpx", ROOT / "dist" / "wheels") is None:
            limit_s = BUILD_S * self.stretch
        limit_s = min(limit_s, self.left_s())
        own_s = stage.limit(self.mode) * self.stretch
        if limit_s < max(min(_LEAST_S, own_s), _LEAST_SHARE * own_s):
            return Result(stage.name, CANNOT, 0.0, None, "no time left", {})
        say(f"== {stage.name}: {stage.title} (at most {limit_s:.0f} s)")
        command = filled(stage, sys.executable, self.mode, limit_s)
        variables = environment(self.site, self.mode, limit_s, self.stretch)
        return run_stage(stage.name, command, limit_s, self._log, self.stop, variables)

    def finish(self) -> int:
        """Prints the summary; returns the exit status."""
        say("\n".join(["", *self._summary()]))
        outcomes = {result.outcome for result in self.results}
        if self.stop.signal:
            return 128 + self.stop.signal
        if outcomes & {FAILED, TIMED_OUT}:
            return 1
        return 2 if CANNOT in outcomes else 0


def is_rehearsal() -> bool:
    return os.environ.get("ON_GPU_REHEARSAL") == "1"


def clear_up() -> None:
    """Removes what a stage that was killed has left, which may be most of the memory."""
    for folder in ("/dev/shm", tempfile.gettempdir()):
        for path in Path(folder).glob(f"{PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)


def set_limits() -> None:
    """Allows a file for each tensor, as torch's stager wants it, and no core of gigabytes."""
    for most in (1 << 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            break
        except (ValueError, OSError):  # it is more than this process may have
            pass
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", nargs="?", choices=list(TOTAL_S), default="quick")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="these alone, and install")
    parser.add_argument("--total", type=float, help="seconds of the whole run (240, 480)")
    parser.add_argument("--stretch", type=float, default=1.0, help="multiplies every limit")
    parser.add_argument("--plan", type=Path, help="other stages, from a JSON file")
    args = parser.parse_args(arguments)
    names = [stage.name for stage in (read_plan(args.plan) if args.plan else STAGES)]
    if unknown := set(args.only or []) - set(names):
        parser.error(f"--only: no stage {', '.join(sorted(unknown))}; there are {', '.join(names)}")

    # Not for the stages: a make below them would take it for its own.
    out = Path(os.environ.pop("OUT", "") or ROOT / "build" / "on_gpu" / "out").resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(f"on_gpu: no folder {out}: {error.strerror}; what is printed is all there will be")
    adopt_orphans()
    set_limits()
    run = Run(args, out)
    run.go()
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
