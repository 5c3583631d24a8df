"""The simulator of many ranks' planning: it runs, and says that both sides plan the same loads."""

from __future__ import annotations

import mmap
from typing import Any

import plan
import plan_meter
import pytest


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


def test_memory_of_a_step_is_its_own() -> None:
    def resident(mib: int) -> mmap.mmap:
        # Pages of its own: malloc may have some that are resident already.
        memory = mmap.mmap(-1, mib * plan_meter.MIB)
        for _ in range(mib):
            memory.write(bytes(plan_meter.MIB))
        return memory

    def measure() -> Any:
        kept = resident(64)
        first, _ = plan_meter.timed(lambda: resident(32))
        second, _ = plan_meter.timed(lambda: None)
        return first, second, len(kept)

    first, second, _ = plan_meter.in_child(measure)
    assert 32 <= first.more_bytes / plan_meter.MIB < 48
    assert second.more_bytes < 8 * plan_meter.MIB
    assert first.peak_bytes > first.more_bytes + 64 * plan_meter.MIB


def test_step_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="status 1"):
        plan_meter.in_child(lambda: 1 / 0)
