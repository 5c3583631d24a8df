"""Calls to storage that may never return, and how long an operation waits for one.

A FUSE daemon, a server or a gateway that is stopped answers no call, and a thread in such a call
takes no signal. So the call runs on a thread of ours, and the caller waits for its answer:

1. An operation (a save, a load, a listing) sets its bound at its border: `with wait_at_most(...)`.
2. Beneath it `answered` runs one call. Its caller can be interrupted at any time, by Ctrl-C too.
3. At the bound it raises StorageError (ETIMEDOUT). The thread is left behind, one log line an
   operation says so, and what the call returns later is discarded.
4. From then on the calls of the operation together wait for half of the margin: what tidies up
   comes before other ranks learn of the error. Behind an answer each may wait anew, for a part of
   the margin that gets less each time: where one disk of many is silent, the bound holds as well.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from torch_dcpx._waiting import ANSWER_THREAD
from torch_dcpx.errors import StorageError
from torch_dcpx.options import ReadOptions

logger = logging.getLogger("torch_dcpx")

R = TypeVar("R")

_LEAST_S = 0.1  # for a call behind one without an answer
_SLICE_S = 0.2
_LOOK_S = 0.5  # between looks whether bytes of a call move, or its caller has left
_IDLE_S = 2.0  # then a thread without calls ends
_MOST_MARGIN_S = 10.0  # in which other ranks learn of the error, before they miss this rank


class StorageTimeout:
    """How long the calls of one operation wait for an answer of its storage. Thread-safe."""

    def __init__(self, timeout_s: float, option: str) -> None:
        """Bounds each call.

        Args:
            timeout_s: seconds after which an operation raises that waits for storage.
            option: the name of the user's option that says so, for messages.
        """
        self.timeout_s, self.option = timeout_s, option
        self._gave_up_at: float | None = None
        self._silent_since = 0.0
        self._silences = 0  # that ended by the bound
        self._is_logged = self._is_interrupted = False

    @property
    def _margin_s(self) -> float:
        return min(self.timeout_s / 4, _MOST_MARGIN_S)

    @property
    def wait_s(self) -> float:
        """Seconds that the next call waits without any progress."""
        margin_s, gave_up_at = self._margin_s, self._gave_up_at
        if gave_up_at is not None:
            return max(gave_up_at + margin_s / 2 - time.monotonic(), _LEAST_S)
        if self._silences:
            return max(margin_s / 4.0 ** min(self._silences, 9), _LEAST_S)
        return min(self.timeout_s - margin_s, threading.TIMEOUT_MAX)

    def note_answer(self) -> None:
        """Notes that the storage answers."""
        if not self._is_interrupted:  # else some answers come from what the kernel keeps
            self._gave_up_at = None

    def note_interrupt(self) -> None:
        """Notes that a call was interrupted: what tidies up waits for a second at most."""
        if not self._is_interrupted:
            self._is_interrupted = True
            self._silent_since = time.monotonic()
            self._gave_up_at = self._silent_since + min(1.0 - self._margin_s / 2, 0.0)

    def error(self, what: str, path: str, waited_s: float) -> StorageError:
        """Returns the error of a call without an answer, and notes that there was none.

        Args:
            what: verb and object, such as "open '/ckpt/.metadata'".
            waited_s: for this call; the text counts from the first one without an answer.
        """
        now = time.monotonic()
        if self._gave_up_at is None:
            self._gave_up_at, self._silent_since = now, now - waited_s
            self._silences += 1
        waited_s = now - self._silent_since
        bound = f"{self.option}={self.timeout_s:.4g} bounds the wait"
        return StorageError(
            f"{what}: no answer for {waited_s:.0f} s; {bound}", errno=errno.ETIMEDOUT, path=path
        )

    def log_left(self, what: str, waited_s: float) -> None:
        """Logs, once an operation, that a call is left behind."""
        if not self._is_logged:
            self._is_logged = True
            logger.warning(
                "%s: no answer for %.0f s; the thread that waits is left behind", what, waited_s
            )


# Of the operation that runs here. A border on the way of every save and load sets it by itself:
# `wait_at_most` costs calls.
BOUND: ContextVar[StorageTimeout | None] = ContextVar("dcpx_bound", default=None)


def current_timeout(otherwise: StorageTimeout | None = None) -> StorageTimeout:
    """Returns the bound of the operation that runs here. Without one that is `otherwise`, or what
    the environment sets for loads.
    """
    found = BOUND.get() or otherwise
    return found or StorageTimeout(ReadOptions().load_timeout_s, "load_timeout_s")


@contextmanager
def wait_at_most(timeout: StorageTimeout) -> Iterator[None]:
    """Bounds the calls of the block on this thread. The innermost bound counts.

    A thread begins without one: who starts it hands `current_timeout()` over.
    """
    before = BOUND.set(timeout)
    try:
        yield
    finally:
        BOUND.reset(before)


def or_at_most(timeout_s: float, option: str) -> AbstractContextManager[None]:
    """Bounds the calls of the block where no operation around it does: for what DCP calls, and for
    what begins no exchange of ranks. Args: as `StorageTimeout`.
    """
    is_bounded = BOUND.get() is not None
    return nullcontext() if is_bounded else wait_at_most(StorageTimeout(timeout_s, option))


class Answer(Generic[R]):
    """Hands over once what a call returns or raises: to who waits, or to nobody. Thread-safe."""

    def __init__(self) -> None:
        self._has_come = threading.Lock()
        self._has_come.acquire()
        self._takers = [None]  # pop() decides whether it was in time
        self._result: Any = None
        self._error: BaseException | None = None

    def give(self, result: R | None, error: BaseException | None = None) -> bool:
        """Hands over what the call has brought. Returns False: nobody waits any more."""
        self._result, self._error = result, error
        try:
            self._takers.pop()
        except IndexError:
            self._result = self._error = None
            return False
        self._has_come.release()
        return True

    def leave(self) -> bool:
        """Says that nobody waits any more. Returns False: it has come."""
        try:
            self._takers.pop()
        except IndexError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Returns whether it comes within so many seconds. Signals are handled meanwhile."""
        until = time.monotonic() + seconds
        while True:
            left_s = max(until - time.monotonic(), 0.0)
            # In slices: a signal that comes just before the wait does not interrupt it.
            if self._has_come.acquire(timeout=min(left_s, _SLICE_S)):
                self._has_come.release()
                return True
            if not left_s:
                return False

    def taken(self) -> R:
        """Returns or raises it. REQUIRES: it has come."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        result: R = self._result
        return result


class _Worker:
    """A thread that makes one call at a time, and ends when there are none."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        thread = threading.Thread(target=self._run, name=ANSWER_THREAD, daemon=True)
        thread.start()

    def _run(self) -> None:
        _here.is_worker = True
        while True:
            try:
                call = self.calls.get(timeout=_IDLE_S)
            except Empty:
                try:
                    _idle.remove(self)
                except ValueError:
                    continue  # somebody has just taken it
                return
            call()
            del call  # it holds what it has brought
            _idle.append(self)


