"""A save that leaves out an fsync, unlinks first or uses a name again is found by a power cut.

Each mutant is one line less in a protocol that otherwise stays; the tests of power cuts would be
worth nothing if it passed them. What no cut shows on these file systems (an fsync of new names or
of parents: the journal commits them with the next one) test_call_order.py shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from power_cuts import FILE_SYSTEMS, MODES, TIMEOUT_S, cut
from support.machine import EVERY_POINT, seconds

# Mutant, the save that it is of, the modes in which a cut shows it, and where it does: "end" is
# after the save returned, else behind the first call of that name.
SHOWN: list[tuple[str, str, list[int], str]] = [
    ("no fsync of a data file", "first, page cache alone", [1, 2], "end"),
    ("no fsync of the metadata", "first", [1, 2], "end"),
    ("no fsync of the rename", "first", [2], "end"),
    ("no fsync of the rename", "over ours", [2], "end"),
    ("unlink first", "over ours", [1], "unlinkat"),
    ("reuse a name", "over ours", [1, 2], "fallocate"),
]
# ext4 writes what is renamed over another file (auto_da_alloc), xfs does not.
SHOWN_ON = {
    "ext4": SHOWN,
    "xfs": [*SHOWN, ("no fsync of the metadata", "over ours", [1, 2], "end")],
}
_OF_ALL = ["a data file", "the new names", "the metadata", "the rename"]
_OF_FIRST = [*_OF_ALL, "the parent /", "the parent /a", "the parent /a/b"]
ALL = [
    *((f"no fsync of {of}", "first") for of in _OF_FIRST),
    *((f"no fsync of {of}", "over ours") for of in _OF_ALL),
    *((f"no fsync of {of}", "first, page cache alone") for of in _OF_ALL),
    ("unlink first", "over ours"),
    ("reuse a name", "over ours"),
]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(seconds(TIMEOUT_S) + 20)
@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_mutant_of_the_protocol_is_found_by_a_power_cut(tmp_path: Path, kind: str) -> None:
    shown = [(m, s, mode, at) for m, s, modes, at in SHOWN_ON[kind] for mode in modes]
    sweeps: list[dict[str, Any]] = []
    for mutant, scenario, mode, at in shown:
        where = {"end": True} if at == "end" else {"after": at, "stride": 4}
        sweeps.append({"mutant": mutant, "scenario": scenario, "mode": mode, **where})
    if EVERY_POINT:  # all of them, wherever a cut may show them; the table says which it does
        sweeps = [
            {
                "mutant": mutant,
                "scenario": scenario,
                "mode": mode,
                # Before its rename no save is believed, whatever is durable of it.
                **({"after": "renameat"} if "fsync" in mutant else {}),
            }
            for mutant, scenario in ALL
            for mode in MODES
        ]
    found = cut(tmp_path, kind, sweeps)
    bad = {
        (sweep["mutant"], sweep["scenario"], sweep["mode"])
        for sweep in found
        if any(point[3] for point in sweep["points"])
    }
    assert bad >= {(mutant, scenario, mode) for mutant, scenario, mode, _ in shown}
