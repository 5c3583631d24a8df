"""A point in time until which one waits, by the monotonic clock of the process or of a test."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What time it is, and waiting: the module `time`, or what a test has in its place."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


class Deadline:
    """Immutable. Every wait of one operation ends here, whatever the number of its waits."""

    def __init__(self, timeout_s: float, clock: Clock = time) -> None:
        """Begins to run now.

        Args:
            timeout_s: seconds; infinity never passes, 0 has passed.
            clock: by which it runs. Default: the process' monotonic clock.
        """
        self.timeout_s = timeout_s
        self._clock = clock
        self._begun = clock.monotonic()

    def anew(self, timeout_s: float | None = None) -> Deadline:
        """Returns one that begins now, by the same clock.

        Args:
            timeout_s: its seconds. Default None: as many as this one had.
        """
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
