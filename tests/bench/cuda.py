"""Times the ways between a GPU and the host: snapshots, loads, stalls, page-locking, the kernel.

    python tests/bench/cuda.py moves --size quick
    python tests/bench/cuda.py stalls pinning pack --json build/bench/cuda.json

Sides run interleaved in shuffled rounds, as many as --seconds allows; a figure is the median of the
rounds with its range. `block` is one copy of the same bytes between one page-locked block and the
device: what the bus gives. Files lie in memory (--folder, tmpfs), so that no disk is timed. Each
table is printed as it grows: what a run that is cut off has measured is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from cuda_cases import GIB, MIB, SIZES, Case, cases
from cuda_rounds import Found
from ratios import speed_ratio, spread

STALL_S = 0.005  # besides the bytes at the block's rate
STEP_RATIO = 1.02
STOCK_RATIO = 2.0
DEVICE_MIB = 64
ROUNDS = {"full": 5, "quick": 3, "smoke": 1}
PIN_BYTES = {"full": [GIB // 4, GIB, 4 * GIB], "quick": [GIB // 4, GIB], "smoke": [4 * MIB]}
STEP_WIDTH = {"full": 8192, "quick": 4096, "smoke": 128}

Table = dict[str, list[Any]]


# ---- Tables -------------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{value:.3g}"


def with_range(values: Mapping[str, float]) -> str:
    return f"{number(values['median'])} ({number(values['min'])}-{number(values['max'])})"


def rate_rows(title: str, nbytes: int, found: Found, base: str) -> list[list[str]]:
    """Returns a row a side: rounds, GB/s, and its rate as a share of the base's."""
    rows = []
    for side, seconds in found.times.items():
        rate = with_range(spread([nbytes / second / 1e9 for second in seconds]))
        share = with_range(speed_ratio(found.times, side, base)) if base in found.times else ""
        rounds = str(len(seconds))
        if note := found.notes.get(side):
            rounds += f", {note}"
        rows.append([title, side, rounds, rate, share])
    sideless = {side: note for side, note in found.notes.items() if side not in found.times}
    return rows + [[title, side, note, "", ""] for side, note in sideless.items()]


def time_rows(title: str, found: Found) -> list[list[str]]:
    """Returns a row a side: rounds and milliseconds."""
    rows = []
    for side, seconds in found.times.items():
        note = found.notes.get(side)
        rounds = str(len(seconds)) + (f", {note}" if note else "")
        rows.append([title, side, rounds, with_range(spread([1000 * s for s in seconds]))])
    sideless = {side: note for side, note in found.notes.items() if side not in found.times}
    return rows + [[title, side, note, ""] for side, note in sideless.items()]


def verdict(what: str, value: float, bound: float, *, is_least: bool) -> list[str]:
    """Returns a row: a figure to reach, and whether it was."""
    is_met = value >= bound if is_least else value <= bound
    sign = ">=" if is_least else "<="
    return [what, f"{sign} {number(bound)}", number(value), "yes" if is_met else "**no**"]


def move_verdicts(case: Case, found: Mapping[str, Found]) -> list[list[str]]:
    """Returns the rows of the figures that one case's moves are to reach."""
    rows = []
    for way, one in found.items():
        times = one.times
        if case.share and {"ours", "block"} <= times.keys():
            share = speed_ratio(times, "ours", "block")["median"]
            rows.append(verdict(f"{case.title}, {way}: of the block's rate", share, case.share,
                                is_least=True))  # fmt: skip
        if "stock_stager" in times and "ours" in times:
            ratio = speed_ratio(times, "ours", "stock_stager")["median"]
            rows.append(verdict(f"{case.title}, {way}: speed of stock's stager", ratio,
                                STOCK_RATIO, is_least=True))  # fmt: skip
    return rows


class Report:
    """The tables of a run. Each `put` prints them as a line for on_gpu.sh, and writes the JSON."""

    def __init__(self, path: Path | None, name: str) -> None:
        self._path = path
        self.name = name
        self.tables: dict[str, Table] = {}
        self.raw: dict[str, Any] = {}

    def put(self, title: str, columns: Sequence[str], key: str, rows: Sequence[list[str]]) -> None:
        """Replaces the rows of a table that begin with `key`."""
        table = self.tables.setdefault(title, {"columns": list(columns), "rows": []})
        table["rows"] = [row for row in table["rows"] if row[0] != key] + list(rows)
        print("FIGURES", json.dumps({title: table}), flush=True)

    def keep(self, key: str, found: Found) -> None:
        print("SECONDS", json.dumps({key: found.times}), flush=True)
        self.raw[key] = {"seconds": found.times, "notes": found.notes}
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"gpu": self.name, **self.raw}, indent=1) + "\n")
        except OSError as error:
            print(f"{self._path.name} is not written: {error.strerror}", flush=True)
            self._path = None


# ---- What is timed ------------------------------------------------------------------------------

