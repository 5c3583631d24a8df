"""Our planners on two ranks, with stock's writers and readers and ours (see planner_worker.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import run_cases


@pytest.mark.slow
def test_two_ranks_save_and_load_by_our_planners(tmp_path: Path) -> None:
    run_cases(Path(__file__).with_name("planner_worker.py"), 2, "all", tmp_path)
