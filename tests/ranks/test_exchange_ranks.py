"""Operations through the process groups of a job: sub-groups, two at once, 500 in a row, a fork."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import run_ranks


@pytest.mark.slow
def test_operations_of_three_ranks_agree_and_leave_nothing_behind() -> None:
    run_ranks(Path(__file__).with_name("exchange_worker.py"), 3)
