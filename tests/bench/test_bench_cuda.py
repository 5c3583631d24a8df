"""The bench of device copies: its pure parts everywhere, all of it where there is a GPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT
from cuda_cases import GIB, KIB, MIB, SIZES, Case, Shape, cases
from cuda_gpu import Gpu, HostBlock
from cuda_pack import Pieces
from cuda_rounds import Found, LeftOutError, interleave
from cuda_sides import Moves
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
    assert {"64mib", "64kib", "4kib", "mixed", "strided"} <= cases(size).keys()
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


def test_side_that_the_driver_refuses_is_told_of() -> None:
    def refused() -> float:
        raise CudaError(2, "cuMemHostAlloc")

    later = time.monotonic() + 600
    found = interleave({"cuMemHostAlloc": refused, "ours": lambda: 0.5}, 1, later)
    assert found.notes == {"cuMemHostAlloc": "CudaError: (2, 'cuMemHostAlloc')"}
    with pytest.raises(CudaError):
        interleave({"ours": refused}, 1, later)


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


def test_steps_that_no_time_was_left_for_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda_stalls

    monkeypatch.setattr(cuda, "stall", lambda *_: None)
    none = Found({}, {"ours idle": "no time left", "ours saving": "no time left"})
    monkeypatch.setattr(cuda_stalls, "step_seconds", lambda *_: none)
    args = argparse.Namespace(size="smoke", rounds=1, give_up_at=time.monotonic())
    report = cuda.Report(None, "a GPU")
    cuda.stalls(None, args, Path("/nowhere"), report)
    assert [row[2] for row in report.tables["Steps"]["rows"]] == ["no time left"] * 2


def test_memory_is_page_locked_when_the_clock_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda_pinning
    import cuda_sides
    import cuda_stalls

    class Arena:
        """Registers a byte whenever somebody looks."""

        nbytes, seen = 3, 0

        @property
        def pinned_bytes(self) -> int:
            self.seen += 1
            return min(self.seen, 3)

    arena = Arena()
    monkeypatch.setattr(cuda_sides, "process_pool", lambda: SimpleNamespace(_arenas=[arena]))
    monkeypatch.setattr(cuda_pinning.dcpx, "prewarm", lambda _: None)
    monkeypatch.setattr(cuda_pinning.dcpx, "close", lambda: None)
    cuda_pinning._ours(SimpleNamespace(state=lambda _: {}), 4096)()  # type: ignore[arg-type]
    assert arena.seen == 3
    one = cuda_stalls.Stalls.__new__(cuda_stalls.Stalls)
    one._state, arena.seen = {}, 0
    with pytest.raises(AttributeError, match="_gpu"):  # what it waits for comes before the clock
        one.sides()["ours, overlapped, prewarmed"]()
    assert arena.seen == 3


@pytest.mark.parametrize("version", [12080, 13000])
def test_batch_is_made_before_it_is_timed(version: int) -> None:
    seen: list[tuple[Any, ...]] = []

    def call(entry: str, *arguments: Any) -> None:
        if entry == "cuDriverGetVersion":
            arguments[0]._obj.value = version
        else:
            seen.append((entry, *arguments))

    pieces = SimpleNamespace(gpu=SimpleNamespace(calls=SimpleNamespace(call=call)), _stream=5)
    pairs = [(100 + i, 200 + i, 8) for i in range(5000)]
    run = Pieces._batched(pieces, pairs)  # type: ignore[arg-type]
    run()
    run()
    (entry, dsts, srcs, sizes, count, *_), second, again, _ = seen
    assert entry == ("cuMemcpyBatchAsync_v2" if version == 13000 else "cuMemcpyBatchAsync")
    assert (count.value, second[4].value) == (4096, 904)
    assert (dsts[1], srcs[1], sizes[1], second[1][0]) == (101, 201, 8, 4196)
    assert again[1] is dsts
    assert len(second) == (9 if version == 13000 else 10)


def test_cases_share_the_time_by_what_they_cost() -> None:
    assert cuda.time_for([1.0, 3.0], 8.0) == 4.0  # no less than all the same
    assert cuda.time_for([3.0, 1.0], 8.0) == 6.0
    assert cuda.time_for([3.0, 1.0, 99.0], 8.0) == 6.0  # what does not fit takes nothing
    assert cuda.time_for([99.0], 8.0) == 8.0
    # Of `moves` in full: 4 KiB tensors both ways, after those before it have taken their shares.
    left_s, costs = 190.0, [case.cost_s for case in cases("full").values()]
    names = list(cases("full"))
    for number in range(names.index("4kib")):
        left_s -= cuda.time_for(costs[number:], left_s)
    share_s = cuda.time_for(costs[names.index("4kib") :], left_s)
    moved = Moves.__new__(Moves)
    moved._case = cases("full")["4kib"]
    assert moved.save_s() < share_s * 2 / 3


@pytest.mark.parametrize("left_s", [12.0, 18.0, 24.0])
def test_cases_with_a_goal_have_time_in_quick(left_s: float) -> None:
    those = cases("quick")
    costs = [case.cost_s for case in those.values()]
    for number, case in enumerate(those.values()):
        share_s = cuda.time_for(costs[number:], left_s)
        assert not case.share or share_s >= case.cost_s
        left_s -= share_s


def test_side_that_is_left_out_ends_no_comparison() -> None:
    def leaves_out() -> float:
        raise LeftOutError("memory is not page-locked")

    found = interleave({"ours": leaves_out, "block": lambda: 0.1}, 2, time.monotonic() + 600)
    assert found.times == {"block": [0.1, 0.1]}
    assert found.notes == {"ours": "left out: memory is not page-locked"}


class Stager:
    """A stager that fails for its second time, and keeps what it stages."""

    def __init__(self) -> None:
        self.has_failed = self.is_closed = False
        self._state_dict_stager = SimpleNamespace(_deepcopy_dispatch={"a": 1})
        self._staging_future: object = None

    def stage(self, state: dict[str, object]) -> dict[str, object]:
        if self._staging_future is not None or self.has_failed:
            raise RuntimeError("Too many open files (24)")
        self._staging_future, self.has_failed = state, True
        return state

    def close(self) -> None:
        self.is_closed = True


def test_stager_that_has_failed_or_served_keeps_nothing() -> None:
    moved = Moves.__new__(Moves)
    moved._case = Case("", 0.0, [Shape(1, 1, 1)] * 3)
    moved._twin, moved._stagers = {}, []
    moved._gpu = SimpleNamespace(synchronize=lambda: None)  # type: ignore[assignment]
    side = moved._stager_side(60.0, Stager)
    side()
    (stager,) = moved._stagers
    assert stager._staging_future is None
    with pytest.raises(RuntimeError, match="Too many open files"):
        side()
    assert stager.is_closed and moved._stagers == []
    side()
    moved._case = Case("", 0.0, [Shape(1, 1, 1)] * 30_001)
    with pytest.raises(LeftOutError, match="a mapping for each of 30001 tensors"):
        side()


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
