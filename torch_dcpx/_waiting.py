"""Waiting: until a deadline, by the clock of the process or of a test, and for a lock."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch_dcpx.errors import ConcurrentSaveError

# Names of threads that are always in this package, which the end of the process does not wait for.
STORE_THREAD = "dcpx-store"  # waits for calls
ANSWER_THREAD = "dcpx-answer"  # as well, or is in a system call that may never return
_MAX_S = threading.TIMEOUT_MAX


class Clock(Protocol):
    """Tells the time, and waits: the module `time`, or its stand-in in a test."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


class Deadline:
    """A point in time at which every wait of one operation ends. Immutable."""

    def __init__(self, timeout_s: float, clock: Clock = time) -> None:
        """Begins to run now, by `clock`. Infinity never passes, 0 has passed."""
        self.timeout_s = timeout_s
        self._clock = clock
        self._begun = clock.monotonic()

    def anew(self, timeout_s: float | None = None) -> Deadline:
        """Returns one that begins now, by the same clock; None: of as many seconds as this one."""
        return Deadline(self.timeout_s if timeout_s is None else timeout_s, self._clock)

    def sooner(self, seconds: float) -> Deadline:
        """Returns one that passes in `seconds`, or with this one if that is sooner."""
        return self.anew(min(seconds, self.remaining_s))

    def sleep(self, seconds: float) -> None:
        """Waits so long, or until the deadline if that is sooner."""
        self._clock.sleep(min(seconds, self.remaining_s))

    @property
    def remaining_s(self) -> float:
        """Seconds left, 0 once it has passed."""
        return max(0.0, self.timeout_s - self.waited_s)

    @property
    def waited_s(self) -> float:
        """Seconds since it began to run."""
        return self._clock.monotonic() - self._begun

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self.waited_s >= self.timeout_s


class Guard:
    """A re-entrant lock of threads, which an exception at any line releases.

    A signal handler may take it while its thread holds it. After the last line of a plain
    `with lock:` an exception may come before the release: from a signal (Python 3.10), for want of
    memory, from a tracer. Then nobody ever gets the lock.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()  # Any: what asks for its owner has no stub

    @property
    def is_own(self) -> bool:
        """Whether this thread holds it: it is in the block, or in a signal's handler within it."""
        return bool(self._lock._is_owned())

    @contextmanager
    def held(
        self, timeout_s: float = math.inf, doing: str = "", behind: str = ""
    ) -> Iterator[None]:
        """Holds it in the block. Where the block does not reach its end, the generator goes with
        the frame's stack, which releases the lock as well.

        Args:
            timeout_s: seconds to wait for another thread. Default: as long as it takes, where that
                waits for nothing itself.
            doing, behind: who waits, and for what, for the error.

        Raises ConcurrentSaveError: another thread has held it for so long.
        """
        was_held = self.is_own
        try:
            if not was_held and not self._lock.acquire(timeout=min(timeout_s, _MAX_S)):
                raise ConcurrentSaveError(
                    f"{doing}: {behind} has not ended within {timeout_s:g} s; it is in another "
                    "thread of this process: wait for it, and try again",
                    errno=errno.ETIMEDOUT,
                )
            with self._lock:
                if not was_held:  # `with` alone releases it, at whatever line an exception comes
                    self._lock.release()
                yield
        finally:
            while not was_held and self._lock._is_owned():
                self._lock.release()
