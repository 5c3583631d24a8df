"""Times exports beside saves of the same sharded state, interleaved in one run.

    python tests/bench/export.py --quick
    python tests/bench/export.py --cases 64mib --json build/bench/export.json

Everything goes to a fresh directory and is durable when the clock stops. Sides: `save`
(`torch_dcpx.save`), `live` (export of the state in memory), `stored` (export of a checkpoint that
was saved past the page cache), `load` (of that checkpoint, into tensors that are there), and by
rounds `load_and_save`, their sum. Artifacts are opened by the safetensors package. After the
rounds: peak memory of each side, of the rank that took most.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cases import EXPORT_CASES, EXPORT_SIDES
from driver import finish, make_parser, merge, parse, run_worker
from summary import EXPORT_TARGETS


def measure(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for case in args.cases:
        for ranks in args.ranks:
            result = run_worker(
                "export_sides:measure", scratch, ranks, name=case, size=args.size,
                only=args.sides, rounds=args.rounds,
                has_meters=not args.no_meters and case in args.metered,
            )  # fmt: skip
            found.append({"case": case, "ranks": ranks, **result})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, EXPORT_CASES, EXPORT_SIDES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="(default: 1 2)")
    args = parse(parser, arguments)
    if args.no_times:
        parser.error("meters are taken after the times")
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="export-") as name:
        results = merge([], measure(args, Path(name)), EXPORT_CASES)
    given = sys.argv[1:] if arguments is None else arguments
    finish("export", args, given, results, EXPORT_CASES, EXPORT_TARGETS)


if __name__ == "__main__":
    main()
