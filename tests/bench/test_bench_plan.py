"""The simulator of many ranks' planning: it runs, and says that both sides plan the same loads."""

from __future__ import annotations

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
