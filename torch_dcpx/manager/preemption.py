"""A signal that reaches some ranks, at some moment, makes all ranks save at one step.

A rank runs no collective, and reads one key of the store a step. A round has keys of its number:
1. A rank with a signal sets `call`, in its next `requested`.
2. A rank that sees `call` notes its step under `at/RANK` and adds 1 to `n`; the last sets `all`.
   It answers no and goes on: ranks of a training are at most a step apart, and one may wait for a
   rank that is ahead.
3. In its next `requested` each rank waits for `all`. The ranks save one step after the highest
   noted: none is past it, for none passed this wait. All compute one answer from the same notes.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple, SupportsIndex

from torch_dcpx._arguments import check_wait
from torch_dcpx._integers import plain_int
from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import OptionError, RankLostError, must_be
from torch_dcpx.manager.pointer import checked_step
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.ranks.store_keys import Keys

logger = logging.getLogger("torch_dcpx")


def check_signals(signals: Any, time_left_s: Any) -> None:
    """Raises OptionError unless these are signal numbers, and seconds."""
    is_list = isinstance(signals, Iterable) and not isinstance(signals, (str, bytes))
    if not is_list or not all(isinstance(plain_int(number), int) for number in signals):
        raise must_be("signals", signals, "a list of signal numbers, such as [signal.SIGTERM]")
    check_wait("time_left_s", time_left_s)


_watching: weakref.WeakSet[Preemption] = weakref.WeakSet()


class _Note(NamedTuple):
    """A rank's note in a round."""

    step: int
    time_left_s: float | None  # None: no signal, or unknown
    save_s: float | None  # of its last save; None: it made none


class Preemption:
    """Whether to save because a signal will end this job. Made by `save_on_signal`.

    As a context manager it closes itself at the end of the block. Not thread-safe.
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
        """Installs nothing yet; after a signal, ranks wait up to `timeout_s` for each other."""
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
        self._answer: tuple[int, bool] | None = None  # the last one, and its step

    @property
    def is_signalled(self) -> bool:
        """Whether this rank has had a signal that it has not answered yet."""
        return self._signalled_at is not None

    def watch(self, signals: Sequence[int]) -> None:
        """Replaces the handlers of these signals until `close`.

        Raises:
            OptionError: not on the main thread, no signals or a wrong one; the handlers stay.
        """
        check_signals(signals, None)
        if not signals or threading.current_thread() is not threading.main_thread():
            raise OptionError(
                f"watch signals {tuple(signals)}: give at least one, and call it on the main "
                "thread, where Python handles signals",
                option="signals",
            )
        _watching.add(self)
        try:
            for number in dict.fromkeys(map(plain_int, signals)):
                before = signal.signal(number, self._note_signal)
                self._before[number] = signal.SIG_DFL if before is None else before
        except (OSError, ValueError, TypeError) as error:
            self.close()
            problem = f"{tuple(signals)!r:.80}: {error}; give signals that can be handled"
            raise OptionError(f"watch signals {problem}", option="signals") from error

    def watch_on_all(self, signals: Sequence[int], exchange: Exchange) -> None:
        """Calls `watch` on all ranks; where one raises, all do, and all handlers are put back."""
        try:
            exchange.all_reduce("watch", lambda: self.watch(signals), lambda _: None)
        except BaseException:
            self.close()
            raise

    def signalled(self) -> None:
        """Does the same as a signal: for tests, and for schedulers that send none."""
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        if os.getpid() == self._pid:
            self.signalled()
            if any(before == other._note_signal for other in list(_watching)):
                before(number, frame)  # each watch has the signal
            return
        # In a forked process, such as a data loader's worker, the old handler does its work.
        signal.signal(number, before)
        os.kill(os.getpid(), number)

    def requested(self, step: SupportsIndex) -> bool:
        """Returns whether to save now: the same at the same step on every rank.

        Every rank calls it each step, with the steps ascending; again at one step it answers the
        same. It returns True at one step for each request, or False if the time left is too short
        for a save. `CheckpointManager.should_save` calls it, too.

        Args:
            step: the last one that was trained.

        Raises:
            OptionError: this is no step.
            RankLostError: a rank did not call it within `save_timeout_s` of another's request.
            StoreLostError: the store does not answer.
        """
        step = checked_step(step)
        if self._answer is None or self._answer[0] != step:
            self._answer = step, self._is_requested(step)
        return self._answer[1]

    def _is_requested(self, step: int) -> bool:
        if self._world_size == 1:
            return self.is_signalled and self._answered(step, [self._own_note(step)])
        if not self._has_noted:
            self._note_if_called(step)
            return False
        self._notes = self._notes or self._read_notes()
        is_past_all = step > max(note.step for note in self._notes)
        return is_past_all and self._answered(step, self._notes)

    def close(self) -> None:
        """Puts the old handlers back where nobody has replaced ours; takes ours out of the chain
        where another watch has. Called on the main thread; safe to call twice.
        """
        while self._before:
            number, before = self._before.popitem()
            if signal.getsignal(number) == self._note_signal:
                signal.signal(number, before)
            for other in list(_watching):
                if other._before.get(number) == self._note_signal:
                    other._before[number] = before
        _watching.discard(self)

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

    def _read_notes(self) -> list[_Note]:
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
        return [_Note(*json.loads(note)) for note in self._keys.multi_get(names, deadline)]

    def _answered(self, step: int, notes: Sequence[_Note]) -> bool:
        """Ends the round, and returns its answer."""
        self._notes = []
        if self._world_size > 1:
            deadline = Deadline(self._timeout_s)
            if self._keys.add(self._key("out"), 1, deadline) == self._world_size:
                at = [f"at/{rank}" for rank in range(self._world_size)]
                self._keys.post_delete(list(map(self._key, ("call", "n", "all", "out", *at))))
        self._round += 1
        self._has_noted = False
        self._signalled_at = None  # a signal that came meanwhile is answered, too
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
