"""`dcpx.load` on two ranks: what fails on one of them is raised on both (see load_worker.py)."""

from __future__ import annotations

from pathlib import Path

from support.ranks import run_cases


def test_two_ranks_load_together_and_fail_together(tmp_path: Path) -> None:
    run_cases(Path(__file__).with_name("load_worker.py"), 2, "all", tmp_path)
