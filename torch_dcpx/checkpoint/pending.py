"""The saves of this process in the background, and errors that nobody has read.

Process-wide, because memory and disk are. A forked child starts with none.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch_dcpx import _last_jobs as last_jobs
from torch_dcpx._arguments import check_wait
from torch_dcpx._log_lines import log_apart
from torch_dcpx._waiting import Deadline, Guard
from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.errors import OptionError, must_be

logger = logging.getLogger("torch_dcpx")
log_apart(logger)

_EXIT_VARIABLE = "DCPX_EXIT_TIMEOUT_S"
_EXIT_TIMEOUT_S = 600.0

_guard = Guard()  # a signal handler may wait while its thread holds it
_handles: list[SaveHandle] = []  # under way, or with an uncollected error
# Threads of saves: a save that is done calls callbacks on its own.
_threads: list[tuple[SaveHandle, threading.Thread]] = []
_followers: list[Callable[[Deadline], None]] = []
_own = threading.local()  # .handle: the save that the current thread makes


def add(handle: SaveHandle, thread: threading.Thread) -> None:
    """Notes a save that has begun on a thread."""
    with _guard.held():
        _sweep()
        _handles.append(handle)
        _threads[:] = [each for each in _threads if each[1].is_alive()]
        _threads.append((handle, thread))


def set_own(handle: SaveHandle) -> None:
    """Notes the save of this thread: a user's hook in it waits for all other saves."""
    _own.handle = handle


def _sweep() -> None:
    """Forgets saves that ended well, and collected errors. REQUIRES: _guard."""
    _handles[:] = [h for h in _handles if not h.done() or h.durable.has_uncollected_error]


def _under_way() -> list[SaveHandle]:
    with _guard.held():
        _sweep()
        own = getattr(_own, "handle", None)
        return [handle for handle in _handles if not handle.done() and handle is not own]


def count() -> int:
    """Returns how many saves are under way."""
    return len(_under_way())


def wait_for_room(max_in_flight: int) -> float:
    """Waits until fewer than `max_in_flight` saves are under way, each up to its own deadline.
    Returns the seconds that it waited.
    """
    begin = time.monotonic()
    while len(under_way := _under_way()) >= max_in_flight:
        futures = [handle.durable for handle in under_way]
        concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
    return time.monotonic() - begin


def raise_uncollected() -> None:
    """Raises the oldest error that nobody has read, and logs the others."""
    with _guard.held():
        failed = [handle for handle in _handles if handle.durable.has_uncollected_error]
        for handle in failed:
            handle.durable.is_collected = True
        _sweep()
    for handle in failed[1:]:
        _log_failure(handle)
    if failed:
        logger.error("an earlier save, to '%s', had failed", failed[0].checkpoint_id)
        failed[0].durable.result()


def _log_failure(handle: SaveHandle) -> None:
    error = str(handle.durable.exception())
    logger.error("the save to '%s' failed: %s", handle.checkpoint_id, error)


def wait(timeout_s: float | None = None) -> None:
    """Waits until no save of this process goes on in the background, nor calls a callback.

    Args:
        timeout_s: seconds; None (default) waits for the saves' own deadlines.

    Raises:
        TimeoutError: some are still under way.
        OptionError: no number of seconds.
        DcpxError: of a save that failed, if nobody has read it from the handle.
    """
    check_wait("timeout_s", timeout_s)
    deadline = Deadline(math.inf if timeout_s is None else timeout_s)
    late = _drain(timeout_s)
    if late:
        places = ", ".join(f"'{handle.checkpoint_id}'" for handle in late)
        raise TimeoutError(f"after {timeout_s} s still saving to {places}")
    wait_for_callbacks(deadline)
    raise_uncollected()


def wait_for_callbacks(deadline: Deadline) -> None:
    """Waits until saves that are done have called their callbacks: at once if this is in one.
    Raises TimeoutError at the deadline.
    """
    if getattr(_own, "handle", None) is not None:
        return
    with _guard.held():
        threads = [each for each in _threads if each[0].done()]
    for handle, thread in threads:
        thread.join(None if math.isinf(deadline.timeout_s) else deadline.remaining_s)
        if thread.is_alive():
            text = f"a callback of the save to '{handle.checkpoint_id}' is still running"
            raise TimeoutError(f"after {deadline.timeout_s} s {text}")


