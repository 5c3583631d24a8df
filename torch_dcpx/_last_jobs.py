"""Stops other threads' work in this package when the interpreter ends.

Before 3.14, Python ends a daemon thread by a forced unwind when the thread next takes the GIL. In a
frame of C++, torch's as well as ours, that aborts the process. So `stop` puts those threads to
sleep first, where they enter or leave C++.
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

from torch_dcpx._native import _C
from torch_dcpx._waiting import ANSWER_THREAD, STORE_THREAD, Deadline

LAST_WAIT_S = 2.0  # for all that is given up: only a system call or a user's hook takes longer

_LOOK_S = 0.002
_LEAST_S = 0.5  # in any case, for threads to go to sleep
_has_stopped = False
_end: Deadline | None = None


def end_of_wait() -> Deadline:
    """Returns when waiting for what is given up ends: LAST_WAIT_S after the first such question."""
    global _end
    _end = _end or Deadline(LAST_WAIT_S)
    return _end


def stop() -> None:
    """Stops it, once. Called by an exit hook of the extension, unless somebody has before."""
    global _has_stopped
    if _has_stopped:
        return
    _has_stopped = True
    deadline = Deadline(max(end_of_wait().remaining_s, _LEAST_S))
    _C.stop_jobs(deadline.remaining_s)
    while _is_any_inside() and not deadline.has_passed:
        time.sleep(_LOOK_S)
    _C.let_jobs_begin()  # hooks of the end that come after this one may save


def _is_any_inside() -> bool:
    """Returns whether another thread still runs code of ours, or what that has called."""
    left_out = {threading.get_ident(), *_C.stopped_threads()}
    for thread in threading.enumerate():
        if thread.name in (STORE_THREAD, ANSWER_THREAD):
            left_out.add(thread.ident or 0)
    for ident, top in sys._current_frames().items():
        frame: FrameType | None = None if ident in left_out else top
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("torch_dcpx."):
                return True
            frame = frame.f_back
    return False
