"""The bench of loads runs, says what it must, and notices a wrong byte. No test asks how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import load_setup
import load_sides
import pytest
import torch
from case_states import make_state, payload_bytes
from cases import LOAD_CASES, MismatchError
from load_setup import sides_of
from load_sides import Destination, LoadSides, write_checkpoints
from shards import LOADED_RANKS, shares
from summary import LOAD_TARGETS, summarize
from tables import as_markdown
from test_bench import report_of, run_bench


@pytest.mark.slow
def test_load_measures_every_side_of_every_case_and_leaves_nothing(tmp_path: Path) -> None:
    arguments = ("--rounds", "1", "--caches", "warm", "--metered", "64mib")
    report, printed = run_bench("load.py", tmp_path, *arguments)
    assert [(r["case"], r["cache"]) for r in report["results"]] == [(c, "warm") for c in LOAD_CASES]
    for found in report["results"]:
        sides = set(sides_of(LOAD_CASES[found["case"]]))
        assert found["times"].keys() == {*sides, "engine"}
        assert {len(values) for values in found["times"].values()} == {1}
        assert found["times"]["engine"] < found["times"]["ours"]
        assert found["bytes_read"].keys() == sides - {"raw", "safetensors"}
        for read in found["bytes_read"].values():
            assert read["rchar"] >= read.get("engine_read", 0) >= read.get("engine_needed", 0)
    meters = next(r["meters"] for r in report["results"] if r["case"] == "64mib")
    assert meters.keys() == {"ours", "stock"}
    assert all(found["extra_peak_bytes"] >= 0 for found in meters.values())
    assert "### Figures to reach" in printed and "### Bytes" in printed
    assert "All was loaded from the page cache" in printed


def made_sides(case_name: str, folder: Path, cache: str = "warm") -> tuple[Destination, LoadSides]:
    case = LOAD_CASES[case_name]
    state = make_state(case, "smoke")
    write_checkpoints(case, state, folder, sides_of(case))
    destination = Destination(case, state)
    return destination, LoadSides(destination, payload_bytes(state), folder, cache)


def first_tensor(destination: Destination) -> torch.Tensor:
    found = next(iter(destination.states[-1].values()))
    return next(iter(found.chunks.values())) if hasattr(found, "chunks") else found


@pytest.mark.parametrize(
    ("case", "name"),
    [(c, side) for c in ("tiny", "columns") for side in sides_of(LOAD_CASES[c]) if side != "raw"],
)
def test_a_wrong_byte_in_the_destination_is_caught(tmp_path: Path, case: str, name: str) -> None:
    destination, maker = made_sides(case, tmp_path)
    side = maker.side(name)
    assert side.before is not None
    side.before()
    side.run(tmp_path)
    side.check(tmp_path)
    first_tensor(destination).view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(MismatchError):
        side.check(tmp_path)
    side.run(tmp_path)
    side.check(tmp_path)
    side.before()  # what an earlier side loaded must not pass for what the next one did
    with pytest.raises(MismatchError):
        side.check(tmp_path)


def test_a_cold_turn_empties_the_page_cache_first_and_a_warm_one_fills_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "drop_caches"
    monkeypatch.setattr(load_setup, "DROP_CACHES", asked)
    assert load_setup.caches_here() == ["warm"]
    asked.touch()
    assert load_setup.caches_here() == ["warm", "cold"]
    destination, maker = made_sides("tiny", tmp_path / "saved", "cold")
    for name in ("ours", "raw"):
        asked.write_text("")
        side = maker.side(name)
        assert side.before is not None
        side.before()
        assert asked.read_text() == "3"
        side.run(tmp_path)
        side.check(tmp_path)
    assert maker.raw is not None and maker.raw.config.is_direct
    asked.write_text("")
    read: list[Path] = []
    monkeypatch.setattr(load_sides, "read_to_cache", read.append)
    warm = LoadSides(destination, 0, tmp_path / "saved", "warm").side("stock_files")
    assert warm.before is not None
    warm.before()
    assert asked.read_text() == "" and read == [tmp_path / "saved" / "stock"]


@pytest.mark.parametrize("dim", [0, 1])
def test_the_ranks_shares_are_the_whole_tensor(dim: int) -> None:
    whole = torch.arange(80).view(8, 10)
    parts = [part for share in shares(whole, dim, LOADED_RANKS) for part in share.items()]
    assert torch.equal(torch.cat([view for _, view in parts], dim), whole)
    for (row, column), view in parts:
        assert torch.equal(view, whole[row:, column:][: view.shape[0], : view.shape[1]])


def test_figures_of_loads_are_of_their_cache_and_of_what_was_read() -> None:
    times = {"ours": [1.0], "ours_unverified": [0.9], "raw": [0.85], "stock": [6.0]}
    read = {"engine_read": 101, "rchar": 103}
    results: list[dict[str, Any]] = [
        {"case": "64mib", "cache": "warm", "times": times, "bytes": 100},
        {"case": "64mib", "cache": "cold", "times": {**times, "raw": [0.95]}, "bytes": 100},
        {"case": "rows", "cache": "warm", "bytes": 100, "bytes_read": {"ours": read}},
        {"case": "columns", "cache": "warm", "bytes": 100, "item_bytes": 50,
         "bytes_read": {"ours": read, "ours_unverified": read}},
    ]  # fmt: skip
    for result in results:
        result.update(ranks=1, items=1)
    report = report_of(results, LOAD_TARGETS, bench="load")
    reached = {
        (row["case"], row["cache"], row["what"], row["side"], row["base"]): row["is_reached"]
        for row in report["targets"]
    }
    assert reached == {
        ("64mib", "warm", "speed", "ours_unverified", "raw"): False,
        ("64mib", "warm", "speed", "ours", "raw"): True,
        ("64mib", "warm", "speed", "ours", "stock"): True,
        ("64mib", "cold", "speed", "ours", "raw"): True,
        ("rows", "warm", "engine_read", "ours", ""): True,
        ("rows", "warm", "rchar", "ours", ""): False,
        ("columns", "warm", "of_items", "ours", ""): False,
        ("columns", "warm", "engine_read", "ours_unverified", ""): True,
        ("columns", "warm", "rchar", "ours_unverified", ""): True,
    }
    text = as_markdown(report)
    assert "2 GiB of 64 MiB tensors, cold | ours: speed of the raw limit | >= 0.9 | 0.95" in text
    assert summarize(report, LOAD_TARGETS)["targets"] == report["targets"]
