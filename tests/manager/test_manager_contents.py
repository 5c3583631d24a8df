"""Other tensors on two ranks under one name: a warning, or an error; none for copies of DDP."""

from __future__ import annotations

from pathlib import Path

from support.ranks import run_cases


def test_two_ranks_hear_of_tensors_that_differ(tmp_path: Path) -> None:
    run_cases(Path(__file__).with_name("contents_worker.py"), 2, "all", tmp_path)
