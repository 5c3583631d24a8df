"""The benches run, say what they must, and notice a wrong byte. No test asks how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from case_states import check_same, make_state
from cases import CASES, MismatchError
from conftest import ROOT
from harness import Side, run_rounds
from save_setup import SIDES, sides_of
from save_sides import RawSide, dcp_side, dcpx_side, safetensors_side
from summary import SAVE_TARGETS, summarize
from tables import PARTS, as_markdown, new_page, part_of, put_on_page, time_text

BENCHES = ROOT / "tests" / "bench"
MIB = 1 << 20


def run_bench(script: str, folder: Path, *arguments: str) -> tuple[Any, str]:
    """Runs a bench at its smallest; returns its JSON and what it printed. Nothing else is left."""
    result = folder / "result.json"
    command = [
        sys.executable, str(BENCHES / script), "--size", "smoke", "--folder", str(folder),
        "--json", str(result), *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(folder) not in result.read_text() + done.stdout
    assert [path.name for path in folder.iterdir()] == ["result.json"]
    return json.loads(result.read_text()), done.stdout


# ---- The whole ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_save_measures_every_side_of_every_case_and_leaves_nothing(tmp_path: Path) -> None:
    report, printed = run_bench("save.py", tmp_path, "--rounds", "1", "--metered", "64mib")
    assert {name: report[name] for name in ("bench", "size")} == {"bench": "save", "size": "smoke"}
    assert report["machine"]["cores"] >= 1 and report["machine"]["torch"] == torch.__version__
    assert [r["case"] for r in report["results"]] == list(CASES)
    for result in report["results"]:
        sides = {*sides_of(CASES[result["case"]]), "engine"}
        assert result["times"].keys() == sides
        assert {len(values) for values in result["times"].values()} == {1}
        assert all(s["min"] <= s["median"] <= s["max"] for s in result["seconds"].values())
        assert result["times"]["engine"] < result["times"]["ours"]
        assert result["ours_speed_of"].keys() == sides - {"ours"}
        assert ("raw" in result) is ("raw" in sides)
    meters = next(r["meters"] for r in report["results"] if r["case"] == "64mib")["ours"]
    assert meters["extra_peak_bytes"] >= 0
    assert meters["rss_bytes_after"].keys() == {"3", "30"}
    assert meters["counting"].keys() == {"default", "one worker"}
    assert {row["is_reached"] for row in report["targets"]} <= {True, False}
    assert "### Figures to reach" in printed and "### Memory" in printed
    assert report["commands"] == [
        "python tests/bench/save.py --size smoke --rounds 1 --metered 64mib"
    ]


@pytest.mark.slow
@pytest.mark.multirank
def test_save_on_two_ranks_adds_to_what_one_rank_measured(tmp_path: Path) -> None:
    old = {"case": "tiny", "ranks": 1, "times": {"ours": [1.0], "stock": [2.0]}, "bytes": 8}
    (tmp_path / "result.json").write_text(json.dumps({"results": [old], "commands": ["old"]}))
    arguments = (
        "--rounds",
        "1",
        "--ranks",
        "2",
        "--cases",
        "64kib",
        "scalars",
        "--no-meters",
        "--merge",
    )
    report, printed = run_bench("save.py", tmp_path, *arguments)
    found = [(r["case"], r["ranks"]) for r in report["results"]]
    assert found == [("tiny", 1), ("64kib", 2), ("scalars", 2)]
    full = CASES["64kib"].smoke
    assert report["results"][1]["bytes"] == full.items * full.item_bytes
    assert report["results"][1]["times"].keys() == {*sides_of(CASES["64kib"]), "engine"}
    assert "20,000 x 64 KiB, 2 ranks" in printed and "`old`, `python tests" in printed


# ---- A wrong byte -------------------------------------------------------------------------------


def made_side(name: str, state: dict[str, Any], folder: Path) -> Side:
    if name == "raw":
        return RawSide(state, folder).side()
    if name == "dcpx":
        return dcpx_side(state)
    return safetensors_side(state) if name == "safetensors" else dcp_side(name, state)


def flip_a_byte_of_the_file(path: Path) -> None:
    content = bytearray((path / "raw").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "raw").write_bytes(content)


@pytest.mark.parametrize("name", [name for name in SIDES if name != "dcp_alone"])
def test_a_wrong_byte_is_caught_on_every_side(tmp_path: Path, name: str) -> None:
    state = make_state(CASES["tiny"], "smoke")
    side = made_side(name, state, tmp_path)
    path = tmp_path / "saved"
    side.run(path)
    side.check(path)
    if name == "raw":
        flip_a_byte_of_the_file(path)
    else:
        state["rank0.layer.2"].view(torch.uint8)[3, 5] ^= 1  # what was saved is now another
    with pytest.raises(MismatchError):
        side.check(path)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({"a": 1}, {"a": 1.0}),
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": 1}, {}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int32)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, 1)}),
        ({"a": torch.zeros(2)}, {"a": -torch.zeros(2)}),
    ],
)
def test_check_same_tells_apart_what_equality_does_not(
    saved: dict[str, Any], loaded: dict[str, Any]
) -> None:
    with pytest.raises(MismatchError):
        check_same(saved, loaded)
    check_same({"nan": torch.tensor([float("nan")])}, {"nan": torch.tensor([float("nan")])})


# ---- The harness --------------------------------------------------------------------------------


def test_rounds_run_every_side_in_shuffled_order_and_the_first_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.gc, "collect", lambda: 0)  # slow with all that pytest holds
    runs: list[tuple[str, str]] = []

    def side(name: str, rounds: int | None = None) -> Side:
        def run(path: Path) -> Mapping[str, float]:
            path.mkdir()
            runs.append((name, path.name))
            return {name: len(runs) + 0.0, f"{name}'s part": 0.5}

        def check(path: Path) -> None:
            assert path.is_dir()
            runs.append((name, "check"))

        return Side(name, run, check, rounds)

    times = run_rounds([side("a"), side("b"), side("few", rounds=1)], 6, tmp_path, quiet_s=0)
    assert [name for name, what in runs if what == "check"] == [
        name for name, what in runs if what.endswith("-0")
    ]
    assert {name: len(values) for name, values in times.items()} == {
        "a": 6, "a's part": 6, "b": 6, "b's part": 6, "few": 1, "few's part": 1,
    }  # fmt: skip
    orders = {
        tuple(name for name, what in runs if what.endswith(f"-{number}")) for number in range(2, 7)
    }
    assert orders == {("a", "b"), ("b", "a")}
    assert times["a"] == [float(i + 1) for i, run in enumerate(runs) if is_counted(run, "a")]
    assert not list(tmp_path.iterdir())


def is_counted(run: tuple[str, str], name: str) -> bool:
    return run[0] == name and run[1] not in ("check", f"{name}-0")


# ---- What is said -------------------------------------------------------------------------------


def report_of(
    results: list[dict[str, Any]], targets: Any = SAVE_TARGETS, **more: Any
) -> dict[str, Any]:
    names = ("cores", "cpu", "memory_gib", "kernel", "file_system", "python", "torch", "commit")
    machine = dict.fromkeys((*names, "torch-dcpx", "safetensors"), "?")
    fixed = {
        "bench": "save",
        "size": "full",
        "commands": ["c"],
        "machine": machine,
        "has_safetensors": True,
    }
    return summarize({**fixed, **more, "results": results}, targets)


def test_figures_are_reached_by_the_median_of_ratios() -> None:
    times = {"ours": [1.0, 1.0, 1.0], "raw": [0.91, 0.92, 0.1], "stock": [2.3, 9.0, 2.2]}
    report = report_of(
        [
            {"case": "64mib", "ranks": 1, "bytes": 1, "items": 1, "times": times},
            {"case": "tiny", "ranks": 1, "bytes": 1, "items": 1, "times": times},
            {"case": "4gib", "ranks": 2, "bytes": 1, "items": 1, "times": times},
        ]
    )
    reached = {(row["case"], row["base"]): row["is_reached"] for row in report["targets"]}
    assert reached == {("64mib", "raw"): True, ("64mib", "stock"): False, ("tiny", "stock"): True}
    text = as_markdown(report)
    assert "| ours: speed of the raw limit | >= 0.9 | 0.91 (0.1-0.92) | yes |" in text
    assert "| one 4 GiB tensor, 2 ranks | raw | 3 | 0.91 (0.1-0.92) s |" in text
    assert time_text({"median": 0.02, "min": 0.0123456, "max": 0.5}) == "20 (12.3-500) ms"


PAGE = ROOT / "docs" / "develop" / "measurements.md"


@pytest.mark.parametrize("bench", PARTS)
def test_tables_take_their_place_on_the_page_and_nothing_else(bench: str) -> None:
    page = PAGE.read_text()
    once = put_on_page(page, "table\n", bench)
    assert part_of(once, bench) == "table\n"
    assert put_on_page(once, part_of(page, bench), bench) == page
    with pytest.raises(ValueError, match="lacks"):
        put_on_page("# no marks", "table", bench)


def test_nothing_is_written_by_hand_between_the_parts_of_the_page() -> None:
    page = PAGE.read_text()
    for bench in PARTS:
        assert part_of(page, bench).startswith("`python tests/")  # the command
        page = put_on_page(page, "", bench)
    assert page == new_page()


def run_tables(*arguments: str) -> subprocess.CompletedProcess[str]:
    tables = str(ROOT / "tests" / "bench" / "tables.py")
    return subprocess.run([sys.executable, tables, *arguments], capture_output=True, text=True)


def test_a_result_makes_the_page_and_the_next_one_is_put_on_it(tmp_path: Path) -> None:
    page, report, printed = (tmp_path / name for name in ("page.md", "save.json", "plan.txt"))
    report.write_text(json.dumps(report_of([])))
    printed.write_text("tall 64 ranks\n")
    assert run_tables(str(report), "--page", str(page)).returncode == 0
    refused = run_tables(str(printed), "--page", str(page))
    assert refused.returncode == 2 and "plan.txt is no JSON: give the --command" in refused.stderr
    command = ("--command", "tests/bench/plan.py --cases tall")
    assert run_tables(str(printed), *command, "--page", str(page)).returncode == 0
    made = page.read_text()
    assert part_of(made, "save") == as_markdown(report_of([]))
    assert part_of(made, "plan").startswith("`python tests/bench/plan.py --cases tall` on ")
    assert part_of(made, "plan").endswith("```text\ntall 64 ranks\n```\n")
