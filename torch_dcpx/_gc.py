"""Building a million objects without the garbage collector looking at them again and again.

Objects that only come (and hold no cycles) make each collection walk all of them for nothing:
decoding the metadata of 100,000 chunks takes a multiple of the time with the collector on.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_gc"]

_lock = threading.Lock()
_depth = 0  # how many blocks, of all threads, are running
_was_enabled = False  # before the first of them


@contextmanager
def paused_gc() -> Iterator[None]:
    """Keeps cyclic garbage collection off inside the block.

    The switch is the process's, so blocks are counted: the first one, whatever its thread,
    remembers the state, and the last one restores it.
    """
    global _depth, _was_enabled
    with _lock:
        if _depth == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _was_enabled:
                gc.enable()
