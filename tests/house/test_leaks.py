"""What the tests' check for leaks finds, and what it lets pass."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
from support.leaks import Held

MIB = 1 << 20
LEAKS: dict[str, Callable[[], Any]] = {
    "one block": lambda: bytearray(8 * MIB),
    "small blocks": lambda: [bytes(1000) for _ in range(8000)],
    "a mapping": lambda: mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_memory_that_stays_is_found(leak: str) -> None:
    held = Held()
    kept = LEAKS[leak]()
    with pytest.raises(AssertionError, match=r"8\d{6} B more"):
        held.assert_no_memory_more()
    del kept


def test_memory_that_malloc_holds_free_is_no_leak() -> None:
    held = Held()
    blocks = [bytes(60_000) for _ in range(1000)]
    kept = blocks[::40]  # what lies between goes back to malloc, and stays resident or not
    del blocks
    held.assert_no_memory_more()
    del kept
