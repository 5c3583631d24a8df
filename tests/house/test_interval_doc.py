"""docs/explain/interval.md: the interval that it prints is the best one of a simulated training."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT

PAGE = (ROOT / "docs" / "explain" / "interval.md").read_text()
FAILURES = 400_000


def printed_interval_s(stall_s: float, total_s: float, mtbf_s: float) -> float:
    """Returns what the page's function gives for a report."""
    (code,) = re.findall(r"^(def interval_s\(.*?)\n\n", PAGE, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"math": math}
    exec(code, names)
    report = SimpleNamespace(blocked_s=stall_s, total_s=total_s)
    return float(names["interval_s"](report, mtbf_s))


class Training:
    """A training that saves every `interval_s`; a failure sends it back to the last durable save.

    Saves stall it for `stall_s`, and are durable `durable_s` after their call.
    """

    def __init__(self, stall_s: float, durable_s: float, mtbf_s: float) -> None:
        self.stall_s, self.durable_s, self.mtbf_s = stall_s, durable_s, mtbf_s
        generator = torch.Generator().manual_seed(1974)
        lives = torch.empty(FAILURES, dtype=torch.float64)
        self.lives_s = lives.exponential_(1 / mtbf_s, generator=generator)  # from start to failure

    def kept_s(self, interval_s: float) -> torch.Tensor:
        """Returns the seconds of work that each life has left behind, in durable saves."""
        work_s = interval_s - self.stall_s  # between two saves
        first_s = work_s + self.durable_s  # until the first one is durable
        saves = ((self.lives_s - first_s) / interval_s).floor() + 1
        return saves.clamp(min=0) * work_s

    def overhead(self, interval_s: float) -> float:
        """Returns the share of the time that is no lasting work."""
        return 1 - float(self.kept_s(interval_s).sum() / self.lives_s.sum())

    def best_interval_s(self, near_s: float) -> float:
        """Returns the interval with the least overhead, to 1 %, within 0.5 to 2 times `near_s`."""
        intervals = [near_s * 1.01**power for power in range(-70, 71)]
        return min(intervals, key=self.overhead)


@pytest.mark.parametrize(("mtbf_s", "durable_s"), [(5_000.0, 60.0), (50_000.0, 10.0)])
def test_printed_interval_is_the_best_of_a_simulation(mtbf_s: float, durable_s: float) -> None:
    training = Training(5.0, durable_s, mtbf_s)
    interval_s = printed_interval_s(5.0, durable_s, mtbf_s)
    best_s = training.best_interval_s(interval_s)
    assert interval_s == pytest.approx(best_s, rel=0.1)
    assert training.overhead(interval_s) <= training.overhead(best_s) * 1.01


def test_example_of_the_page_is_what_its_function_gives() -> None:
    for cost_s in (0.5, 20.0):
        assert f"{printed_interval_s(cost_s, 0.0, 3.1 * 3600):.0f} s" in PAGE.replace("\n", " ")


def test_interval_is_never_shorter_than_a_save() -> None:
    assert printed_interval_s(0.01, 300.0, 10_000.0) == 300.0
