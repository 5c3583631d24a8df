"""An exception ends the thread of an `async_save` at any of our lines: who waits is told, the
old or the new checkpoint is there, and the next save works."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import assert_none_bad, table_of
from support.machine import EVERY_POINT, points

WORKER = Path(__file__).with_name("lost_threads_worker.py")


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_exception_at_any_line_of_a_saves_thread_is_told(tmp_path: Path, seed: int) -> None:
    tried = 0 if EVERY_POINT else points(8)
    assert_none_bad(table_of(WORKER, str(tmp_path), str(seed), str(tried), timeout_s=35000))
