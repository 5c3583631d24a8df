"""A fresh process for one case and side of save.py: memory, and a counting thread."""

from __future__ import annotations

import gc
import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from case_states import make_state, payload_bytes
from cases import CASES
from engine_clock import engine_calls
from harness import settle
from meters import CountingThread, Reading, extra_peak_bytes, relative_rate, resident_bytes
from raw_limit import WriteConfig, build_program, write_raw
from save_sides import WRITERS, save, save_safetensors

import torch_dcpx
from torch_dcpx import DcpxWriter, WriteOptions

Save = Callable[[dict[str, Any], Path], None]
COUNTED_SAVES = 3
LONG_S = 5.0
ONE_THREAD = WriteConfig(block_bytes=4 << 20, threads=1, is_preallocated=True)
LATER = (3, 30)  # after these saves the resident memory is compared


def saver(side: str) -> Save:
    if side == "safetensors":
        return lambda state, path: save_safetensors(
            {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}, path
        )
    if side == "raw":
        program = build_program("raw_write")

        def write(state: dict[str, Any], path: Path) -> None:
            path.mkdir()
            write_raw(program, path / "raw", payload_bytes(state), ONE_THREAD)

        return write
    if side == "dcpx":
        return save_by_us
    return lambda state, path: save(state, WRITERS[side](path))


def save_by_us(state: dict[str, Any], path: Path) -> None:
    torch_dcpx.save({"model": state}, path, no_dist=True)


def save_with_one_worker(state: dict[str, Any], path: Path) -> None:
    save(state, DcpxWriter(path, options=WriteOptions(workers=1)))


def counting(
    side: str, state: dict[str, Any], save_to: Save, paths: Iterator[Path], *, is_full: bool
) -> float:
    """Returns the counting thread's relative rate: during our C++ call, or the others' save."""

    def once(thread: CountingThread) -> list[tuple[Reading, Reading]]:
        before = thread.read()
        with engine_calls(thread.read) as calls:
            save_to(state, next(paths))
        return calls if side == "ours" else [(before, thread.read())]

    rates = []
    for _ in range(COUNTED_SAVES if side in ("ours", "raw") and is_full else 1):
        settle()
        began = time.monotonic()
        rates.append(relative_rate(once, idle_s=0.4 if is_full else 0.1))
        if time.monotonic() - began > LONG_S:
            break  # what takes so long is averaged well enough
    return statistics.median(rates)


def rss_after(state: dict[str, Any], save_to: Save, paths: Iterator[Path]) -> dict[str, int]:
    """Returns the resident bytes after the third save and after the thirtieth."""
    found = {}
    for number in range(1, max(LATER) + 1):
        save_to(state, next(paths))
        if number in LATER:
            gc.collect()
            found[str(number)] = resident_bytes()
    return found


def meter(
    *, case: str, side: str, size: str, meters: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Returns what the meters ("peak", "counting", "growth") say of one case and side."""
    state = make_state(CASES[case], size)
    save_to = saver(side)

    def fresh_paths() -> Iterator[Path]:
        for number in itertools.count():
            path = folder / f"{side}-{number}"
            yield path
            shutil.rmtree(path)

    paths = fresh_paths()
    found: dict[str, Any] = {}
    save_to(make_state(CASES["tiny"], "full"), next(paths))  # imports, first uses
    if "peak" in meters:
        found["extra_peak_bytes"] = extra_peak_bytes(lambda: save_to(state, next(paths)))
    if "growth" in meters and side == "ours":
        found["rss_bytes_after"] = rss_after(state, save_to, paths)
    if "counting" in meters:
        count = partial(counting, side, state, paths=paths, is_full=size == "full")
        found["counting"] = {"default": count(save_to)}
        if side == "ours":
            found["counting"]["one worker"] = count(save_with_one_worker)
    return found
