"""Building a million objects without the garbage collector looking at them again and again.

Objects that only come (and hold no cycles) make each collection walk all of them for nothing:
decoding the metadata of 100,000 chunks takes a multiple of the time with the collector on.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_gc"]

_lock = threading.Lock()
_depth = 0  # how many blocks, of all threads, are running
_was_enabled = False  # before the first of them
_own = threading.local()  # .depth: of these, the current thread's


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
        _own.depth = getattr(_own, "depth", 0) + 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            _own.depth -= 1
            if _depth == 0 and _was_enabled:
                gc.enable()


def _forget_other_threads() -> None:
    """In a forked child: blocks of threads that are not there any more never end."""
    global _lock, _depth
    _lock = threading.Lock()
    before, _depth = _depth, getattr(_own, "depth", 0)
    if before and _depth == 0 and _was_enabled:
        gc.enable()


os.register_at_fork(after_in_child=_forget_other_threads)
