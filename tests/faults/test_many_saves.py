"""Saves and loads over and over leave nothing behind: no file, thread, memory, mapping."""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_alone
from support.machine import points
from ways import LOADS, SAVES, is_same, loaded

import torch_dcpx

_libc = ctypes.CDLL(None)
WARM_ROUNDS = 15


def state_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(400_000, generator=generator),
        "view": torch.randn(60, 50, generator=generator).t(),
        **{f"small{i}": torch.randn(10, generator=generator) for i in range(50)},
        "step": seed,
        "objects": {"key": [1, 2]},
    }


def held(root: Path) -> dict[str, int]:
    torch_dcpx.wait()
    gc.collect()
    _libc.malloc_trim(0)
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "KiB resident": int(Path("/proc/self/statm").read_text().split()[1]) * 4,
        "in /dev/shm": sum(str(os.getpid()) in n or "dcpx" in n for n in os.listdir("/dev/shm")),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
        "files of checkpoints": sum(len(files) for _, _, files in os.walk(root / "ckpt")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def rounds(root: Path, count: int) -> tuple[dict[str, int], dict[str, int]]:
    """Makes rounds of four saves and two loads; returns what was held before and after them."""
    (root / "tmp").mkdir()
    tempfile.tempdir = str(root / "tmp")
    before: dict[str, int] = {}
    for number in range(WARM_ROUNDS + count):
        if number == WARM_ROUNDS:
            before = held(root)
        state = state_of(number)
        for way, save in SAVES.items():
            save(state, root / "ckpt" / way, None)
        for way in LOADS:
            assert is_same(state, loaded(way, state, root / "ckpt" / list(SAVES)[number % 4]))
    return before, held(root)


@pytest.mark.slow
def test_two_hundred_saves_and_loads_leave_nothing_behind(tmp_path: Path) -> None:
    before, after = run_alone(rounds, tmp_path, points(40))
    print(before, after)
    before["KiB resident"] += before["KiB resident"] // 100
    assert {what: count for what, count in after.items() if count > before[what]} == {}
