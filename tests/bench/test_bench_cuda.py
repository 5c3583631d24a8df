"""The bench of device copies: its pure parts everywhere, all of it where there is a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from cuda_cases import GIB, KIB, MIB, SIZES, cases
from cuda_rounds import Found, interleave

BENCH = ROOT / "tests" / "bench" / "cuda.py"


def _loaded() -> Any:
    # By its path: other packages are called `cuda`, too.
    spec: Any = importlib.util.spec_from_file_location("bench_cuda", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cuda = _loaded()


def run_bench(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH), *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_cases_are_what_the_figures_are_stated_for() -> None:
    full = cases("full")
    for key, total, nbytes in (
        ("64mib", GIB, 64 * MIB),
        ("64kib", GIB, 64 * KIB),
        ("4kib", GIB, 4 * KIB),
        ("8gib-64mib", 8 * GIB, 64 * MIB),
        ("8gib-64kib", 8 * GIB, 64 * KIB),
        ("8gib-4kib", 8 * GIB, 4 * KIB),
    ):
        assert full[key].nbytes == total
        assert {shape.nbytes for shape in full[key].shapes} == {nbytes}
    sizes = [shape.nbytes for shape in full["mixed"].shapes]
    assert 64 * KIB <= min(sizes) <= 80 * KIB
    assert 48 * MIB <= max(sizes) <= 64 * MIB
    assert all(shape.columns < shape.stride for shape in full["strided"].shapes)
    assert full == cases("full")


@pytest.mark.parametrize("size", SIZES)
def test_every_size_has_every_case_with_something_in_it(size: str) -> None:
    assert list(cases(size))[:5] == ["64mib", "64kib", "4kib", "mixed", "strided"]
    assert all(case.shapes and case.nbytes for case in cases(size).values())


def test_tables_and_verdicts_say_what_the_rounds_say() -> None:
    case = cases("smoke")["64kib"]
    to_host = {"block": [1.0, 2.0], "ours": [1.25, 2.5], "stock_stager": [5.0, 10.0]}
    to_device = {"block": [1.0, 2.0], "ours": [2.0, 4.0]}
    found = {"host": Found(to_host, {"other": "no such module"}), "device": Found(to_device, {})}
    assert cuda.move_verdicts(case, found) == [
        [f"{case.title}, host: of the block's rate", ">= 0.7", "0.8", "yes"],
        [f"{case.title}, host: speed of stock's stager", ">= 2", "4", "yes"],
        [f"{case.title}, device: of the block's rate", ">= 0.7", "0.5", "**no**"],
    ]
    rows = cuda.rate_rows(case.title, 1 << 30, found["host"], "block")
    assert rows[1] == [case.title, "ours", "2", "0.644 (0.429-0.859)", "0.8 (0.8-0.8)"]
    assert rows[-1] == [case.title, "other", "no such module", "", ""]
    assert cuda.time_rows("x", Found({"a": [0.1, 0.2]}, {"a": "its first run"})) == [
        ["x", "a", "2, its first run", "150 (100-200)"]
    ]


def test_side_that_fails_is_told_of_and_ours_is_raised() -> None:
    def fails() -> float:
        raise RuntimeError("no such thing")

    later = time.monotonic() + 600
    found = interleave({"block": lambda: 0.5, "other": fails}, 2, later)
    assert found.times == {"block": [0.5, 0.5]}
    assert found.notes == {"other": "RuntimeError: no such thing"}
    with pytest.raises(RuntimeError, match="no such thing"):
        interleave({"ours": fails}, 1, later)


def test_sides_that_take_too_long_run_once_or_not() -> None:
    later = time.monotonic() + 600
    found = interleave({"quick": lambda: 0.1, "slow": lambda: 500.0}, 3, later)
    assert (len(found.times["quick"]), found.times["slow"]) == (3, [500.0])
    assert found.notes == {"slow": "its first run"}
    found = interleave({"quick": lambda: 0.1}, 3, time.monotonic() - 1)
    assert (found.times, found.notes) == ({}, {"quick": "no time left"})


@pytest.mark.slow
def test_bench_without_a_gpu_says_so_and_fails() -> None:
    if not cuda_reason():
        return  # test_bench_runs_on_a_gpu
    done = run_bench("pack", "--size", "smoke")
    assert done.returncode == 1
    assert done.stderr.startswith("tests/bench/cuda.py needs a GPU: ")
    assert "Traceback" not in done.stderr


def cuda_reason() -> str:
    from cuda_gpu import why_not

    return why_not()


@pytest.mark.cuda
@pytest.mark.alone
def test_bench_runs_on_a_gpu(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = run_bench("--size", "smoke", "--folder", str(tmp_path), "--json", str(result))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(result.read_text())
    assert {"64kib, to the host", "64kib, stall", "steps"} <= report.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
