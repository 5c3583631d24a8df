"""The manager on two ranks, and what they saved on three."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import run_cases

WORKER = Path(__file__).with_name("manager_worker.py")


@pytest.mark.slow
@pytest.mark.multirank
def test_two_ranks_save_and_resume_alike_and_three_resume_what_they_saved(tmp_path: Path) -> None:
    run_cases(WORKER, 2, "save", tmp_path)
    run_cases(WORKER, 3, "resume", tmp_path)
