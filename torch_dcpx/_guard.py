"""A lock of this process that is given back whatever line an exception comes at."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Guard:
    """A re-entrant lock of threads: a signal handler may take it while its thread holds it.

    After the last line of a plain `with lock:` an exception may still come before the lock is given
    back: of a signal (Python 3.10), for want of memory, of a tracer. Then nobody ever gets it.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()  # Any: what asks for its owner has no stub

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds it in the block. Where the end of the block is not reached, the generator goes with
        the frame's stack, and that ends it as well.
        """
        was_held = self._lock._is_owned()
        try:
            with self._lock:
                yield
        finally:
            while not was_held and self._lock._is_owned():
                self._lock.release()
