"""The bench of device copies: its pure parts everywhere, all of it where there is a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from cuda_cases import KIB, MIB, SIZES, cases

BENCH = ROOT / "tests" / "bench" / "cuda.py"


def _loaded() -> Any:
    # By its path: other packages are called `cuda`, too.
    spec: Any = importlib.util.spec_from_file_location("bench_cuda", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cuda = _loaded()


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_cases_are_what_the_figures_are_stated_for() -> None:
    full = cases("full")
    assert len(full["mixed"].shapes) == 1000
    sizes = [shape.nbytes for shape in full["mixed"].shapes]
    assert 64 * KIB <= min(sizes) <= 80 * KIB
    assert 48 * MIB <= max(sizes) <= 64 * MIB
    assert [shape.nbytes for shape in full["small"].shapes] == [64 * KIB] * 20_000
    assert all(shape.columns < shape.stride for shape in full["strided"].shapes)
    assert max(case.nbytes for case in full.values()) < 12 << 30
    assert full == cases("full")


@pytest.mark.parametrize("size", SIZES)
def test_every_size_has_every_case_with_something_in_it(size: str) -> None:
    assert list(cases(size)) == ["mixed", "strided", "small"]
    assert all(case.shapes and case.nbytes for case in cases(size).values())


def test_tables_and_verdicts_say_what_the_rounds_say() -> None:
    case = cases("smoke")["small"]
    found = {
        "to_host": {"block": [1.0, 2.0], "ours": [1.25, 2.5], "stock_stager": [5.0, 10.0]},
        "to_device": {"block": [1.0, 2.0], "ours": [2.0, 4.0]},
        "stall": {"block": [0.1, 0.1], "staged": [0.1, 0.12], "overlapped": [0.001, 0.002]},
        "device_bytes": (1 << 20, 0),
    }
    lines = cuda.verdicts("small", case, found)
    assert lines == [
        "- small: to_host, of the block's rate 0.8, >= 0.7: met",
        "- small: to_device, of the block's rate 0.5, >= 0.7: NOT MET",
        "- small: to_host, over stock's stager 4, >= 2: met",
        "- small: stall beyond bytes / rate, s -0.0329, <= 0.005: met",
        "- small: device MiB during a save 1, <= 64: met",
        "- small: device MiB after it 0, <= 0: met",
    ]
    assert "| ours | 0.00786 (0.00524-0.0105) | 0.8 (0.8-0.8) | 1 (1-1) |" in cuda.rates_table(
        "To the host", case, found["to_host"]
    )
    assert "| overlapped | 1.5 (1-2) | -98.5 (-99--98) |" in cuda.stall_table(case, found["stall"])
    steps = cuda.step_lines({"idle": [1.0, 1.0], "saving": [1.0, 1.1]})
    assert steps[0].endswith("take 1.05 (1-1.1) x as long, <= 1.02: NOT MET")


@pytest.mark.slow
def test_bench_without_a_gpu_says_so_and_fails() -> None:
    if not cuda.why_not():
        return  # test_bench_runs_on_a_gpu
    done = run_bench("--size", "smoke")
    assert done.returncode == 1
    assert done.stderr.startswith("tests/bench/cuda.py needs a GPU: ")
    assert "Traceback" not in done.stderr


@pytest.mark.cuda
def test_bench_runs_on_a_gpu(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = run_bench("--size", "smoke", "--folder", str(tmp_path), "--json", str(result))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(result.read_text())
    assert report["cases"].keys() == {"mixed", "strided", "small"}
    assert "device MiB after it" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