_here = threading.local()
_idle: list[_Worker] = []


def _after_fork() -> None:
    """A child has none of the threads."""
    _idle.clear()
    _here.is_worker = False


os.register_at_fork(after_in_child=_after_fork)


def _worker() -> _Worker:
    try:
        return _idle.pop()
    except IndexError:
        return _Worker()


def answered(
    call: Callable[[], R],
    what: str,
    path: str,
    discard: Callable[[R], object] | None = None,
    moved_at: Callable[[], float] | None = None,
    is_proof: bool = True,
) -> R:
    """Returns what `call` returns, or raises what it raises, if it does within the bound.

    Args:
        call: runs on another thread, which sees no context of this one.
        what: verb and object, for messages, such as "open '/ckpt/.metadata'".
        path: of the file or object.
        discard: is called, on that thread, with a result that comes too late, such as a descriptor
            that is to be closed. Default None: it is only dropped.
        moved_at: returns when bytes of such calls have last moved, by `time.monotonic()`: from then
            on the bound counts. Default None: from the call.
        is_proof: whether an answer shows that the storage answers. Default True.

    Raises:
        StorageError: ETIMEDOUT, no answer within the bound of this operation.
    """
    if getattr(_here, "is_worker", False):
        return call()  # another thread waits for this one
    timeout = current_timeout()
    began = time.monotonic()
    answer: Answer[R] = Answer()
    try:
        try:
            worker = _worker()
        except RuntimeError:  # no thread is left, or the interpreter ends
            return call()
        worker.calls.put(lambda: _make(call, answer, what, discard))
        has_come = _comes(answer, timeout, began, moved_at) or not answer.leave()
    except BaseException:
        if answer.leave():
            timeout.note_interrupt()
        elif discard is not None:
            discard(answer.taken())
        raise
    if has_come:
        if is_proof:
            timeout.note_answer()
        return answer.taken()
    waited_s = time.monotonic() - began
    timeout.log_left(what, waited_s)
    raise timeout.error(what, path, waited_s)


def _comes(
    answer: Answer[Any],
    timeout: StorageTimeout,
    began: float,
    moved_at: Callable[[], float] | None,
) -> bool:
    """Returns whether the answer comes within the bound."""
    if moved_at is None:
        return answer.wait(timeout.wait_s)
    since = began
    while (left_s := since + timeout.wait_s - time.monotonic()) > 0:
        if answer.wait(min(left_s, _LOOK_S, timeout.wait_s / 4)):
            return True
        since = max(since, moved_at())
    return False


def _make(
    call: Callable[[], R], answer: Answer[R], what: str, discard: Callable[[R], object] | None
) -> None:
    """Makes a call, on a worker."""
    result: R | None = None
    failure: BaseException | None = None
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - who waits raises it
        failure = error
    is_taken, has_failed = answer.give(result, failure), failure is not None
    failure = None  # its traceback holds this frame, and that what the call is of
    if is_taken:
        return
    try:
        if not has_failed and discard is not None:
            discard(result)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - nobody waits for it
        logger.warning("%s: discard a late answer: %r", what, error)