_MOVES = ("moves", "side", "rounds", "GB/s", "of one page-locked block")
_TIMES = ("what", "side", "rounds", "ms")
_REACH = ("figure", "to reach", "measured", "reached")


def moves(gpu: Any, args: argparse.Namespace, folder: Path, report: Report) -> None:
    chosen = {k: c for k, c in cases(args.size).items() if not args.cases or k in args.cases}
    costs = [case.cost_s for case in chosen.values()]
    for number, (key, case) in enumerate(chosen.items()):
        left_s = args.give_up_at - time.monotonic()
        share_s = time_for(costs[number:], left_s)
        reason = lacks_room(gpu, case, folder)
        if left_s < 2 or case.cost_s > 2 * left_s:
            reason = f"left out: {left_s:.0f} s are left"
        if reason:
            leave_out(report, "To the host", case, reason)
            continue
        print(f"{key}: {len(case.shapes)} tensors, {case.nbytes} B", flush=True)
        move(gpu, key, case, folder, share_s, args.rounds, report)


def time_for(costs: Sequence[float], left_s: float) -> float:
    """Returns the seconds of the first of these cases: by what each costs, or all the same where
    that is more. A case that does not fit takes nothing from the others.
    """
    others_s = sum(cost for cost in costs[1:] if cost <= left_s)
    if costs[0] > left_s:
        return max(left_s - others_s, left_s / len(costs))
    return left_s * max(costs[0] / (costs[0] + others_s), 1 / len(costs))


def move(
    gpu: Any, key: str, case: Case, folder: Path, share_s: float, rounds: int, report: Report
) -> None:
    """Times one case both ways."""
    from cuda_rounds import interleave
    from cuda_sides import Moves

    import torch_dcpx as dcpx

    give_up_at = time.monotonic() + share_s
    one = Moves(gpu, case, folder)
    one.check()
    found: dict[str, Found] = {}

    def time_way(way: str, sides: Mapping[str, Callable[[], float]], until: float) -> None:
        def tell(now: Found) -> None:
            rows = rate_rows(case.title, case.nbytes, now, "block")
            report.put(f"To the {way}", _MOVES, case.title, rows)

        found[way] = interleave(sides, rounds, until, tell=tell)
        tell(found[way])
        report.keep(f"{key}, to the {way}", found[way])

    host_s = (give_up_at - time.monotonic()) / 3  # the other way saves first
    time_way("host", one.to_host(host_s), time.monotonic() + host_s)
    if one.save_s() < give_up_at - time.monotonic():
        one.save()
        time_way("device", one.to_device(give_up_at - time.monotonic()), give_up_at)
    else:
        late = f"left out: a save and a load take some {one.save_s():.0f} s"
        leave_out(report, "To the device", case, late)
    for row in move_verdicts(case, found):
        report.put("Figures to reach", _REACH, row[0], [row])
    one.close()
    dcpx.close()


def leave_out(report: Report, title: str, case: Case, why: str) -> None:
    report.put(title, _MOVES, case.title, [[case.title, "all", why, "", ""]])


def lacks_room(gpu: Any, case: Case, folder: Path) -> str:
    """Returns which memory a case does not fit, or ''."""
    if gpu.free_bytes() < 2.5 * case.nbytes:
        return "left out: too little device memory"
    if shutil.disk_usage(folder).free < 1.2 * case.nbytes:
        return f"left out: too little room in {folder.parent}"
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return "left out: too little host memory" if available < 6 * case.nbytes else ""


def stalls(gpu: Any, args: argparse.Namespace, folder: Path, report: Report) -> None:
    from cuda_stalls import step_seconds

    for left, name in zip((3, 2), ("64mib", "64kib"), strict=True):
        until = time.monotonic() + (args.give_up_at - time.monotonic()) / left
        stall(gpu, name, cases(args.size)[name], folder, until, args.rounds, report)
    found = step_seconds(gpu, folder, args.rounds, STEP_WIDTH[args.size], args.give_up_at)
    what = "a step of 8 matrices"
    report.put("Steps", _TIMES, what, time_rows(what, found))
    report.keep("steps", found)
    if {"ours idle", "ours saving"} <= found.times.keys():
        slower = speed_ratio(found.times, "ours idle", "ours saving")["median"]
        row = verdict("time of a step beside a save", slower, STEP_RATIO, is_least=False)
        report.put("Figures to reach", _REACH, row[0], [row])


