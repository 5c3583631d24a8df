"""Pauses of the garbage collector while a million objects are built.

Each collection would walk all of them for nothing: decoding the metadata of 100,000 chunks takes a
multiple of the time with the collector on.

A pause is a threshold that no program sets, not `gc.disable`: changes that the program makes to the
collector meanwhile, on any thread, show and stay. A thread that works in the background makes no
pause: the program goes on beside it, and makes garbage.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch_dcpx._waiting import Guard

_MANY_ITEMS = 2000  # from here on collections cost a plan more than the timer does, 0.1 ms
_MAX_PAUSE_S = 10.0  # where DCP does not come back
_KEPT_PLAN_S = 1.0  # after the save, where somebody keeps its plan

_PAUSED = 2_000_000_011  # objects before a collection: never
_BACKGROUND = ("dcpx-", "AsyncCheckpointExecutor")  # how our threads are named, and that of stock

# Python 3.12 counts its own immortal objects among the frozen ones, 375; whoever freezes a program
# with torch in it freezes 100,000s.
_FEW_FROZEN = 1000 if sys.version_info[:2] == (3, 12) else 0

_lock = Guard()  # a signal handler may save while its thread holds it
_depth = 0  # how many blocks and bounded pauses, of all threads, are running
_epoch = 0  # how often the process was forked from one that had this module
_before: tuple[int, int, int] | None = None  # thresholds; None where nothing is paused
_own = threading.local()  # .depth: of the blocks, the current thread's


def _is_in_background() -> bool:
    return threading.current_thread().name.startswith(_BACKGROUND)


def _begin() -> None:
    """REQUIRES: _lock."""
    global _depth, _before
    if _depth == 0 and gc.isenabled() and gc.get_threshold()[0] > 0:
        _before = gc.get_threshold()
        gc.set_threshold(_PAUSED, *_before[1:])
    _depth += 1


def _end() -> None:
    """REQUIRES: _lock."""
    global _depth
    _depth -= 1
    if _depth == 0:
        _resume()


def _resume() -> None:
    """Restores the thresholds, unless somebody has set others. REQUIRES: _lock."""
    global _before
    before, _before = _before, None
    if before is not None and gc.get_threshold()[0] == _PAUSED:
        gc.set_threshold(*before)


def _made() -> int:
    """Returns a count that grows by each object that is made, and falls by each that goes."""
    return gc.get_count()[0]


def _make_old(before: int) -> None:
    """Moves all objects to the oldest generation, without a walk, if many were made since `_made`
    gave `before`. REQUIRES: a pause is on. Frozen objects of others would be unfrozen: then it does
    nothing.

    Young garbage of others moves too, and waits for a full collection. So nothing moves where the
    program has switched the collector off: it collects when it likes, maybe the young alone (as
    `gc.collect(1)` does), and that garbage, device tensors included, would wait for ever.
    """
    is_paused = _before is not None and gc.isenabled() and not _is_in_background()
    if is_paused and _made() - before >= _MANY_ITEMS and gc.get_freeze_count() <= _FEW_FROZEN:
        gc.freeze()
        gc.unfreeze()


@contextmanager
def paused_gc_of_many() -> Iterator[None]:
    """As `paused_gc`; afterwards the block's many objects are old. Else the first collection would
    walk all of them, 0.3 us each, and free none.
    """
    with paused_gc():
        before = _made()
        yield
        _make_old(before)


@contextmanager
def paused_gc() -> Iterator[None]:
    """Keeps cyclic garbage collection off inside the block; does nothing in the background.

    The first block of any thread remembers the process's thresholds, the last one restores them.
    """
    if _is_in_background():
        yield
        return
    with _lock.held():
        _begin()
        _own.depth = getattr(_own, "depth", 0) + 1
    try:
        yield
    finally:
        with _lock.held():
            _own.depth -= 1
            _end()


class PlanningPause:
    """A pause for code that is not ours and may never come back: it ends by itself. Thread-safe.

    DCP plans a save between two hooks of the writer. When that fails it calls no more of our code;
    on the coordinator it also waits for other ranks.

    The objects of a plan live until the save returns. A collection before that walks all of them
    and frees none, so on the coordinator the pause goes on until DCP drops the plan.
    """

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None  # while a pause is on
        self._plan: weakref.ref[object] | None = None
        self._before = 0  # of `_made`
        self._epoch = 0

    def begin(self, items: int) -> None:
        """Begins for a plan of many items; ends with `end`, in time, or in a forked child at once.
        A plan of few is done before a timer would start.
        """
        if items < _MANY_ITEMS or _is_in_background():
            self.end()
            return
        self._start(_MAX_PAUSE_S)

    def end_with(self, plan: object) -> None:
        """Ends the pause, if one is on, when `plan` is gone, and in time at the latest."""
        if self._timer is None:
            return
        try:
            self._plan = weakref.ref(plan, lambda _: self._end_with_made())
        except TypeError:  # a planner's own kind of plan: nothing would say when it is gone
            self.end()

    def end_soon(self) -> None:
        """Ends the pause, if one is on, with the plan of `end_with`, or a second from now."""
        if self._timer is not None:
            self._start(_KEPT_PLAN_S)

    def _start(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self.end)
        timer.daemon = True
        timer.name = "dcpx-gc-pause"
        with _lock.held():
            try:
                timer.start()
            except RuntimeError:  # no thread to be had: no pause without its end
                self.end()
                return
            # One that is on goes on: a moment without it is a collection.
            before, self._timer = self._timer, timer
            if before is None or self._epoch != _epoch:
                self._epoch = _epoch
                _begin()
                self._before = _made()
        if before is not None:
            before.cancel()

    def _end_with_made(self) -> None:
        """Ends the pause while the objects that were made in it are still there.

        The collection that comes with the next new object would walk them all: 0.1 of 0.9 s where
        the items of 20,000 tensors go with their plan, a quarter of a global plan of 256,000.
        """
        with _lock.held():
            if self._timer is not None and self._epoch == _epoch:
                _make_old(self._before)
        self.end()

    def end(self) -> None:
        """Ends the pause, if one is on."""
        with _lock.held():
            timer, self._timer, self._plan = self._timer, None, None
            if timer is not None and self._epoch == _epoch:
                _end()
        if timer is not None:
            timer.cancel()


@contextmanager
def bounded_pause(items: int) -> Iterator[None]:
    """A pause for this many items, which ends with the block, and in time: other threads' garbage
    must not grow while a block reads hundreds of gigabytes.
    """
    pause = PlanningPause()
    pause.begin(items)
    try:
        yield
    finally:
        pause._end_with_made()


def _forget_other_threads() -> None:
    """In a forked child: ends the pauses of threads that the child does not have."""
    global _lock, _depth, _epoch
    _lock = Guard()
    _epoch += 1
    before, _depth = _depth, getattr(_own, "depth", 0)
    if before and _depth == 0:
        _resume()


os.register_at_fork(after_in_child=_forget_other_threads)
