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
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cases import CASES
from driver import finish, make_parser, merge, parse, run_worker
from save_setup import COUNTED_CASES, METERED, SIDES, is_metered
from summary import SAVE_TARGETS


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
        results = run_worker(
            "save_worker:measure_all", scratch, ranks,
            cases=group, size=args.size, sides=args.sides, rounds=args.rounds,
        )  # fmt: skip
        found += [{"case": case, "ranks": ranks, **results[case]} for case in group]
    return found


def measure_meters(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    found = []
    for case in args.metered:
        of_case: dict[str, Any] = {}
        for side in args.sides or METERED[args.size]:
            if not is_metered(case, side):
                continue
            print(f"{case}: memory and counting thread of {side}", file=sys.stderr, flush=True)
            of_case[side] = run_meters(case, side, args.size, scratch)
        found.append({"case": case, "ranks": 1, "meters": of_case})
    return found


def run_meters(case: str, side: str, size: str, scratch: Path) -> dict[str, Any]:
    at_once = ["peak"] if side != "raw" else []
    at_once += ["counting"] if case in COUNTED_CASES else []
    if size != "full":
        at_once.append("growth")
    runs = [(size, at_once)]
    if size == "full" and side == "ours":
        runs.insert(0, ("quick", ["growth"]))  # thirty saves, so of the small state
    found: dict[str, Any] = {}
    for of_size, meters in runs:
        found |= run_worker(
            "meter_worker:meter", scratch, case=case, side=side, size=of_size, meters=meters
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, CASES, SIDES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[], help="(default: by case)")
    args = parse(parser, arguments)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="save-") as name:
        if not args.no_times:
            results = merge(results, measure_times(args, Path(name)), CASES)
        if not args.no_meters:
            results = merge(results, measure_meters(args, Path(name)), CASES)
    given = sys.argv[1:] if arguments is None else arguments
    finish("save", args, given, results, CASES, SAVE_TARGETS)


if __name__ == "__main__":
    main()
