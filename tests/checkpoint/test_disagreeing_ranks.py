"""Real ranks of which one errs in a call: all raise at once, nothing mixes, the next call works."""

from __future__ import annotations

from pathlib import Path

from support.ranks import run_cases


def test_ranks_that_err_in_a_call_all_raise_at_once_and_go_on(tmp_path: Path) -> None:
    run_cases(Path(__file__).with_name("disagreeing_worker.py"), 2, "all", tmp_path)
