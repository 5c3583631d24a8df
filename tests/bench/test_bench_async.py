"""The bench of asynchronous saves runs, and says what it must. No test asks how fast."""

from __future__ import annotations

from pathlib import Path

import pytest
from async_save import METERED, SIDES
from conftest import ROOT
from test_bench import run_bench


@pytest.mark.slow
def test_async_bench_measures_every_side_and_leaves_nothing(tmp_path: Path) -> None:
    report, printed = run_bench("async_save.py", tmp_path, "--cases", "64mib", "4000")
    for case in ("64mib", "4000"):
        times = report["times"][case]["times"]
        assert times.keys() == set(SIDES) | {f"{s} stall" for s in SIDES if s != "ours_sync"}
        assert {len(values) for values in times.values()} == {1}
        assert all(times[f"{s} stall"] <= times[s] for s in SIDES if s != "ours_sync")
    assert report["meters"].keys() == set(METERED)
    for meters in report["meters"].values():
        assert meters["rss"].keys() == {"2", "4"}
        assert meters["counting"]["rate"] >= 0  # a busy machine lets it count nothing
    assert "| side | stall, s | of memcpy |" in printed
    assert "| side | peak extra MiB of state MiB |" in printed


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_bench_of_first_saves_runs_every_side_in_a_fresh_process(
    tmp_path: Path, ranks: str
) -> None:
    arguments = ("--ranks", ranks, "--rounds", "1", "--before", str(ROOT))
    (taken,), printed = run_bench("async_first.py", tmp_path, *arguments)
    assert taken.keys() == {"ours", "prewarmed", "stock", "before"}
    assert all({"first", "second", "system"} <= side.keys() for side in taken.values())
    assert "prewarm" in taken["prewarmed"]
    assert printed.count("\n| ") == 1 + len(taken)
