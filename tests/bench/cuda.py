"""Times the ways between a GPU and the host: snapshots, loads, stalls, steps beside a save.

    python tests/bench/cuda.py --size smoke
    python tests/bench/cuda.py --json build/bench/cuda.json

Sides run interleaved in shuffled rounds, and what counts is the median of the rounds' ratios.
`block` is one copy of the same bytes between one pinned block and the device: what the bus gives.
Files lie in memory (--folder, tmpfs), so that no disk is timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cuda_cases import SIZES, Case, cases
from machine import describe_machine
from ratios import speed_ratio, spread

STALL_S = 0.005  # besides the bytes at the block's rate
STEP_RATIO = 1.02
STOCK_RATIO = 2.0
DEVICE_MIB = 64

Times = Mapping[str, Sequence[float]]


def number(value: float) -> str:
    return f"{value:.3g}"


def with_range(values: Mapping[str, float]) -> str:
    return f"{number(values['median'])} ({number(values['min'])}-{number(values['max'])})"


def rates_table(title: str, case: Case, times: Times) -> list[str]:
    """Returns a row a side: GB/s, and its rate as a share of the block's."""
    lines = [f"### {title}: {len(case.shapes)} {case.title}, {case.nbytes / 1e9:.3g} GB", ""]
    lines += ["| side | GB/s | of one pinned block | ours over it |", "| --- | --- | --- | --- |"]
    for side, seconds in times.items():
        rate = spread([case.nbytes / second / 1e9 for second in seconds])
        cells = [side, with_range(rate), with_range(speed_ratio(times, side, "block"))]
        cells.append(with_range(speed_ratio(times, "ours", side)))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def stall_table(case: Case, times: Times) -> list[str]:
    """Returns a row a way to save: milliseconds, and those beyond the block's copy."""
    lines = [f"### Stall of a save: {len(case.shapes)} {case.title}", ""]
    lines += ["| side | ms | beyond the block's copy, ms |", "| --- | --- | --- |"]
    for side, seconds in times.items():
        beyond = [1000 * (a - b) for a, b in zip(seconds, times["block"], strict=True)]
        in_ms = spread([1000 * second for second in seconds])
        lines.append(f"| {side} | {with_range(in_ms)} | {with_range(spread(beyond))} |")
    return [*lines, ""]


def verdicts(name: str, case: Case, found: Mapping[str, Any]) -> list[str]:
    """Returns a line a figure to reach, and whether it was."""

    def line(what: str, value: float, bound: float, *, is_least: bool) -> str:
        is_met = value >= bound if is_least else value <= bound
        sign = ">=" if is_least else "<="
        return f"- {name}: {what} {number(value)}, {sign} {number(bound)}: {_said(is_met)}"

    lines = []
    for way in ("to_host", "to_device"):
        share = speed_ratio(found[way], "ours", "block")["median"]
        lines.append(line(f"{way}, of the block's rate", share, case.share, is_least=True))
    stock = speed_ratio(found["to_host"], "ours", "stock_stager")["median"]
    lines.append(line("to_host, over stock's stager", stock, STOCK_RATIO, is_least=True))
    stall = found["stall"]
    # By the rate that a snapshot has to reach.
    beyond = [a - b / case.share for a, b in zip(stall["staged"], stall["block"], strict=True)]
    lines.append(
        line("stall beyond bytes / rate, s", spread(beyond)["median"], STALL_S, is_least=False)
    )
    during, after = (value / (1 << 20) for value in found["device_bytes"])
    lines.append(line("device MiB during a save", during, DEVICE_MIB, is_least=False))
    lines.append(line("device MiB after it", after, 0, is_least=False))
    return lines


def _said(is_met: bool) -> str:
    return "met" if is_met else "NOT MET"


def step_lines(times: Times) -> list[str]:
    slower = spread([a / b for a, b in zip(times["saving"], times["idle"], strict=True)])
    is_met = slower["median"] <= STEP_RATIO
    return [
        f"- steps beside a save take {with_range(slower)} x as long, <= {STEP_RATIO}: "
        f"{_said(is_met)}",
        "",
    ]


def why_not() -> str:
    """Returns why nothing can be timed here; empty where it can."""
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--cases", nargs="+", choices=list(cases("smoke")))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args(arguments)
    if reason := why_not():
        raise SystemExit(f"tests/bench/cuda.py needs a GPU: {reason}")

    import torch
    from cuda_sides import Moves, interleave, step_seconds

    import torch_dcpx as dcpx

    device = torch.device("cuda", args.device)
    torch.cuda.set_device(device)
    machine = describe_machine(args.folder)
    machine["gpu"] = torch.cuda.get_device_name(device)
    print(
        "On {gpu}, {cores} cores ({cpu}), Linux {kernel}; Python {python}, torch {torch}, "
        "torch-dcpx at {commit}.\n".format(**machine)
    )
    result: dict[str, Any] = {"machine": machine, "cases": {}}
    rounds = 1 if args.size == "smoke" else args.rounds
    met: list[str] = []
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="dcpx-bench-") as name:
        folder = Path(name)
        for key, case in cases(args.size).items():
            if args.cases and key not in args.cases:
                continue
            moves = Moves(case, device, folder)
            found: dict[str, Any] = {
                "to_host": interleave(moves.to_host(), rounds),
                "to_device": interleave(moves.to_device(), rounds),
                "stall": interleave(moves.stall(), rounds),
                "device_bytes": moves.device_bytes(),
            }
            moves.close()
            del moves
            dcpx.close()
            torch.cuda.empty_cache()
            lines = rates_table("To the host", case, found["to_host"])
            lines += rates_table("To the device", case, found["to_device"])
            lines += stall_table(case, found["stall"])
            print("\n".join(lines), flush=True)
            met += verdicts(key, case, found)
            result["cases"][key] = found
        width = {"full": 8192, "quick": 4096, "smoke": 256}[args.size]
        result["steps"] = step_seconds(device, folder, rounds, width)
    print("\n".join([*met, *step_lines(result["steps"])]))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
