"""Paths of every sort, relative ones under a `chdir`: right, or refused with a typed error."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import assert_none_bad, table_of

WORKER = Path(__file__).with_name("paths_worker.py")


@pytest.mark.slow
def test_every_sort_of_path_serves_or_is_refused_by_a_typed_error(tmp_path: Path) -> None:
    assert_none_bad(table_of(WORKER, str(tmp_path)))
