"""Which sides save.py has for which case on this machine: names alone, without torch."""

from __future__ import annotations

import importlib.util

from cases import CASES, Case

HAS_SAFETENSORS = importlib.util.find_spec("safetensors") is not None

SIDES = ("ours", "dcpx", "stock", "stock2", "ours_nosync", "stock_nosync", "safetensors", "raw",
         "dcp_alone")  # fmt: skip
TENSOR_CASES = tuple(name for name in CASES if name != "scalars")
NOT_EVERYWHERE = {
    "dcpx": ("64kib", "4kib", "tiny"),  # where the planner weighs
    "stock2": tuple(name for name in CASES if name != "4kib"),  # no faster there, and 30 s each
    "ours_nosync": ("tiny",),
    "stock_nosync": ("tiny",),
    "safetensors": TENSOR_CASES,
    "raw": TENSOR_CASES,
    "dcp_alone": ("64kib", "4kib", "scalars"),
}
METERED = {  # sides whose memory and counting thread are measured, by size
    "full": ("ours", "dcpx", "stock", "stock2", "safetensors", "dcp_alone", "raw"),
    "quick": ("ours", "stock"),
    "smoke": ("ours",),
}
# Where Python works per item, a busy thread makes a save take minutes: each time that it gives the
# GIL away it waits up to 5 ms for it.
COUNTED_CASES = ("64mib", "4gib")


def is_metered(case: str, side: str) -> bool:
    """Returns whether memory or the counting thread of a side say something for this case."""
    if side == "raw":  # in a process of its own: what the machine takes from a busy neighbour
        return case in COUNTED_CASES
    return side in METERED["full"] and side in sides_of(CASES[case])


def sides_of(case: Case) -> list[str]:
    """Returns the names of the sides that a case has on this machine."""
    names = [name for name in SIDES if case.name in NOT_EVERYWHERE.get(name, (case.name,))]
    return [name for name in names if name != "safetensors" or HAS_SAFETENSORS]
