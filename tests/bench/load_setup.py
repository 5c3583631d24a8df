"""Which sides load.py has for which case on this machine: names alone, without torch."""

from __future__ import annotations

import os
from pathlib import Path

from cases import LOAD_CASES, Case
from save_setup import HAS_SAFETENSORS

SIDES = ("ours", "dcpx", "ours_unverified", "stock_files", "stock", "safetensors", "raw")
PLAIN_TENSORS = ("64mib", "64kib", "tiny")
NOT_EVERYWHERE = {"dcpx": ("64kib", "tiny"), "safetensors": PLAIN_TENSORS, "raw": PLAIN_TENSORS}
METERED = {  # sides whose memory is measured, by size
    "full": ("ours", "stock", "safetensors"),
    "quick": ("ours", "stock"),
    "smoke": ("ours", "stock"),
}
WARM, COLD = CACHES = ("warm", "cold")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def sides_of(case: Case) -> list[str]:
    """Returns the names of the sides that a case has on this machine."""
    names = [name for name in SIDES if case.name in NOT_EVERYWHERE.get(name, tuple(LOAD_CASES))]
    return [name for name in names if name != "safetensors" or HAS_SAFETENSORS]


def caches_here() -> list[str]:
    """Returns the states of the page cache that this process can bring about."""
    return list(CACHES) if os.access(DROP_CACHES, os.W_OK) else [WARM]
