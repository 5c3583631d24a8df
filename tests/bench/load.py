"""Times loads: ours, stock's, safetensors' and the limit of page cache and disk, in one run.

    python tests/bench/load.py --quick
    python tests/bench/load.py --json build/bench/load.json
    python tests/bench/load.py --cases rows columns --no-meters --json build/bench/load.json --merge

Every load goes to memory that is there when the clock starts, with the files in the page cache, and
as root, at full size, once more with an empty one. Sides: `ours` (default options: all is
verified), `engine` (the C++ calls within it), `ours_unverified`, `stock_files` (the same, of files
that stock wrote), `stock`, `safetensors`, `raw` (a C program: preadv of as many bytes). Beside the
times: what was read from the files, and in fresh processes the peak of memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cases import LOAD_CASES
from driver import finish, make_parser, merge, parse, run_worker
from load_setup import CACHES, METERED, SIDES, WARM, caches_here, sides_of
from summary import LOAD_TARGETS


def measure_times(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    # At full size each case has a fresh heap.
    groups = [[case] for case in args.cases] if args.size == "full" else [args.cases]
    found = []
    for group in groups:
        found += run_worker(
            "load_worker:measure_all", scratch, cases=group, size=args.size, caches=args.caches,
            sides=args.sides, rounds=args.rounds,
        )  # fmt: skip
    return found


def measure_meters(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    found = []
    for case in args.metered:
        has = sides_of(LOAD_CASES[case])
        sides = [s for s in args.sides or METERED[args.size] if s in METERED["full"] and s in has]
        meters = {}
        for side in sides:
            print(f"{case}: memory of {side}", file=sys.stderr, flush=True)
            asked = {"case": case, "side": side, "size": args.size}
            with tempfile.TemporaryDirectory(dir=scratch) as name:
                # Saved by a process of its own, whose memory is then gone.
                run_worker("load_worker:save", Path(name), **asked)
                meters[side] = run_worker("load_worker:meter", Path(name), **asked)
        found.append({"case": case, "ranks": 1, "cache": WARM, "meters": meters})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, LOAD_CASES, SIDES)
    parser.add_argument(
        "--caches", nargs="+", choices=CACHES, help="(default: warm; as root, at full size, both)"
    )
    args = parse(parser, arguments)
    if args.caches is None:
        args.caches = caches_here() if args.size == "full" else [WARM]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="load-") as name:
        if not args.no_times:
            results = merge(results, measure_times(args, Path(name)), LOAD_CASES)
        if not args.no_meters:
            results = merge(results, measure_meters(args, Path(name)), LOAD_CASES)
    given = sys.argv[1:] if arguments is None else arguments
    finish("load", args, given, results, LOAD_CASES, LOAD_TARGETS)


if __name__ == "__main__":
    main()
