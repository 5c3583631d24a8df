"""What two ranks send each other through torch's collectives (see wire_worker.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import run_cases


@pytest.mark.slow
def test_two_ranks_send_few_bytes_and_write_what_stock_writes(tmp_path: Path) -> None:
    run_cases(Path(__file__).with_name("wire_worker.py"), 2, "all", tmp_path)
