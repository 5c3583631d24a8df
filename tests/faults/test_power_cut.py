"""The power goes before any call of a save: the old checkpoint or the new one is there, whole.

On ext4 and xfs of their own (power_cuts.py), with the journal flushed first and not, by our reader
and by stock's. After `save` has returned it is the new one, and the next save works. A sample of
the calls by default; DCPX_EVERY_POINT=1 cuts before each.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cut_saves import SCENARIOS
from power_cuts import FILE_SYSTEMS, MODES, TIMEOUT_S, cut
from support.machine import EVERY_POINT, seconds, stride

STRIDE = 1 if EVERY_POINT else stride(20)  # a save makes 32 to 52 calls


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(seconds(TIMEOUT_S) + 20)
@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_power_cut_at_any_call_of_a_save_leaves_old_or_new_and_new_once_it_returned(
    tmp_path: Path, kind: str, seed: int
) -> None:
    sweeps = [
        {
            "scenario": scenario,
            "mode": mode,
            "stride": STRIDE,
            "first": (seed + 5 * n) % STRIDE,
            "ends": STRIDE > 20,  # else there are so many points that all outcomes are met
        }
        for n, (scenario, mode) in enumerate((s, m) for s in SCENARIOS for m in MODES)
    ]
    found = cut(tmp_path, kind, sweeps)
    bad = [point for sweep in found for point in sweep["points"] if point[3]]
    assert bad == []
    for sweep in found:
        *_, last = sweep["points"]
        assert last[1:3] == ["the end", "new"]
    # Both outcomes were met: the cuts took something away, and were not all too early.
    outcomes = {point[2] for sweep in found for point in sweep["points"][:-1]}
    assert outcomes == {"none", "old", "new"}
