"""SIGINT, SIGTERM and `os._exit` at any line of a save or load, by every entry point: the old or
the new checkpoint, no hang, the exit code that Python gives, and the next save works."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import assert_none_bad, table_of
from support.machine import EVERY_POINT, points

WORKER = Path(__file__).with_name("signals_worker.py")


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_signal_at_any_line_leaves_old_or_new_and_no_lock(tmp_path: Path, seed: int) -> None:
    tried = str(0 if EVERY_POINT else points(3))
    assert_none_bad(table_of(WORKER, str(tmp_path), "lines", str(seed), tried, timeout_s=35000))


@pytest.mark.slow
def test_signal_at_any_line_of_the_lock_leaves_it_free(tmp_path: Path, seed: int) -> None:
    tried = str(0 if EVERY_POINT else points(10))
    assert_none_bad(table_of(WORKER, str(tmp_path), "locks", str(seed), tried, timeout_s=1150))
