"""Traces of several ranks: one operation, merged by `dcpx trace`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import run_cases

WORKER = Path(__file__).with_name("traces_worker.py")


@pytest.mark.multirank
def test_two_ranks_leave_the_traces_of_one_operation(tmp_path: Path) -> None:
    run_cases(WORKER, 2, "all", tmp_path)
