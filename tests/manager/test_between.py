"""What raises on one rank between the two exchanges of a manager's call is told to the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import run_cases

WORKER = Path(__file__).with_name("between_worker.py")


@pytest.mark.multirank
def test_error_of_one_rank_between_two_exchanges_is_raised_on_all(tmp_path: Path) -> None:
    run_cases(WORKER, 2, "all", tmp_path)
