"""Runs the stages of on_gpu.sh one after the other, and says what each came to.

    tests/cuda/on_gpu.sh quick                     at most 4 minutes
    tests/cuda/on_gpu.sh full                      at most 8
    tests/cuda/on_gpu.sh full --only moves pack    these, and what installs the package

Each stage has a limit of its own, and whatever it does the next one goes on. `$OUT` then has
STAGE.log and one line in results.jsonl of each, the figures as figures.md, and summary.txt.
Exit status: 0 every stage is ok; 1 one failed or timed out; 2 none, but one cannot run here.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

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

_LEAST_S = 3.0  # less than that is no time for a stage


class Run:
    """One run: its stages, how long they have, and where they write."""

    def __init__(self, args: argparse.Namespace, out: Path) -> None:
        self.mode: str = args.mode
        self.stretch: float = args.stretch
        self.out = out
        self.site = ROOT / "build" / "on_gpu" / "site"
        self.stop = Stop()
        self.results: list[Result] = []
        self.end_at = time.monotonic() + (args.total or TOTAL_S[self.mode]) * self.stretch
        self.stages = read_plan(args.plan) if args.plan else STAGES
        if args.only:
            wanted = {"install", *args.only}
            self.stages = [stage for stage in self.stages if stage.name in wanted]
        self._lines = Log(out / "results.jsonl")

    def left_s(self) -> float:
        return self.end_at - RESERVE_S - time.monotonic()

    def go(self) -> None:
        """Runs every stage; each has its line before the next one begins."""
        for stage in self.stages:
            result = self._one(stage)
            self.results.append(result)
            self._lines.write((result.as_json() + "\n").encode())
            # Who sees the last few thousand characters of stdout alone is to see every stage.
            say(result.as_json(is_short=not self._lines.is_lost))
        self._lines.close()

    def _one(self, stage: Stage) -> Result:
        if self.stop.signal:
            return Result(stage.name, CANNOT, 0.0, None, "not begun: the run was ended", {})
        outcomes = {result.stage: result.outcome for result in self.results}
        if outcomes.get(stage.needs, OK) != OK:
            return Result(stage.name, CANNOT, 0.0, None, f"{stage.needs} did not succeed", {})
        limit_s = stage.limit(self.mode) * self.stretch
        if stage.name == "install" and not has_wheel():
            limit_s = BUILD_S * self.stretch
        limit_s = min(limit_s, self.left_s())
        if limit_s < min(_LEAST_S, stage.limit(self.mode)):
            return Result(stage.name, CANNOT, 0.0, None, "no time left", {})
        say(f"== {stage.name}: {stage.title} (at most {limit_s:.0f} s)")
        command = filled(stage, sys.executable, self.mode, self.out, limit_s)
        variables = environment(self.site, self.out, self.mode, limit_s, self.stretch)
        log = self.out / f"{stage.name}.log"
        return run_stage(stage.name, command, limit_s, log, self.stop, variables)

    def finish(self) -> int:
        """Writes and prints the summary; returns the exit status."""
        lines = summary_lines(self.results, is_rehearsal())
        for name, text in (
            ("figures.md", figures_page(self.results, is_rehearsal())),
            ("summary.txt", "\n".join(lines) + "\n"),
        ):
            log = Log(self.out / name)
            log.write(text.encode())
            log.close()
        say("\n".join(["", *lines]))
        outcomes = {result.outcome for result in self.results}
        if self.stop.signal:
            return 128 + self.stop.signal
        if outcomes & {FAILED, TIMED_OUT}:
            return 1
        return 2 if CANNOT in outcomes else 0


def is_rehearsal() -> bool:
    return os.environ.get("ON_GPU_REHEARSAL") == "1"


def has_wheel() -> bool:
    return any((ROOT / "dist" / "wheels").glob("torch_dcpx-*.whl"))


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

    out = Path(os.environ.get("OUT") or ROOT / "build" / "on_gpu" / "out").resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(f"on_gpu: no folder {out}: {error.strerror}; what is printed is all there will be")
    adopt_orphans()
    run = Run(args, out)
    run.go()
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
