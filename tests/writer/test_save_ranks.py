"""`save` and `async_save` on several ranks (gloo), agreed through the store."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import run_cases

WORKER = Path(__file__).with_name("save_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_saves_of_several_ranks_are_whole_or_fail_on_all(tmp_path: Path, ranks: int) -> None:
    run_cases(WORKER, ranks, "all", tmp_path)


@pytest.mark.slow
def test_many_saves_go_on_beside_collectives(tmp_path: Path) -> None:
    run_cases(WORKER, 2, "many", tmp_path)
