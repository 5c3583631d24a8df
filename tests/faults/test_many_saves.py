"""Saves and loads over and over leave nothing behind: no file, thread, memory, mapping."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import assert_none_bad, table_of
from support.machine import points

WORKER = Path(__file__).with_name("many_worker.py")


@pytest.mark.slow
def test_two_hundred_saves_and_loads_leave_nothing_behind(tmp_path: Path) -> None:
    rows = table_of(WORKER, str(tmp_path), str(points(50)))  # rounds of four saves, two loads
    print("\n".join(case for _, case, _ in rows))
    assert_none_bad(rows)
