"""Times saves: ours, stock's, safetensors' and the limit of the disk, interleaved in one run.

    python tests/bench/save.py --quick
    python tests/bench/save.py --json build/bench/save.json
    python tests/bench/save.py --cases 64mib --ranks 2 --json build/bench/save.json --merge

Every save goes to a fresh directory and is durable when the clock stops. Sides: `ours` (default
options), `engine` (the C++ call within it), `stock` and `stock2` (thread_count 1 and 2),
`safetensors`, `raw` (a C program: O_DIRECT pwrite and fdatasync of the same bytes). Beside the
times, in fresh processes: peak memory, memory after many saves, the rate of a counting thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cases import CASES
from machine import describe_machine
from save_setup import COUNTED_CASES, HAS_SAFETENSORS, METERED, SIDES
from save_tables import as_markdown
from summary import summarize

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


def run_worker(
    script: str, arguments: Sequence[str], scratch: Path, ranks: int = 1
) -> dict[str, Any]:
    """Runs a worker of this folder on `ranks` ranks and returns its JSON result."""
    result = scratch / "result.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [
        sys.executable, *(launcher if ranks > 1 else []), str(FOLDER / script),
        *arguments, "--folder", str(scratch), "--result", str(result),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("WORLD_SIZE", None)
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    found: dict[str, Any] = json.loads(result.read_text())
    result.unlink()
    return found


def groups_of(cases: Sequence[str], size: str, ranks: Sequence[int]) -> list[tuple[int, list[str]]]:
    """Returns (ranks, cases that share a process); at full size each has a fresh heap.

    Args:
        ranks: empty for what each case says; but one rank at smaller sizes.
    """
    asked = {case: ranks or (CASES[case].ranks if size == "full" else (1,)) for case in cases}
    groups = []
    for number in sorted({n for found in asked.values() for n in found}):
        chosen = [case for case in cases if number in asked[case]]
        shared = [[case] for case in chosen] if size == "full" else [chosen]
        groups += [(number, group) for group in shared]
    return groups


def measure_times(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    found = []
    for ranks, group in groups_of(args.cases, args.size, args.ranks):
        arguments = ["--cases", *group, "--size", args.size]
        if args.sides:
            arguments += ["--sides", *args.sides]
        if args.rounds:
            arguments += ["--rounds", str(args.rounds)]
        results = run_worker("save_worker.py", arguments, scratch, ranks)
        found += [{"case": case, "ranks": ranks, **results[case]} for case in group]
    return found


def measure_meters(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    found = []
    for case in args.metered:
        of_case: dict[str, Any] = {}
        for side in args.sides or METERED[args.size]:
            has_side = side != "safetensors" or (HAS_SAFETENSORS and case != "scalars")
            if side not in METERED["full"] or not has_side:
                continue
            print(f"{case}: memory and counting thread of {side}", file=sys.stderr, flush=True)
            of_case[side] = run_meters(case, side, args.size, scratch)
        found.append({"case": case, "ranks": 1, "meters": of_case})
    return found


def run_meters(case: str, side: str, size: str, scratch: Path) -> dict[str, Any]:
    at_once = ["peak", *(["counting"] if case in COUNTED_CASES else [])]
    if size != "full":
        at_once.append("growth")
    arguments = ["--case", case, "--side", side]
    if size != "full" or side != "ours":
        return run_worker(
            "meter_worker.py", [*arguments, "--size", size, "--meters", *at_once], scratch
        )
    # Thirty saves, so of the small state.
    growth = [*arguments, "--size", "quick", "--meters", "growth"]
    others = [*arguments, "--size", "full", "--meters", *at_once]
    return {
        **run_worker("meter_worker.py", growth, scratch),
        **run_worker("meter_worker.py", others, scratch),
    }


def merge(
    old: list[dict[str, Any]], new: list[dict[str, Any]], order: Sequence[str] = tuple(CASES)
) -> list[dict[str, Any]]:
    """Returns the results with what is new in place of what it measures again."""
    by_key = {(found["case"], found["ranks"]): dict(found) for found in old}
    for found in new:
        by_key.setdefault((found["case"], found["ranks"]), {}).update(found)
    return sorted(by_key.values(), key=lambda r: (r["ranks"], order.index(r["case"])))


def shown_command(arguments: Sequence[str]) -> str:
    """Returns the command that repeats a run: without the paths of this machine."""
    shown, rest = ["python", "tests/bench/save.py"], list(arguments)
    while rest:
        word = rest.pop(0)
        if word in ("--json", "--folder"):
            rest.pop(0)
        elif not word.startswith(("--json=", "--folder=", "--merge")):
            shown.append(word)
    return " ".join(shown)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--size", choices=("full", "quick", "smoke"), default="full")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[])
    parser.add_argument("--ranks", nargs="+", type=int, default=[], help="(default: by case)")
    parser.add_argument("--rounds", type=int, help="counted rounds (default: by case)")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--no-meters", action="store_true", help="no memory, no counting thread")
    parser.add_argument("--metered", nargs="+", choices=CASES, help="cases with meters")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--merge", action="store_true", help="add to what the file holds")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench",
                        help="where checkpoints are written (default: build/bench)")  # fmt: skip
    args = parser.parse_args(arguments)
    if args.quick:
        args.size = "quick"
    if args.metered is None:
        args.metered = args.cases if args.size == "full" else args.cases[:1]
    if args.merge and args.json is None:
        parser.error("--merge needs --json")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    command = shown_command(sys.argv[1:] if arguments is None else arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="save-") as name:
        if not args.no_times:
            results = merge(results, measure_times(args, Path(name)))
        if not args.no_meters:
            results = merge(results, measure_meters(args, Path(name)))
    report = {
        "bench": "save",
        "size": args.size,
        "commands": [command],
        "machine": describe_machine(args.folder),
        "has_safetensors": HAS_SAFETENSORS,
        "results": results,
    }
    if args.merge and args.json.exists():
        old = json.loads(args.json.read_text())
        report["results"] = merge(old["results"], results)
        report["commands"] = list(dict.fromkeys([*old["commands"], command]))
    report = summarize(report)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(as_markdown(report))


if __name__ == "__main__":
    main()
