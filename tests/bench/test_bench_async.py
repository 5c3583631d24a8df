"""The bench of asynchronous saves runs, and says what it must. No test asks how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from async_save import METERED, SIDES
from conftest import ROOT

ASYNC_FIRST = ROOT / "tests" / "bench" / "async_first.py"
ASYNC_SAVE = ROOT / "tests" / "bench" / "async_save.py"


@pytest.mark.slow
def test_async_bench_measures_every_side_and_leaves_nothing(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [
        sys.executable, str(ASYNC_SAVE), "--size", "smoke", "--cases", "64mib", "4000",
        "--folder", str(tmp_path), "--json", str(result),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(result.read_text())
    for case in ("64mib", "4000"):
        times = report["times"][case]["times"]
        assert times.keys() == set(SIDES) | {f"{s} stall" for s in SIDES if s != "ours_sync"}
        assert {len(values) for values in times.values()} == {1}
        assert all(times[f"{s} stall"] <= times[s] for s in SIDES if s != "ours_sync")
    assert report["meters"].keys() == set(METERED)
    for meters in report["meters"].values():
        assert meters["rss"].keys() == {"2", "4"}
        assert meters["counting"]["rate"] >= 0  # a busy machine lets it count nothing
    assert "| side | stall, s | of memcpy |" in done.stdout
    assert "| side | peak extra MiB of state MiB |" in done.stdout
    assert str(tmp_path) not in result.read_text() + done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_bench_of_first_saves_runs_every_side_in_a_fresh_process(
    tmp_path: Path, ranks: str
) -> None:
    result = tmp_path / "result.json"
    command = [
        sys.executable, str(ASYNC_FIRST), "--size", "smoke", "--ranks", ranks, "--rounds", "1",
        "--before", str(ROOT), "--folder", str(tmp_path), "--json", str(result),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (taken,) = json.loads(result.read_text())
    assert taken.keys() == {"ours", "prewarmed", "stock", "before"}
    assert all({"first", "second", "system"} <= side.keys() for side in taken.values())
    assert "prewarm" in taken["prewarmed"]
    assert done.stdout.count("\n| ") == 1 + len(taken)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