def _drain(timeout_s: float | None) -> list[SaveHandle]:
    """Waits for all saves. Returns the late ones."""
    handles = _under_way()
    late = concurrent.futures.wait([handle.durable for handle in handles], timeout_s).not_done
    return [handle for handle in handles if handle.durable in late]


def exit_timeout_s() -> float:
    """Returns how many seconds the end of the interpreter waits. Raises OptionError: no number."""
    value = os.environ.get(_EXIT_VARIABLE, _EXIT_TIMEOUT_S)
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < threading.TIMEOUT_MAX:
        raise must_be(_EXIT_VARIABLE, value, "a number of seconds")
    return seconds


def call_behind(follower: Callable[[Deadline], None]) -> None:
    """Makes the end of the interpreter call `follower`, which waits for work behind the saves."""
    _followers.append(follower)


def _at_exit() -> None:
    """Waits for saves under way as the interpreter ends, and logs uncollected errors."""
    try:
        timeout_s = exit_timeout_s()
    except OptionError as error:
        logger.error("%s; waiting for %s s", str(error), _EXIT_TIMEOUT_S)
        timeout_s = _EXIT_TIMEOUT_S
    deadline = Deadline(timeout_s)
    if count():
        logger.info("waiting up to %s s for saves under way", timeout_s)
    late = _drain(timeout_s)
    _log_late(late, timeout_s)
    for follower in _followers:
        follower(deadline)
    _join_threads(deadline)
    while not late and count():  # a callback has begun one more
        late = _drain(deadline.remaining_s)
        _log_late(late, timeout_s)
        _join_threads(deadline)
    for handle in late:  # stopped, it removes its files, unless it hangs in a system call
        handle.durable.is_collected = True  # logged above
        handle.leave(last_jobs.end_of_wait())
    if late:
        left_s = last_jobs.end_of_wait().remaining_s
        concurrent.futures.wait([handle.durable for handle in late], left_s)
    _log_uncollected()
    last_jobs.stop()


def _log_late(late: list[SaveHandle], timeout_s: float) -> None:
    for handle in late:
        logger.error(
            "the process ends after %s s (%s) while it still saves to '%s': the previous "
            "checkpoint stays, unless the new one was just being committed",
            timeout_s,
            _EXIT_VARIABLE,
            handle.checkpoint_id,
        )


def _join_threads(deadline: Deadline) -> None:
    """Waits for threads of saves, which call what their handles were given."""
    with _guard.held():
        threads = [thread for _, thread in _threads]
    for thread in threads:
        thread.join(deadline.remaining_s)


def _log_uncollected() -> None:
    with _guard.held():
        for handle in _handles:
            if handle.durable.has_uncollected_error:
                _log_failure(handle)


atexit.register(_at_exit)


def drain_on_sigterm() -> Callable[[], None]:
    """Makes SIGTERM wait for pending saves, up to DCPX_EXIT_TIMEOUT_S, before it takes effect.

    Then it calls the earlier handler, if it is Python's; without one the process ends by the
    signal. Call this on the main thread.

    Returns:
        A function that puts the earlier handler back.

    Raises:
        OptionError: DCPX_EXIT_TIMEOUT_S is no number of seconds.
        ValueError: not on the main thread (Python's).
    """
    timeout_s = exit_timeout_s()
    before: Any = signal.getsignal(signal.SIGTERM)
    if before is None:  # a handler of C: Python can neither call nor restore it
        before = signal.SIG_DFL

    def handle(number: int, frame: FrameType | None) -> None:
        logger.warning("SIGTERM: waiting up to %s s for saves under way", timeout_s)
        for late in _drain(timeout_s):
            logger.error("SIGTERM: after %s s still saving to '%s'", timeout_s, late.checkpoint_id)
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            _log_uncollected()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def put_back() -> None:
        signal.signal(signal.SIGTERM, before)

    signal.signal(signal.SIGTERM, handle)
    return put_back


def _forget_parents_saves() -> None:
    """Makes a forked child start with no saves: they go on in the parent."""
    global _guard
    _guard = Guard()  # another thread of the parent may have held it
    _handles.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_forget_parents_saves)
