"""200 saves and loads in one process, by every entry point: the driver of test_many_saves.py.

python many_worker.py DIRECTORY ROUNDS
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from forks import Table, alone
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


def one_round(root: Path, number: int) -> None:
    state = state_of(number)
    for way, save in SAVES.items():
        save(state, root / "ckpt" / way, None)
    for way in LOADS:
        assert is_same(state, loaded(way, state, root / "ckpt" / list(SAVES)[number % 4]))


def main() -> None:
    alone()
    root, rounds = Path(sys.argv[1]), int(sys.argv[2])
    (root / "tmp").mkdir()
    tempfile.tempdir = str(root / "tmp")
    for number in range(WARM_ROUNDS):
        one_round(root, number)
    torch_dcpx.wait()
    before = held(root)
    for number in range(rounds):
        one_round(root, number)
    torch_dcpx.wait()
    after = held(root)
    table = Table()
    for what, count in before.items():
        may_grow = count // 100 if what == "KiB resident" else 0
        is_well = after[what] <= count + may_grow
        said = f"{what}: {count} before, {after[what]} after {rounds} rounds"
        table.add("many saves and loads", said, None if is_well else "grows")
    table.print()


if __name__ == "__main__":
    main()
