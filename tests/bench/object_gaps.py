"""Times loads of strided rows from a store: gaps between rows read over, or each row by a request.

    python tests/bench/object_gaps.py --rounds 5

As a load does it: 32 readers, each takes a cell of a slot's size, and asks for what it wants of it
by one request after the other. Prints the time of the requests apart over that of one request over
the gaps: above 1 it is better to read over a gap of this length. What is read over is no longer
than a cell, so longer gaps need larger slots.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import obstore
from object_server import ObjectServer, make_store, spread
from obstore.store import S3Store

KIB, MIB = 1 << 10, 1 << 20
READERS = 32
KEY = "gaps/x.bin"  # not dropped, by its name
Range = tuple[int, int]


def rows_of(cell_bytes: int, row_bytes: int, gap_bytes: int) -> list[Range]:
    """Returns the rows of a cell, which begins with one."""
    begins = range(0, cell_bytes - row_bytes + 1, row_bytes + gap_bytes)
    return [(begin, begin + row_bytes) for begin in begins]


def cells_of(
    rows: list[Range], cell_bytes: int, count: int, nbytes: int, is_over: bool
) -> list[list[Range]]:
    """Returns the requests of each of `count` cells of an object of `nbytes`."""
    wanted = [(rows[0][0], rows[-1][1])] if is_over else rows
    starts = [number * cell_bytes % (nbytes - cell_bytes + 1) for number in range(count)]
    return [[(start + a, start + b) for a, b in wanted] for start in starts]


def read(store: S3Store, cells: list[list[Range]]) -> float:
    """Returns the seconds that all cells take."""

    def read_cell(ranges: list[Range]) -> None:
        for begin, end in ranges:
            body = obstore.get(store, KEY, options={"range": (begin, end)}).bytes()
            assert len(body) == end - begin

    began = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read_cell, cells))
    return time.perf_counter() - began


def compared(
    store: S3Store, cell_bytes: int, row_bytes: int, gap_bytes: int, rounds: int, nbytes: int
) -> list[float]:
    """Returns the ratio of each round: apart to over."""
    rows = rows_of(cell_bytes, row_bytes, gap_bytes)
    assert len(rows) > 1 and all(b[0] - a[1] == gap_bytes for a, b in pairwise(rows))
    # About as many bytes whatever the gap, and each reader has several cells.
    count = max(nbytes // (rows[-1][1] - rows[0][0]), 3 * READERS)
    sides = {name: cells_of(rows, cell_bytes, count, nbytes, name) for name in (False, True)}
    ratios = []
    for number in range(rounds + 1):
        seconds = {name: read(store, sides[name]) for name in random.sample([False, True], 2)}
        if number:
            ratios.append(seconds[False] / seconds[True])
    return sorted(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--gaps-kib", nargs="+", type=int, default=[64, 128, 256, 512, 1024, 2048, 4096]
    )
    parser.add_argument("--latency-ms", nargs="+", type=float, default=[0.0, 5.0, 20.0, 50.0])
    parser.add_argument("--row-kib", type=int, default=64, help="a row: a block, as it is checked")
    parser.add_argument("--slot-mib", type=int, default=2, help="a cell; larger for larger gaps")
    parser.add_argument("--mib", type=int, default=256, help="bytes of each case")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    nbytes, row_bytes = args.mib * MIB, args.row_kib * KIB
    print("| gap | " + " | ".join(f"{ms:g} ms" for ms in args.latency_ms) + " |")
    print("| --- |" + " --- |" * len(args.latency_ms))
    with ObjectServer(core=cores[-1], memory_mib=2 * args.mib) as server:
        store = make_store(server.endpoint)
        obstore.put(store, KEY, b"\1" * nbytes, use_multipart=False)
        for gap_kib in args.gaps_kib:
            fitting = max(args.slot_mib * MIB, -(-(gap_kib * KIB + 2 * row_bytes) // MIB) * MIB)
            shown = []
            for latency_ms in args.latency_ms:
                server.reset(latency_ms=latency_ms)
                shown.append(
                    spread(compared(store, fitting, row_bytes, gap_kib * KIB, args.rounds, nbytes))
                )
            print(f"| {gap_kib} KiB | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
