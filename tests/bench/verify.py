"""Speed of `verify` beside a plain read of the same files, one with a CRC-32 of it, and loads.

    python tests/bench/verify.py [directory] [--gib 1] [--rounds 5]

Sides run in turn in shuffled rounds, from the page cache ("warm") and with the files dropped from
it before each run ("cold", where the system lets them go). Prints best and median of each.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import torch_dcpx as dcpx
from torch_dcpx import _C, DcpxReader, DcpxWriter, ReadOptions

_READ_BYTES = 2 << 20


def files_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.distcp"))


def drop(path: Path) -> None:
    """Drops the files from the page cache, where they are clean."""
    for file in files_of(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_all(path: Path, workers: int, has_sums: bool = False) -> None:
    """Reads every byte into one buffer a worker, and sums each piece where it `has_sums`."""
    places = [
        (file, at) for file in files_of(path) for at in range(0, file.stat().st_size, _READ_BYTES)
    ]

    def read_share(worker: int) -> None:
        buffer = memoryview(bytearray(_READ_BYTES))
        fds = {file: os.open(file, os.O_RDONLY) for file in files_of(path)}
        for file, at in places[worker::workers]:
            nbytes = os.preadv(fds[file], [buffer], at)
            if has_sums:
                _C.crc32(buffer[:nbytes])
        for fd in fds.values():
            os.close(fd)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(read_share, range(workers)))


def load(state: dict[str, Any], path: Path, verify: str) -> None:
    options = ReadOptions(verify=verify)  # type: ignore[arg-type]
    dcp.load(state, storage_reader=DcpxReader(path, options=options), no_dist=True)


def sides(path: Path, state: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    workers = ReadOptions().resolved_workers()
    return {
        "verify": lambda: dcpx.verify(path),
        "read": lambda: read_all(path, workers),
        "read and CRC-32": lambda: read_all(path, workers, has_sums=True),
        "load, no checksums": lambda: load(state, path, "none"),
        "load": lambda: load(state, path, "blocks"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as scratch:
        path = Path(scratch, "ckpt")
        rows = int(given.gib * (1 << 30)) // 8 // 4096 // 4
        state: dict[str, Any] = {f"w{i}": torch.randn(rows, 4096) for i in range(8)}
        dcp.save(state, storage_writer=DcpxWriter(path), no_dist=True)
        nbytes = sum(file.stat().st_size for file in files_of(path))
        times: dict[tuple[str, str], list[float]] = {}
        for temperature in ("warm", "cold"):
            read_all(path, 1)
            for _ in range(given.rounds):
                order = list(sides(path, state).items())
                random.shuffle(order)
                for name, run in order:
                    if temperature == "cold":
                        drop(path)
                    began = time.perf_counter()
                    run()
                    times.setdefault((temperature, name), []).append(time.perf_counter() - began)
        for (temperature, name), found in times.items():
            best, median = (nbytes / s / 1e9 for s in (min(found), statistics.median(found)))
            sys.stdout.write(
                f"{temperature:5} {name:20} best {best:6.2f} median {median:6.2f} GB/s\n"
            )


if __name__ == "__main__":
    main()
