"""Ranks that save replicas named by placements, by every call (see replicas_worker.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import run_cases

WORKER = Path(__file__).with_name("replicas_worker.py")


@pytest.mark.slow
def test_two_ranks_share_replicas_by_rows_in_every_call(tmp_path: Path) -> None:
    run_cases(WORKER, 2, "calls", tmp_path)


@pytest.mark.slow
def test_four_ranks_share_replicated_shards_by_rows_in_every_call(tmp_path: Path) -> None:
    run_cases(WORKER, 4, "calls", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["process", "training"])
def test_two_ranks_share_replicas_by_rows(kind: str, tmp_path: Path) -> None:
    run_cases(WORKER, 2, kind, tmp_path)
