"""The limit: what small C programs need for the same bytes, in their best configuration here."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from cases import MismatchError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).parent

KIB = 1 << 10
MIB = 1 << 20
BLOCKS = (256 * KIB, 1 * MIB, 4 * MIB)
THREADS = (1, 2, 4)
PROBE_BYTES = 256 * MIB  # enough to tell configurations apart
PROBED = (18, 6, 3)  # how many of the best so far each pass looks at
MISMATCH_CODE = 2

C = TypeVar("C", bound="WriteConfig | ReadConfig")


class WriteConfig(NamedTuple):
    block_bytes: int
    threads: int
    is_preallocated: bool

    def __str__(self) -> str:
        how = "preallocated" if self.is_preallocated else "not preallocated"
        return f"{self.block_bytes // KIB} KiB x {self.threads} threads, {how}"


class ReadConfig(NamedTuple):
    block_bytes: int
    threads: int
    is_direct: bool

    def __str__(self) -> str:
        return f"{self.block_bytes // KIB} KiB x {self.threads} threads"


def build_program(name: str, folder: Path = ROOT / "build" / "bench") -> Path:
    """Compiles `name`.c unless what is there is newer, and returns the program."""
    program, source = folder / name, SOURCES / f"{name}.c"
    newest = max(path.stat().st_mtime for path in (source, SOURCES / "raw_common.h"))
    if not program.exists() or program.stat().st_mtime < newest:
        folder.mkdir(parents=True, exist_ok=True)
        # Under another name first: two benches may build at once.
        fresh = folder / f"{name}.{os.getpid()}"
        command = ["cc", "-O2", "-Wall", "-Wextra", "-pthread", "-o", str(fresh), str(source)]
        subprocess.run(command, check=True)
        fresh.replace(program)
    return program


def write_raw(program: Path, path: Path, nbytes: int, config: WriteConfig) -> tuple[float, bool]:
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


def read_raw(
    program: Path, path: Path, nbytes: int, config: ReadConfig, reference: Path | None = None
) -> tuple[float, bool]:
    """Reads the first `nbytes` (rounded down to a page) of the file to ready memory.

    Returns:
        Seconds from open to close, and whether O_DIRECT was taken.

    Raises:
        MismatchError: a byte is not that of `reference`.
    """
    mode = "direct" if config.is_direct else "buffered"
    how = [str(nbytes), str(config.block_bytes), str(config.threads), mode]
    how += [] if reference is None else [str(reference)]
    seconds, mode = _run(program, path, *how).split()
    return float(seconds), mode == "direct"


def _run(program: Path, path: Path, *arguments: str) -> str:
    command = [str(program), str(path), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == MISMATCH_CODE:
        raise MismatchError(result.stderr)
    result.check_returncode()
    return result.stdout


def best_write_config(program: Path, folder: Path, nbytes: int) -> WriteConfig:
    """Returns the fastest configuration for up to PROBE_BYTES of `nbytes`, by a short probe."""
    path = folder / "probe"

    def seconds_of(config: WriteConfig) -> float:
        seconds, _ = write_raw(program, path, min(nbytes, PROBE_BYTES), config)
        path.unlink()
        return seconds

    combined = itertools.product(_blocks_for(nbytes), THREADS, (False, True))
    return _fastest(list(itertools.starmap(WriteConfig, combined)), seconds_of)


def best_read_config(program: Path, path: Path, nbytes: int, *, is_direct: bool) -> ReadConfig:
    """Returns the fastest configuration for up to PROBE_BYTES of the file, by a short probe."""

    def seconds_of(config: ReadConfig) -> float:
        return read_raw(program, path, min(nbytes, PROBE_BYTES), config)[0]

    combined = itertools.product(_blocks_for(nbytes), THREADS, (is_direct,))
    return _fastest(list(itertools.starmap(ReadConfig, combined)), seconds_of)


def _blocks_for(nbytes: int) -> list[int]:
    return [size for size in BLOCKS if size <= max(nbytes, BLOCKS[0])]


def _fastest(configs: Sequence[C], seconds_of: Callable[[C], float]) -> C:
    """Returns the best of several shuffled passes, each over fewer of the best so far."""
    best = dict.fromkeys(configs, float("inf"))
    order = random.Random(0)
    for count in PROBED:
        configs = sorted(configs, key=best.__getitem__)[:count]
        for config in order.sample(list(configs), len(configs)):
            best[config] = min(best[config], seconds_of(config))
    return min(configs, key=best.__getitem__)