def stall(
    gpu: Any, name: str, case: Case, folder: Path, until: float, rounds: int, report: Report
) -> None:
    """Times the calls of one case's saves, and asks for the device memory that one takes."""
    from cuda_rounds import interleave
    from cuda_sides import device_bytes
    from cuda_stalls import Stalls

    def tell(now: Found) -> None:
        report.put("Stall of a save", _TIMES, case.title, time_rows(case.title, now))

    one = Stalls(gpu, case, folder)
    found = interleave(one.sides(), rounds, until, tell=tell)
    tell(found)
    report.keep(f"{name}, stall", found)
    rows = []
    if {"block", "ours, later"} <= found.times.keys():
        # By the rate that a snapshot has to reach.
        pairs = zip(found.times["ours, later"], found.times["block"], strict=False)
        beyond = spread([a - b / case.share for a, b in pairs])["median"]
        what = f"{case.title}: stall beyond bytes / rate, s"
        rows.append(verdict(what, beyond, STALL_S, is_least=False))
    during, after = (n / MIB for n in device_bytes(gpu, one.state, folder))
    for when, value, bound in (("during", during, DEVICE_MIB), ("after", after, 0)):
        what = f"{case.title}: device MiB {when} a save"
        rows.append(verdict(what, value, bound, is_least=False))
    for row in rows:
        report.put("Figures to reach", _REACH, row[0], [row])
    one.close()


def pinning(gpu: Any, args: argparse.Namespace, _: Path, report: Report) -> None:
    from cuda_pinning import sides
    from cuda_rounds import interleave

    sizes = PIN_BYTES[args.size]
    for left, nbytes in zip(range(len(sizes), 0, -1), sizes, strict=True):
        title = f"{nbytes // MIB} MiB"
        until = time.monotonic() + (args.give_up_at - time.monotonic()) / left

        def tell(now: Found, title: str = title) -> None:
            report.put("Page-locking", _TIMES, title, time_rows(title, now))

        found = interleave(sides(gpu, nbytes), args.rounds, until, tell=tell)
        tell(found)
        report.keep(f"page-locking, {title}", found)


def pack(gpu: Any, args: argparse.Namespace, _: Path, report: Report) -> None:
    from cuda_pack import SIZES as PIECES
    from cuda_pack import Pieces
    from cuda_rounds import interleave

    plan = [(n, to_host) for n in PIECES[args.size] for to_host in (True, False)]
    for left, (nbytes, to_host) in zip(range(len(plan), 0, -1), plan, strict=True):
        pieces = Pieces(gpu, nbytes, args.size)
        title, total = f"{pieces.count} x {nbytes} B", pieces.total
        way = "Pieces to the host" if to_host else "Pieces to the device"
        until = time.monotonic() + (args.give_up_at - time.monotonic()) / left

        def tell(now: Found, way: str = way, title: str = title, total: int = total) -> None:
            rows = rate_rows(title, total, now, "one copy")
            report.put(way, (*_MOVES[:4], "of one copy"), title, rows)

        found = interleave(pieces.sides(to_host), args.rounds, until, tell=tell)
        tell(found)
        report.keep(f"{way}, {title}", found)
        pieces.close()


KINDS = {"moves": moves, "stalls": stalls, "pinning": pinning, "pack": pack}


def folder_for(size: str) -> Path:
    """Returns where files lie: in memory, or where that is too small in the folder for temporary
    files, whose file system the figures then name.
    """
    memory = Path("/dev/shm")
    needed = {"full": 10 * GIB, "quick": GIB, "smoke": 64 * MIB}[size]
    has_room = memory.is_dir() and shutil.disk_usage(memory).free >= needed
    return memory if has_room else Path(tempfile.gettempdir())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="(default: all)")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--cases", nargs="+", choices=list(cases("full")), help="of moves")
    parser.add_argument("--rounds", type=int, help="(default: by size)")
    parser.add_argument("--seconds", type=float, default=600, help="for all of it, about")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args(arguments)
    # What the clock does not know of: imports, the first context, the end.
    args.give_up_at = time.monotonic() + args.seconds - 2
    args.rounds = ROUNDS[args.size] if args.rounds is None else args.rounds

    from cuda_gpu import the_gpu, why_not

    if reason := why_not():
        raise SystemExit(f"tests/bench/cuda.py needs a GPU: {reason}")
    gpu = the_gpu()
    if gpu.is_rehearsal:
        args.size, args.rounds = "smoke", 1
        print("REHEARSAL on a fake driver: no figure below is one of a GPU")
    from machine import describe_machine

    args.folder = args.folder or folder_for(args.size)
    machine = {**describe_machine(args.folder), "gpu": gpu.name}
    print(
        "On {gpu}, {cores} cores ({cpu}), {memory_gib} GiB, Linux {kernel}; files in "
        "{file_system}; Python {python}, torch {torch}, torch-dcpx {torch-dcpx}.\n".format(
            **machine
        )
    )
    report = Report(args.json, gpu.name)
    prefix = os.environ.get("ON_GPU_PREFIX", "dcpx-") + "bench-"
    with tempfile.TemporaryDirectory(dir=args.folder, prefix=prefix) as name:
        kinds = args.kinds or list(KINDS)
        end = args.give_up_at
        for left, kind in zip(range(len(kinds), 0, -1), kinds, strict=True):
            args.give_up_at = time.monotonic() + (end - time.monotonic()) / left
            KINDS[kind](gpu, args, Path(name), report)
    gpu.check()
    print(f"tables: {', '.join(report.tables)}")


if __name__ == "__main__":
    main()
