"""A signal that reaches some ranks, at some moment, makes all ranks save at one step.

No collective, and one look at the store a step. A round, its keys beneath its number:
1. A rank that was signalled sets `call`, in its next `requested`.
2. A rank that finds `call` notes its step under `at/RANK` and adds 1 to `n`; the last sets `all`.
   It answers no and goes on: the ranks of one training are at most a step apart, and who is ahead
   may be waited for.
3. In its next `requested` each rank waits for `all`. The step agreed on is the highest noted and 1:
   nobody is past it, for nobody passed this wait. All compute the same answer from the same notes.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import OptionError, RankLostError
from torch_dcpx.manager.pointer import check_step
from torch_dcpx.ranks.exchange import Keys

logger = logging.getLogger("torch_dcpx")


class _Note(NamedTuple):
    """A rank's note in a round."""

    step: int
    time_left_s: float | None  # None: not signalled, or nobody knows
    save_s: float | None  # what its last save took; None: it made none


class Preemption:
    """Whether to save because somebody wants this job to end. Made by `save_on_signal`.

    As a context manager, the end of the block puts the signals' handlers back. Not thread-safe.
    """

    def __init__(
        self,
        keys: Keys,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        time_left_s: float | None,
        last_save_s: Callable[[], float | None],
    ) -> None:
        """Installs nothing yet.

        Args:
            keys: of the ranks' store, or of this process alone.
            rank: this one.
            world_size: how many there are.
            timeout_s: until when ranks wait for each other once one was signalled.
            time_left_s: seconds from the signal until the process is ended; None: unknown.
            last_save_s: returns how long this rank's last save took.
        """
        self._keys = keys
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._time_left_s = time_left_s
        self._last_save_s = last_save_s
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._signalled_at: float | None = None
        self._round = 0
        self._has_noted = False
        self._notes: list[_Note] = []

    @property
    def is_signalled(self) -> bool:
        """Whether this rank has had a signal that it has not answered yet."""
        return self._signalled_at is not None

    def watch(self, signals: Sequence[int]) -> None:
        """Takes over these signals; what their handlers did is not done until `close`.

        Raises:
            OptionError: no signals, one that cannot be handled, or not on the main thread; no
                handler is replaced then.
        """
        if not signals or threading.current_thread() is not threading.main_thread():
            raise OptionError(
                f"watch signals {tuple(signals)}: give at least one, and call it on the main "
                "thread, where Python handles signals",
                option="signals",
                value=None,
            )
        try:
            for number in dict.fromkeys(signals):
                self._before[number] = signal.signal(number, self._note_signal)
        except (OSError, ValueError, TypeError) as error:
            self.close()
            raise OptionError(
                f"watch signals {tuple(signals)!r:.80}: {error}; give signals that can be handled",
                option="signals",
                value=None,
            ) from error

    def signalled(self) -> None:
        """Does what a signal does: for tests, and for schedulers that ask in another way."""
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.signalled()
            return
        # A process that was forked meanwhile, such as a data loader's worker, asks nobody: the
        # signal does there what it did before.
        before = self._before.get(number)
        signal.signal(number, signal.SIG_DFL if before is None else before)
        os.kill(os.getpid(), number)

    def requested(self, step: int) -> bool:
        """Returns whether to save now: the same at the same step on every rank.

        Every rank calls it once a step, with the steps ascending. True once a request; then the
        next request may come. False, too, where the time left would not do for a save.

        Args:
            step: that has just been trained.

        Raises:
            OptionError: a step that is none.
            RankLostError: a rank did not call it within `save_timeout_s` of another's request.
            StoreLostError: the store does not answer.
        """
        check_step(step)
        if self._world_size == 1:
            if self._signalled_at is None:
                return False
            self._notes = [self._own_note(step)]
            return self._answered(step)
        if not self._has_noted:
            self._note_if_called(step)
            return False
        if not self._notes:
            self._read_notes()
        if step <= max(note.step for note in self._notes):
            return False
        return self._answered(step)

    def close(self) -> None:
        """Puts the handlers that were there back. Called on the main thread; safe to call twice."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> Preemption:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- A round -------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _own_note(self, step: int) -> _Note:
        left_s = None
        if self._signalled_at is not None and self._time_left_s is not None:
            left_s = self._time_left_s - (time.monotonic() - self._signalled_at)
        return _Note(step, left_s, self._last_save_s())

    def _note_if_called(self, step: int) -> None:
        deadline = Deadline(self._timeout_s)
        if self._signalled_at is not None:
            self._keys.set(self._key("call"), b"1", deadline)
        elif self._keys.get(self._key("call"), deadline) is None:
            return
        note = json.dumps(self._own_note(step)).encode()
        self._keys.set(self._key(f"at/{self._rank}"), note, deadline)
        if self._keys.add(self._key("n"), 1, deadline) == self._world_size:
            self._keys.set(self._key("all"), b"1", deadline)
        self._has_noted = True

    def _read_notes(self) -> None:
        deadline = Deadline(self._timeout_s)
        names = [self._key(f"at/{rank}") for rank in range(self._world_size)]
        if self._keys.wait_for(self._key("all"), deadline) is None:
            lost = tuple(
                rank for rank, name in enumerate(names) if self._keys.get(name, Deadline(0)) is None
            )
            raise RankLostError(
                f"agree on the step to save at, as a signal asks for: ranks "
                f"{', '.join(map(str, lost[:8]))} did not call `requested` within "
                f"{self._timeout_s:g} s",
                ranks=lost,
                phases=("training",) * len(lost),
                waited_s=self._timeout_s,
            )
        found = self._keys.multi_get(names, deadline)
        self._notes = [_Note(*json.loads(note)) for note in found]

    def _answered(self, step: int) -> bool:
        """Ends the round, and returns what it comes to."""
        notes, self._notes = self._notes, []
        if self._world_size > 1:
            soon = Deadline(self._timeout_s)
            if self._keys.add(self._key("out"), 1, soon) == self._world_size:
                own = [f"at/{rank}" for rank in range(self._world_size)]
                names = ("call", "n", "all", "out", *own)
                self._keys.post_delete([self._key(name) for name in names])
        self._round += 1
        self._has_noted = False
        self._signalled_at = None  # one that came meanwhile asked for the same
        left_s = min((n.time_left_s for n in notes if n.time_left_s is not None), default=None)
        save_s = max((n.save_s for n in notes if n.save_s is not None), default=None)
        if left_s is not None and save_s is not None and left_s < save_s:
            logger.warning(
                "step %d: not saved though a signal asks for it: %.1f s are left, and the last "
                "save took %.1f s",
                step,
                left_s,
                save_s,
            )
            return False
        return True
