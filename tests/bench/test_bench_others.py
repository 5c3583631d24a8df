"""The other benches run, and say what they must; a wrong bit is noticed. No test asks how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import load_steps
import plan
import plan_meter
import pytest
import save_steps
import torch
from async_save import METERED, SIDES
from cases import EXPORT_CASES, EXPORT_SIDES, MismatchError
from conftest import ROOT
from export_sides import ExportSides
from safetensors.torch import load_file, save_file
from test_bench import run_bench

# ---- Asynchronous saves -------------------------------------------------------------------------


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


# ---- Exports ------------------------------------------------------------------------------------


@pytest.mark.slow  # 15 s: processes that import torch, also on two ranks
@pytest.mark.multirank
def test_every_side_is_measured_on_each_number_of_ranks(tmp_path: Path) -> None:
    report, printed = run_bench("export.py", tmp_path, "--cases", "64mib", "--rounds", "1")
    assert [(r["case"], r["ranks"]) for r in report["results"]] == [("64mib", 1), ("64mib", 2)]
    for found in report["results"]:
        assert found["times"].keys() == {*EXPORT_SIDES, "load_and_save"}
        assert found["meters"].keys() == set(EXPORT_SIDES)
    shown = {(row["side"], row["what"], row["ranks"]) for row in report["targets"]}
    assert shown == {
        (side, what, ranks)
        for side in ("live", "stored")
        for what in ("time", "extra_peak_mib")
        for ranks in (1, 2)
    }
    assert "2 GiB of 64 MiB tensors, 2 ranks | live: time of a save" in printed


@pytest.mark.parametrize("name", EXPORT_SIDES)
def test_wrong_bits_of_a_side_are_noticed(tmp_path: Path, name: str) -> None:
    made = ExportSides(EXPORT_CASES["64mib"], "smoke", 0, 1, tmp_path)
    side = made.side(name)
    side.run(tmp_path / "out")
    side.check(tmp_path / "out")
    if name in ("live", "stored"):
        file = tmp_path / "out" / "model.safetensors"
        state = load_file(file)
        state["layer.1.weight"].view(torch.int32)[-1, -1] ^= 1
        save_file(state, file)
    else:
        made._local["layer.1.weight"].view(torch.int32)[-1, -1] ^= 1
    with pytest.raises(MismatchError, match=r"layer\.1\.weight"):
        side.check(tmp_path / "out")


# ---- Plans of many ranks ------------------------------------------------------------------------


@pytest.mark.slow
def test_every_case_prints_both_sides_and_how_they_grow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan.main(["--ranks", "4", "8", "--tensors", "3"])
    lines = capsys.readouterr().out.splitlines()
    for case in ("tall", "wide", "moe", "hsdp"):
        for step in ("save", "load"):
            rows = [line for line in lines if line.startswith(f"{case:5} {step:5}")]
            assert len(rows) == 3
            assert "growth exponents" in rows[-1]


def test_side_that_would_take_too_long_is_left_out() -> None:
    side = plan_meter.Side("stock", limit_s=10.0)
    side.points = [
        (items, plan_meter.Timing(seconds, items, 0)) for items, seconds in ((100, 1.0), (200, 2.0))
    ]
    assert side.exponent() == side.exponent("more_bytes") == 1.0
    assert side.may_run(1000)
    assert not side.may_run(1001)
    assert side.run(2000, lambda: pytest.fail("ran")) == (None, None)


# ---- Steps of a save and a load -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "item_bytes"), [(save_steps, 64), (load_steps, 64), (load_steps, 0)]
)
def test_every_step_is_met_and_patches_are_undone(
    tmp_path: Path, table: Any, item_bytes: int
) -> None:
    before = [getattr(step.owner, step.name) for step in table.STEPS]
    found = table.measure(50, item_bytes, 1, tmp_path)
    assert list(found) == [step.title for step in table.STEPS]
    assert min(found.values()) > 0
    *_, whole = found
    assert sum(us for title, us in found.items() if title[0] != "-") <= 2 * found[whole]
    assert [getattr(step.owner, step.name) for step in table.STEPS] == before
    assert [path.name for path in tmp_path.iterdir()] == ["save"] * (table is load_steps)
