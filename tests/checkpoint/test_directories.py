"""Ranks that save to different directories: the same one under two names, or a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import run_ranks

WORKER = Path(__file__).with_name("directories_worker.py")


@pytest.mark.slow
@pytest.mark.multirank
def test_ranks_that_save_to_different_directories_are_refused_unless_they_say_so(
    tmp_path: Path,
) -> None:
    run_ranks(WORKER, 2, str(tmp_path))
