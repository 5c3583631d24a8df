"""Times asynchronous saves: how long training is blocked, and what it loses afterwards.

    python tests/bench/async_save.py --size smoke
    python tests/bench/async_save.py --json build/bench/async.json

`stall` is the time from the call until the state may change, `durable` until the checkpoint is.
Sides: `ours` (torch_dcpx.async_save), `ours_sync` (torch_dcpx.save), `stager` and `stage` (stock's
async_save with DcpxStager, or DcpxWriter as its stager), stock's own modes, and `memcpy`: two
threads copy the same bytes into warm memory. Meters, in fresh processes: peak memory, threads of
Python and of tiny torch calls beside a save, and memory, threads and descriptors over 50 saves of
a state that is made anew each time. `none` makes the states and saves nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cases import ASYNC_CASES
from driver import ROOT, run_worker
from machine import describe_machine

SIDES = (
    "ours", "ours_sync", "stager", "stage", "stager_process",
    "stock_thread", "stock_process", "stock_stager", "memcpy",
)  # fmt: skip
METERED = ("none", "ours", "ours_one_worker", "stager", "stock_thread", "stock_process")
# Tensors of a MiB and more go back to the system when they are dropped. By glibc's own threshold,
# which rises, it keeps some of the states that the meters make anew, and that hides what a save
# keeps: 20 states of 256 MiB, made and dropped, left 476 to 748 MiB, with this 477 throughout.
METERS_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
MIB = 1 << 20


def ratio(times: Mapping[str, Sequence[float]], over: str, under: str) -> str:
    """Returns the median of the rounds' ratios, with their least and most; empty without both."""
    if over not in times or under not in times or over == under:
        return ""
    found = sorted(a / b for a, b in zip(times[over], times[under], strict=True))
    return f"{statistics.median(found):.3g} ({found[0]:.3g}-{found[-1]:.3g})"


def seconds(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.3g} ({min(times):.3g}-{max(times):.3g})"


def times_table(case: str, found: Mapping[str, Any]) -> list[str]:
    times = found["times"]
    lines = [
        f"### {ASYNC_CASES[case].title}",
        "",
        "| side | stall, s | of memcpy | of stock's DefaultStager | durable, s | of ours_sync |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in SIDES:
        stall = f"{name} stall"
        if stall not in times and name not in times:
            continue
        cells = [name, seconds(times[stall]) if stall in times else ""]
        cells += [ratio(times, stall, "memcpy stall"), ratio(times, stall, "stock_stager stall")]
        is_save = name != "memcpy"
        cells += [seconds(times[name]) if is_save else ""]
        cells += [ratio(times, name, "ours_sync") if is_save else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def meters_table(case: str, found: Mapping[str, Any]) -> list[str]:
    lines = [
        f"### {ASYNC_CASES[case].title}: memory and other threads",
        "",
        "| side | peak extra MiB of state MiB | MiB after saves | growth of a state, a save "
        "| threads, fds | counting thread (durable after, s) | torch calls (durable after, s) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, meters in found.items():
        early, late = sorted(meters["rss"], key=int)
        low, high = meters["rss"][early], meters["rss"][late]
        saves = int(late) - int(early)
        growth = (high - low) / MIB / meters["state_mib"] / saves
        before, after = (meters[f"threads_and_fds_{n}"] for n in (early, late))
        cells = [
            name,
            f"{meters['extra_peak_mib']:.0f} of {meters['state_mib']:.0f}",
            f"{early}: {low / MIB:.0f}, {late}: {high / MIB:.0f} ({100 * (high / low - 1):+.2f} %)",
            f"{growth:.3f}",
            f"{before} to {after}",
            *(
                f"{meters[kind]['rate']:.3g} ({meters[kind]['background_s']:.3g})"
                for kind in ("counting", "torch_calls")
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("full", "quick", "smoke"), default="full")
    parser.add_argument("--cases", nargs="+", choices=ASYNC_CASES, default=["64mib", "4000"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--metered", nargs="*", choices=METERED, default=list(METERED))
    parser.add_argument("--meter-case", choices=ASYNC_CASES, default="16mib")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    args = parser.parse_args(arguments)

    args.folder.mkdir(parents=True, exist_ok=True)
    machine = describe_machine(args.folder)
    lines = [
        "On {cores} cores ({cpu}), {memory_gib} GiB, Linux {kernel}, {file_system}; "
        "Python {python}, torch {torch}, torch-dcpx at {commit}.".format(**machine),
        "",
    ]
    result: dict[str, Any] = {"machine": machine, "times": {}, "meters": {}}
    rounds = args.rounds if args.size == "full" else 1
    saves = 50 if args.size == "full" else 4
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="async-") as name:
        scratch = Path(name)
        for case in [] if args.no_times else args.cases:
            found = run_worker(
                "async_worker:time_sides", scratch,
                case=case, size=args.size, rounds=rounds, names=args.sides,
            )  # fmt: skip
            result["times"][case] = found
            lines += times_table(case, found)
        for side in args.metered:
            result["meters"][side] = run_worker(
                "async_worker:meter", scratch, environment=METERS_ENVIRONMENT,
                name=side, case=args.meter_case, size=args.size, saves=saves,
            )  # fmt: skip
        if args.metered:
            lines += meters_table(args.meter_case, result["meters"])
    print("\n".join(lines))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
