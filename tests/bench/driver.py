"""What save.py, load.py and export.py share: workers, arguments, and the report."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import describe_machine
from save_setup import HAS_SAFETENSORS
from summary import Target, summarize
from tables import as_markdown

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]

Results = list[dict[str, Any]]


def run_worker(
    function: str,
    scratch: Path,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Any:
    """Calls a function of a module of this folder in fresh processes; returns rank 0's result.

    Args:
        function: "module:name"; it gets the arguments, and `scratch` as `folder`.
        environment: variables of the worker, beside those of this process.
    """
    result = scratch / "result.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [
        sys.executable, *(launcher if ranks > 1 else []), str(FOLDER / "worker.py"),
        function, json.dumps(arguments), str(scratch), str(result),
    ]  # fmt: skip
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    variables.pop("WORLD_SIZE", None)
    subprocess.run(command, check=True, env=variables, stdout=sys.stderr)
    found = json.loads(result.read_text())
    result.unlink()
    return found


def make_parser(
    doc: str | None, cases: Mapping[str, Any], sides: Sequence[str]
) -> argparse.ArgumentParser:
    """Returns a parser of the arguments that both benches take."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, under half a minute")
    parser.add_argument("--size", choices=("full", "quick", "smoke"), default="full")
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--sides", nargs="+", choices=sides, default=[])
    parser.add_argument("--rounds", type=int, help="counted rounds (default: by case)")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--no-meters", action="store_true", help="nothing but times")
    parser.add_argument("--metered", nargs="+", choices=cases, help="cases with meters")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--merge", action="store_true", help="add to what the file holds")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench",
                        help="where checkpoints are written (default: build/bench)")  # fmt: skip
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    args = parser.parse_args(arguments)
    if args.quick:
        args.size = "quick"
    if args.metered is None:
        args.metered = args.cases if args.size == "full" else args.cases[:1]
    if args.merge and args.json is None:
        parser.error("--merge needs --json")
    args.folder.mkdir(parents=True, exist_ok=True)
    return args


def key_of(result: Mapping[str, Any]) -> tuple[str, int, str]:
    return result["case"], result["ranks"], result.get("cache", "")


def merge(old: Results, new: Results, order: Iterable[str]) -> Results:
    """Returns the results with what is new in place of what it measures again."""
    by_key = {key_of(found): dict(found) for found in old}
    for found in new:
        by_key.setdefault(key_of(found), {}).update(found)
    places = {case: place for place, case in enumerate(order)}
    # Warm before cold.
    by_cache = sorted(by_key.values(), key=lambda r: r.get("cache", ""), reverse=True)
    return sorted(by_cache, key=lambda r: (r["ranks"], places[r["case"]]))


def shown_command(script: str, arguments: Sequence[str]) -> str:
    """Returns the command that repeats a run: without the paths of this machine."""
    shown, rest = ["python", f"tests/bench/{script}"], list(arguments)
    while rest:
        word = rest.pop(0)
        if word in ("--json", "--folder"):
            rest.pop(0)
        elif not word.startswith(("--json=", "--folder=", "--merge")):
            shown.append(word)
    return " ".join(shown)


def finish(
    bench: str,
    args: argparse.Namespace,
    arguments: Sequence[str],
    results: Results,
    order: Iterable[str],
    targets: Sequence[Target],
) -> None:
    """Merges with what is there, writes the report, and prints its tables."""
    command = shown_command(f"{bench}.py", arguments)
    report = {
        "bench": bench,
        "size": args.size,
        "commands": [command],
        "machine": describe_machine(args.folder),
        "has_safetensors": HAS_SAFETENSORS,
        "results": results,
    }
    if args.merge and args.json.exists():
        old = json.loads(args.json.read_text())
        report["results"] = merge(old["results"], results, order)
        report["commands"] = list(dict.fromkeys([*old["commands"], command]))
    report = summarize(report, targets)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(as_markdown(report))
