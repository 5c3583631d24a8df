"""Events: `on_event` calls a function at the end of each save and load of this process.

    remove = dcpx.on_event(lambda event: print(event.call, event.path, event.seconds))

1. `begun` notes the operation, its callbacks and the caller's context. Where nobody listens it
   looks at one tuple, and no more.
2. The operation ends: its locks are free, and a save that ended well is durable.
3. `Operation` calls each callback once, on the thread where the operation ended, in the caller's
   context. An error of a callback is logged and changes nothing; an exit is raised behind the last.
"""

from __future__ import annotations

import contextvars
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_dcpx._arguments import check_callable, is_path
from torch_dcpx._waiting import Guard
from torch_dcpx.reports import LoadReport, ReadReport, SaveReport, WriteReport

logger = logging.getLogger("torch_dcpx")


@dataclass(frozen=True)
class Event:
    """The end of one operation on this rank.

    Attributes:
        call: "dcpx.save", "dcpx.async_save", "dcpx.load", "dcpx.load_pretrained", or stock's
            "dcp.save" and "dcp.load" through a DcpxWriter or a DcpxReader. A manager's `save` and
            `resume` make the first three.
        path: directory or URL of the checkpoint; "" where the arguments name none.
        began_ns: time of the call, in nanoseconds since 1970 (`time.time_ns`).
        seconds: from the call to the end; the report's `total_s` where there is a report.
    """

    call: str
    path: str
    began_ns: int
    seconds: float

    @property
    def ended_ns(self) -> int:
        """Time of the end, as `began_ns`."""
        return self.began_ns + round(self.seconds * 1e9)


@dataclass(frozen=True)
class SaveEnded(Event):
    """A save is committed, and durable on all ranks.

    Attributes:
        report: of all ranks. None of "dcp.save", where only the coordinator has this event: no
            other rank's writer learns of the commit.
        write: this rank's part; None where a subclass's `write_data` leaves no report.
        staged_bytes: bytes of tensors that `async_save` copied to host memory on this rank.
    """

    report: SaveReport | None
    write: WriteReport | None
    staged_bytes: int


@dataclass(frozen=True)
class SaveFailed(Event):
    """A save failed, or was cancelled.

    Attributes:
        error: that the call or the handle raises. Of "dcp.save" the error of this rank's writer:
            a writer does not learn of errors elsewhere.
    """

    error: BaseException


@dataclass(frozen=True)
class LoadEnded(Event):
    """A load ended well.

    Attributes:
        report: of `dcpx.load`; None of "dcp.load".
        read: the reader's report; None for a subclass that reads its own way.
    """

    report: LoadReport | None
    read: ReadReport | None


@dataclass(frozen=True)
class LoadFailed(Event):
    """A load failed.

    Attributes:
        error: that the call raises. Of "dcp.load" the error of this rank's reader.
    """

    error: BaseException


Callback = Callable[[Event], object]


class _Listener:
    """One `on_event`."""

    def __init__(self, callback: Callback) -> None:
        self.is_active = True
        self._callback = callback
        self._logged: set[type] = set()

    def hear(self, event: Event) -> BaseException | None:
        """Calls the callback. Returns its exit or interrupt, for when all have been called."""
        try:
            self._callback(event)
        except BaseException as error:  # asyncio's CancelledError as well
            if type(error) not in self._logged:
                self._logged.add(type(error))
                logger.exception(
                    "a callback of on_event failed behind %s of '%s', which is as it was without; "
                    "its next errors of this type are not logged",
                    event.call,
                    event.path,
                )
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                return error
        return None


_guard = Guard()  # a signal handler may call `on_event`
_listeners: tuple[_Listener, ...] = ()  # replaced as a whole: a reader needs no lock


