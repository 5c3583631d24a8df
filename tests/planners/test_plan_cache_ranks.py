"""Three ranks that plan with earlier plans: all of them, or none (see plan_cache_worker.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import run_cases


@pytest.mark.slow
def test_three_ranks_plan_anew_where_one_has_changed(tmp_path: Path) -> None:
    run_cases(Path(__file__).with_name("plan_cache_worker.py"), 3, "all", tmp_path)
