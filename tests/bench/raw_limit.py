"""The limit: what a small C program needs for the same bytes, in its best configuration here."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
from pathlib import Path
from typing import NamedTuple

from cases import MismatchError

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("raw_write.c")

KIB = 1 << 10
MIB = 1 << 20
BLOCKS = (256 * KIB, 1 * MIB, 4 * MIB)
THREADS = (1, 2, 4)
PROBE_BYTES = 256 * MIB  # enough to tell configurations apart
PROBED = (18, 6, 3)  # how many of the best so far each pass looks at
MISMATCH_CODE = 2


class RawConfig(NamedTuple):
    block_bytes: int
    threads: int
    is_preallocated: bool

    def __str__(self) -> str:
        how = "preallocated" if self.is_preallocated else "not preallocated"
        return f"{self.block_bytes // KIB} KiB x {self.threads} threads, {how}"


def build_program(folder: Path = ROOT / "build" / "bench") -> Path:
    """Compiles raw_write.c unless what is there is newer, and returns the program."""
    program = folder / "raw_write"
    if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
        folder.mkdir(parents=True, exist_ok=True)
        # Under another name first: two benches may build at once.
        fresh = folder / f"raw_write.{os.getpid()}"
        command = ["cc", "-O2", "-Wall", "-Wextra", "-pthread", "-o", str(fresh), str(SOURCE)]
        subprocess.run(command, check=True)
        fresh.replace(program)
    return program


def write_raw(program: Path, path: Path, nbytes: int, config: RawConfig) -> tuple[float, bool]:
    """Writes `nbytes` (rounded up to a page) to the new file `path`.

    Returns:
        Seconds from open to close, and whether O_DIRECT was taken.
    """
    how = (nbytes, config.block_bytes, config.threads, config.is_preallocated)
    seconds, mode = _run(program, path, *(str(int(value)) for value in how)).split()
    return float(seconds), mode == "direct"


def check_raw(program: Path, path: Path, nbytes: int) -> None:
    """Compares a file with what `write_raw` wrote.

    Raises:
        MismatchError: a byte differs.
    """
    _run(program, path, str(nbytes), "check")


def _run(program: Path, path: Path, *arguments: str) -> str:
    command = [str(program), str(path), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == MISMATCH_CODE:
        raise MismatchError(result.stderr)
    result.check_returncode()
    return result.stdout


def best_config(program: Path, folder: Path, nbytes: int) -> RawConfig:
    """Returns the fastest configuration for up to PROBE_BYTES of `nbytes`, by a short probe."""
    probe_bytes = min(nbytes, PROBE_BYTES)
    blocks = [size for size in BLOCKS if size <= max(probe_bytes, BLOCKS[0])]
    configs = list(itertools.starmap(RawConfig, itertools.product(blocks, THREADS, (False, True))))
    best = dict.fromkeys(configs, float("inf"))
    order = random.Random(0)
    path = folder / "probe"
    for count in PROBED:
        configs = sorted(configs, key=best.__getitem__)[:count]
        for config in order.sample(configs, len(configs)):
            seconds, _ = write_raw(program, path, probe_bytes, config)
            path.unlink()
            best[config] = min(best[config], seconds)
    return min(configs, key=best.__getitem__)