def on_event(callback: Callback) -> Callable[[], None]:
    """Calls a function at the end of each save and load that begins from now on.

    It is called once for each operation of this rank, with an `Event` of one of four classes:
    `SaveEnded`, `SaveFailed`, `LoadEnded`, `LoadFailed`. A blocking call calls it before it
    returns. Of `async_save` the thread that saves calls it once the handle is done; `wait`, `close`
    and those of a manager return after that. A save that `on_busy` skips has no event.

    Callbacks are called in the order in which they were added, each once for each `on_event`. Their
    errors are logged, with traceback, the first one of each type. A blocking call raises
    KeyboardInterrupt and SystemExit of one when all have been called. They run in a copy of the
    caller's context (`contextvars`). A forked child keeps the callbacks, for operations of its own.
    A callback may save and load, but not with other ranks: give `no_dist=True`.

    Args:
        callback: gets the event; keep it short, for a blocking call waits for it.

    Returns:
        A function that removes the callback; safe to call twice, and from a callback.

    Raises:
        OptionError: `callback` is no function.
    """
    check_callable("callback", callback, or_none=False)
    listener = _Listener(callback)
    _replace(lambda listeners: (*listeners, listener))

    def remove() -> None:
        listener.is_active = False
        _replace(lambda listeners: tuple(each for each in listeners if each is not listener))

    return remove


def _replace(change: Callable[[tuple[_Listener, ...]], tuple[_Listener, ...]]) -> None:
    global _listeners
    with _guard.held():
        _listeners = change(_listeners)


class Operation:
    """One save or load, from its call to its end. Calls the callbacks once, in one process.

    As a context manager it has failed if the block raises.
    """

    def __init__(self, call: str, path: str, listeners: tuple[_Listener, ...]) -> None:
        """Begins now; `listeners` are called at its end."""
        self._call, self._path = call, path
        self._listeners = listeners
        if listeners:
            self._pid = os.getpid()
            self._context = contextvars.copy_context()
            self._began_ns = time.time_ns()
            self._began = time.perf_counter()

    @property
    def is_heard(self) -> bool:
        """Whether somebody listens: else nothing need be computed for it."""
        return bool(self._listeners)

    def saved(
        self, report: SaveReport | None, write: WriteReport | None, staged_bytes: int = 0
    ) -> None:
        """Ends the save."""
        if self._listeners:
            self._tell(SaveEnded(*self._facts(report), report, write, staged_bytes))

    def loaded(self, report: LoadReport | None, read: ReadReport | None) -> None:
        """Ends the load."""
        if self._listeners:
            self._tell(LoadEnded(*self._facts(report), report, read))

    def failed(self, error: BaseException) -> None:
        """Ends the operation with its error, unless it has ended."""
        if self._listeners:
            kind = SaveFailed if self._call.endswith("save") else LoadFailed
            self._tell(kind(*self._facts(None), error))

    def _facts(self, report: SaveReport | LoadReport | None) -> tuple[str, str, int, float]:
        seconds = time.perf_counter() - self._began if report is None else report.total_s
        return self._call, self._path, self._began_ns, seconds

    def _tell(self, event: Event) -> None:
        listeners, self._listeners = self._listeners, ()
        if os.getpid() != self._pid:  # a forked child unwinds its parent's operation
            return
        exits = [self._context.run(one.hear, event) for one in listeners if one.is_active]
        for error in filter(None, exits):
            raise error

    def __enter__(self) -> Operation:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.failed(error)


UNHEARD = Operation("", "", ())


def is_anybody_listening() -> bool:
    """Returns whether there is a callback."""
    return bool(_listeners)


def begun(call: str, *named: object) -> Operation:
    """Returns the operation that begins now.

    Args:
        call: its name, as in `Event`.
        named: paths, or what has a `path`; the first one counts.
    """
    if not _listeners:
        return UNHEARD
    return Operation(call, next(filter(None, map(_path_of, named)), ""), _listeners)


def _path_of(value: Any) -> str:
    try:
        path: Any = value if is_path(value) else getattr(value, "path", None)
        return os.fsdecode(path) if is_path(path) else ""
    except Exception:  # noqa: BLE001 - a user's class: the code that uses the path tells all ranks
        return ""


def _forget_parents_lock() -> None:
    global _guard
    _guard = Guard()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_forget_parents_lock)
