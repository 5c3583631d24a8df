"""A point in time until which one waits, by the monotonic clock."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """Immutable. Every wait of one operation ends here, whatever the number of its waits."""

    def __init__(self, timeout_s: float) -> None:
        """Begins to run now.

        Args:
            timeout_s: seconds; infinity never passes, 0 has passed.
        """
        self.timeout_s = timeout_s
        self._begun = time.monotonic()

    @property
    def remaining_s(self) -> float:
        """Seconds left, 0 once it has passed."""
        return max(0.0, self.timeout_s - self.waited_s)

    @property
    def waited_s(self) -> float:
        """Seconds since it began to run."""
        return time.monotonic() - self._begun

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self.waited_s >= self.timeout_s
