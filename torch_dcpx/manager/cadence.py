"""Whether a save is due, by steps, by seconds, or by a signal: alike on every rank.

By steps each rank computes it: a save is due once a multiple of `save_every` was passed since the
last save or resume. By seconds the coordinator's clock decides, and ranks hear it in an exchange:

1. In an exchange the coordinator says whether a save is due, and at which later step to ask again.
   Until that step no rank asks, whatever its own clock says: all know the step.
2. It puts that step where the seconds will have passed if steps take as long as the last ones, but
   no further than an eighth of `save_every_s`, and no more than twice as far as the time before.
   So where steps become k times as long, a save is late by k eighths of its seconds at most.
3. A save that is due stays due until it is made.

The first call of all is an exchange, too: there ranks that have other arguments learn of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from torch_dcpx._waiting import Clock
from torch_dcpx.checkpoint.same_call import Call
from torch_dcpx.errors import OptionError, must_be
from torch_dcpx.manager.catalog import CheckpointCatalog
from torch_dcpx.manager.pointer import checked_step
from torch_dcpx.manager.preemption import Preemption

_LOOKS = 8  # at least, in `save_every_s`
_MAX_S = 1e9


class Pace:
    """The coordinator's clock: whether a save is due, and when to look again. Not thread-safe."""

    def __init__(self, every_s: float, clock: Clock = time) -> None:
        self._every_s = every_s
        self._clock = clock
        self._saved_at: float | None = None
        self._looked: tuple[int, float] | None = None  # step and time
        self._gap = 1  # steps from the last look to the next

    def look(self, step: int) -> tuple[bool, int]:
        """Returns whether a save is due at this step, and the step at which to look next."""
        now = self._clock.monotonic()
        if self._saved_at is None:
            self._saved_at = now
        left_s = self._every_s - (now - self._saved_at)
        gap = 1
        if self._looked is not None and step > self._looked[0]:
            step_s = (now - self._looked[1]) / (step - self._looked[0])
            within_s = min(left_s if left_s > 0 else self._every_s, self._every_s / _LOOKS)
            gap = 2 * self._gap
            if step_s > 0:
                gap = max(1, min(gap, math.ceil(within_s / step_s)))
        self._looked, self._gap = (step, now), gap
        return left_s <= 0, step + gap

    def note_saved(self) -> None:
        """Begins the seconds anew."""
        self._saved_at = self._clock.monotonic()


class Cadence:
    """When one manager's job is to save; the same on every rank. Not thread-safe."""

    def __init__(self, catalog: CheckpointCatalog, every: Any, every_s: Any) -> None:
        """Raises OptionError: values that cannot work."""
        self.every = None if every is None else checked_step(every, "save_every", 1)
        self.every_s = None if every_s is None else _checked_seconds(every_s)
        self.pace = None if self.every_s is None else Pace(self.every_s)
        self._catalog = catalog
        self._last_step: int | None = None  # saved or resumed; None: neither
        self._asked = -1  # the last step that was asked for
        self._look_at: int | None = None  # the step of the next exchange
        self._is_due = False  # by seconds or a signal, until a save

    def note_saved(self, step: int) -> None:
        """Begins to count anew, from a save or resume of this step."""
        self._last_step, self._is_due = step, False
        if self.pace is not None:
            self.pace.note_saved()

    def should_save(self, step: Any, watches: Sequence[Preemption]) -> bool:
        """As `CheckpointManager.should_save`."""
        step = checked_step(step)
        if self._last_step is None:
            self._last_step = max(0, step - 1)
        for watch in watches:  # each of them, for each counts the steps
            self._is_due |= watch.requested(step)
        if self._is_to_agree(step):
            self._agree(step, len(watches))
        self._asked = step
        is_passed = self.every is not None and step // self.every > self._last_step // self.every
        return self._is_due or is_passed

    def _is_to_agree(self, step: int) -> bool:
        if self._look_at is None:
            return True
        # A step before the last one: the caller counts anew.
        is_step = step >= self._look_at or step < self._asked
        return is_step and self.pace is not None and not self._is_due

    def _agree(self, step: int, watches: int) -> None:
        """Hears of the coordinator whether a save is due by seconds, and when to ask again."""
        pace = self.pace

        def local() -> tuple[None, Call]:
            if self.every is None and pace is None and not watches:
                raise OptionError(
                    "should_save: this manager has no rule; give it save_every= or save_every_s=, "
                    "or call save_on_signal()",
                    option="save_every",
                )
            rules = {"save_every": self.every, "save_every_s": self.every_s, "signals": watches}
            return None, Call("should_save", {"step": step, **rules})

        def reduce(_calls: list[Call], _: None) -> tuple[bool, int]:
            return (False, step) if pace is None else pace.look(step)

        timeout_s = self._catalog.options.save_timeout_s
        with self._catalog.exchange("should_save", timeout_s=timeout_s) as exchange:
            is_due, look_at = self._catalog.agree(exchange, "due", local, reduce)[1]
        self._look_at = 0 if exchange.world_size == 1 else look_at  # 0: each time, by its clock
        self._is_due |= is_due


def _checked_seconds(value: Any) -> float:
    """Returns seconds as a float. Raises OptionError: no number, not above 0, or too many."""
    is_number = hasattr(value, "__float__") and not isinstance(value, bool)
    try:
        seconds = float(value) if is_number else 0.0
    except (TypeError, ValueError, OverflowError, RuntimeError):
        seconds = 0.0
    if not 0 < seconds <= _MAX_S:
        raise must_be("save_every_s", value, f"seconds above 0 and up to {_MAX_S:.0f}")
    return seconds
