"""SIGINT, SIGTERM and `os._exit` at any line of a save or load, by every entry point: the old or
the new checkpoint, no hang, the exit code that Python gives, and the next save works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forks import assert_none_bad, table_of

WORKER = Path(__file__).with_name("signals_worker.py")
POINTS = "0" if os.environ.get("DCPX_EVERY_POINT", "") not in ("", "0") else "3"


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_signal_at_any_line_leaves_old_or_new_and_no_lock(tmp_path: Path, seed: int) -> None:
    assert_none_bad(table_of(WORKER, str(tmp_path), str(seed), POINTS, timeout_s=35000))
