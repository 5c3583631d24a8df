"""DTensor states of three ranks, and a rank that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import run_cases

pytestmark = pytest.mark.multirank

WORKER = Path(__file__).with_name("failed_rank_worker.py")


def test_failed_rank_raises_on_every_rank_and_publishes_nothing(tmp_path: Path, seed: int) -> None:
    run_cases(WORKER, 3, "all", tmp_path, seed % 10_000)
