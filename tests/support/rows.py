"""Checks of many rows of a table in one test, which says which of them fail."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest

_Row = TypeVar("_Row")


def check_rows(rows: Mapping[str, _Row], check: Callable[[_Row], object]) -> None:
    """Checks every row, and fails with the names of those that fail, and where and how they do."""
    found = []
    for name, row in rows.items():
        try:
            check(row)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001  all are shown
            found.append(f"{name!r}:\n{traceback.format_exc(limit=-2)}")
    if found:
        pytest.fail(f"{len(found)} of {len(rows)} rows\n" + "\n".join(found), pytrace=False)
