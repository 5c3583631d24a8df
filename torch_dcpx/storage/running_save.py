"""Whether a save is still under way, for the next save that wants its writer or its directory.

DCP calls no hook of a writer when a save fails on another rank: the collective raises inside
`_save_state_dict`. So we look at the stack of the thread that made the save: is it still inside?
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch_dcpx import events
from torch_dcpx._compat import saved_through
from torch_dcpx._waiting import Guard
from torch_dcpx.errors import ConcurrentSaveError, StorageError
from torch_dcpx.events import UNHEARD, Operation
from torch_dcpx.options import ProgressFunction
from torch_dcpx.storage.object_url import Location
from torch_dcpx.timelines import Timeline

_MAX_LOOKS = 1000
_CHECK_S = 1.0

_driving = threading.local()  # .begun: the list of `driven` in this thread


@contextmanager
def driven() -> Iterator[list[RunningSave]]:
    """Yields a list of the saves that begin in the block: these are over when they are ended,
    whatever their threads do.
    """
    begun: list[RunningSave] = []
    before, _driving.begun = getattr(_driving, "begun", None), begun
    try:
        yield begun
    finally:
        _driving.begun = before


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


class RunningSave:
    """One save, from its first hook on. It is over when it was ended, when its thread has ended or
    has left DCP, when its writer was collected, and in a forked child. Thread-safe.

    A save without a DCP call (hooks called by hand) is also over for its own thread: that cannot
    start the next one in the middle of this one. A save of `driven` goes on in other threads, and
    is over when it was ended.
    """

    def __init__(self, writer: object) -> None:
        self.save_id = uuid.uuid4().hex  # "" on a follower that does not know the coordinator's
        self.directory: Location | None = None  # where it saves to, once the writer knows
        self.is_unsure = False  # a commit that nobody has answered may still be done
        self.made: list[Path] = []  # directories that it made, the outermost first
        self.hosts: tuple[str, ...] = ()  # by rank, where one node must see the files of others
        self.timeline = Timeline("save")  # of a driven save: that of its call
        self.thread = threading.current_thread()
        begun = getattr(_driving, "begun", None)
        self.is_driven = begun is not None
        if begun is not None:
            begun.append(self)
        # A driven save is a part of an operation that its driver tells.
        self.operation = UNHEARD if self.is_driven else events.begun("dcp.save", writer)
        self._writer = weakref.ref(writer)
        self._pid = os.getpid()
        self._is_ended = False
        self._is_stopped = False
        # Called once a second while it writes: raises if another rank has ended the save.
        self.check: Callable[[], None] | None = None
        frames = list(_callers(sys._getframe(1)))
        self._outermost = frames[-1].f_code
        # DCP saves through the writer, or through one that passes its calls on to the writer.
        plugins = [plugin for plugin in map(saved_through, frames) if plugin is not None]
        plugin = plugins[0] if plugins else writer
        try:
            self._plugin = weakref.ref(plugin)
        except TypeError:  # a class with __slots__
            self._plugin = self._writer
        self.depth = sum(other is self._plugin() for other in plugins)

    def end(self) -> Operation:
        """Ends the save. Returns the operation that tells how."""
        self._is_ended = True
        self.timeline.operation_id = self.timeline.operation_id or self.save_id
        self.timeline.end_hooks()
        return self.operation

    def stop(self) -> None:
        """Makes a driven save fail while it writes, a tenth of a second from now."""
        self._is_stopped = True

    def watched(self, report: ProgressFunction | None) -> ProgressFunction | None:
        """Returns `report`; of a driven save, one that also raises once it is stopped, and whose
        `poll` does only that.
        """
        if not self.is_driven:
            return report
        next_check = time.monotonic() + _CHECK_S

        def poll() -> None:
            nonlocal next_check
            if self._is_stopped:
                raise StorageError("cancelled while it wrote", errno=errno.ECANCELED)
            if self.check is not None and time.monotonic() >= next_check:
                self.check()
                next_check = time.monotonic() + _CHECK_S

        def tell(done_bytes: int, total_bytes: int) -> None:
            poll()
            if report is not None:
                report(done_bytes, total_bytes)

        vars(tell)["poll"] = poll
        return tell

    def is_under_way(self) -> bool:
        """Returns whether the save may still touch its writer or its directory."""
        if self._is_ended or self._writer() is None or self.is_of_parent():
            return False
        if self.is_driven:
            return True
        if not self.thread.is_alive():
            return False
        if self.depth == 0:
            return self.thread is not threading.current_thread()
        return self._depth_now() >= self.depth

    def is_of_parent(self) -> bool:
        """Returns whether this process is a fork of the one that began the save."""
        return self._pid != os.getpid()

    def is_around_current_call(self) -> bool:
        """Returns whether a new DCP save of this thread was called from within this one."""
        return self.is_under_way() and (self.is_driven or self._depth_now() > self.depth)

    def _depth_now(self) -> int:
        """Returns how many nested saves through the plug-in the thread is inside of."""
        plugin = self._plugin()
        if plugin is None:
            return 0
        for _ in range(_MAX_LOOKS):
            frames = list(_callers(sys._current_frames().get(self.thread.ident or 0)))
            if frames and frames[-1].f_code is self._outermost:
                return sum(saved_through(frame) is plugin for frame in frames)
            # The thread left a generator meanwhile: half a stack. Or it is a thread of C++, which
            # has returned from the call that made the save: always another outermost frame.
        return 0


class WriterUse:
    """Knows the save that uses a writer: one at a time. Thread-safe; belongs to one process.

    A copy of a writer, pickled or not, has a use of its own.
    """

    def __init__(self) -> None:
        self._guard = Guard()  # a signal handler may save as well
        self._pid = os.getpid()
        self._running: RunningSave | None = None
        self._path = ""  # of the running save
        self._targets = weakref.WeakKeyDictionary[threading.Thread, str]()  # of their next saves
        self._last_target = ""  # by whatever thread

    def __reduce__(self) -> tuple[Any, ...]:
        return WriterUse, ()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps other threads from `retarget` and `begin`."""
        if self._pid != os.getpid():  # forked, while another thread may have held it
            self._guard, self._pid = Guard(), os.getpid()
        with self._guard.held():
            yield

    def check(self) -> None:
        """Raises ConcurrentSaveError if a save through the writer is under way."""
        running = self._running
        if running is not None and running.is_under_way():
            raise self._in_use(running)

    def retarget(self, path: str) -> None:
        """Sets the path of this thread's next save. REQUIRES: in `hold`."""
        self._targets[threading.current_thread()] = self._last_target = path

    def begin(self, writer: object, path: str) -> RunningSave:
        """Starts a save of this thread to `path`. REQUIRES: in `hold`.

        Raises ConcurrentSaveError if another save through the writer is under way, or if another
        thread has set another path since this one did.
        """
        running = self._running
        if running is not None and running.is_under_way():
            is_own = running.thread is threading.current_thread()
            if not is_own or running.is_around_current_call():
                raise self._in_use(running)
        target = self._targets.pop(threading.current_thread(), self._last_target)
        if target != self._last_target:
            raise ConcurrentSaveError(
                f"writer in use: it was to save to '{target}', but another thread has reset it "
                f"to '{self._last_target}' in the meantime; use a DcpxWriter for each",
                errno=errno.EBUSY,
                path=target,
            )
        self._running, self._path = RunningSave(writer), path
        return self._running

    def _in_use(self, running: RunningSave) -> ConcurrentSaveError:
        owner = f"thread {running.thread.name!r}"
        return ConcurrentSaveError(
            f"writer in use: {owner} is saving to '{self._path}' with it; wait for that save, or "
            "use another DcpxWriter",
            errno=errno.EBUSY,
            path=self._path,
            owner=owner,
        )
