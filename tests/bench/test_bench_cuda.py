"""The bench of device copies: its pure parts everywhere, all of it where there is a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT
from cuda_cases import cases
from cuda_gpu import Gpu, HostBlock
from cuda_rounds import Found, LeftOutError, interleave
from fake_cuda.driver_calls import CudaError
from support.machine import seconds

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
        timeout=seconds(280),
        check=False,
    )


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


def raises(error: Exception) -> Callable[[], float]:
    def side() -> float:
        raise error

    return side


def test_side_that_fails_or_takes_too_long_is_told_of_and_ours_is_raised() -> None:
    later = time.monotonic() + 600
    sides = {
        "block": lambda: 0.5,
        "slow": lambda: 500.0,
        "fails": raises(RuntimeError("no such thing")),
        "refused": raises(CudaError(2, "cuMemHostAlloc")),
        "ours": raises(LeftOutError("memory is not page-locked")),
    }
    found = interleave(sides, 2, later)
    assert found.times == {"block": [0.5, 0.5], "slow": [500.0]}
    assert found.notes == {
        "slow": "its first run",
        "fails": "RuntimeError: no such thing",
        "refused": "CudaError: (2, 'cuMemHostAlloc')",
        "ours": "left out: memory is not page-locked",
    }
    for error in (RuntimeError("no such thing"), CudaError(2, "cuMemHostAlloc")):
        with pytest.raises(type(error)):
            interleave({"ours": raises(error)}, 1, later)
    found = interleave({"quick": lambda: 0.1}, 3, time.monotonic() - 1)
    assert (found.times, found.notes) == ({}, {"quick": "no time left"})


def test_block_is_copied_as_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBlock, "piece_bytes", 4096)
    seen: list[tuple[object, ...]] = []
    calls = SimpleNamespace(
        register_range=lambda address, nbytes, _: seen.append((address, nbytes)),
        to_host=lambda dst, src, nbytes, _: seen.append((dst, src, nbytes)),
        to_device=lambda dst, src, nbytes, _: seen.append((dst, src, nbytes)),
        synchronize=lambda _: None,
        call=lambda *_: None,
    )
    host = HostBlock(9000)
    host.register(calls)  # type: ignore[arg-type]
    host.register(calls)  # type: ignore[arg-type]  # not again
    pieces = [(host.address, 4096), (host.address + 4096, 4096), (host.address + 8192, 808)]
    assert seen == pieces
    for to_host in (True, False):
        seen.clear()
        Gpu.copy_block(SimpleNamespace(calls=calls), host, 1 << 40, 7, to_host=to_host)  # type: ignore[arg-type]
        ends = [(at, (1 << 40) + at - host.address, nbytes) for at, nbytes in pieces]
        assert seen == (ends if to_host else [(b, a, nbytes) for a, b, nbytes in ends])
    host.close()


@pytest.mark.parametrize("left_s", [12.0, 18.0, 24.0])
def test_cases_with_a_goal_have_time_in_quick(left_s: float) -> None:
    those = cases("quick")
    costs = [case.cost_s for case in those.values()]
    for number, case in enumerate(those.values()):
        share_s = cuda.time_for(costs[number:], left_s)
        assert not case.share or share_s >= case.cost_s
        left_s -= share_s


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
