"""Timelines of saves and loads: phases of Python's threads, spans of the engine's workers.

Every save and load notes a dozen phases, whether or not somebody wants a trace. `report.phases`
and `report.trace` are made from them. While torch's profiler runs, each phase is also a
`record_function` range, such as "dcpx.save/write"; with `emit_nvtx` torch makes NVTX of it.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from torch_dcpx import _trace_files
from torch_dcpx._compat import profiled

_SPAN = struct.Struct("=QQQII")  # SpanLog::Span of csrc/common/spans.h


class Phase(NamedTuple):
    """A part of a save or load on one thread. Phases of one thread never overlap: one that begins
    within another interrupts it.
    """

    name: str  # plan, exchange, snapshot, write, sync, vote, commit; of loads also metadata, locate
    began_ns: int  # since the epoch, as `time.time_ns`
    ended_ns: int
    thread: int  # `threading.get_native_id`


class Span(NamedTuple):
    """Work of one worker of the C++ engine."""

    kind: str  # copy, write, sync, locate, read, verify; engine: the call around them
    worker: int
    began_ns: int  # since the epoch
    ended_ns: int
    nbytes: int
    thread: int  # of the Python thread that made the call


class Busy(NamedTuple):
    """All work of one kind of one worker in a call, listed as spans or not."""

    kind: str
    worker: int
    times: int
    busy_ns: int
    nbytes: int
    thread: int


class Timeline:
    """Notes the phases of one save or load of this process. Threads may note at the same time.

    Attributes:
        operation: "save", "async_save" or "load".
        operation_id: the same on all ranks, where they know it: of a save its save id.
        path: of the checkpoint.
        rank: in the group that saves or loads.
        is_of_call: whether a call of ours ends it, not the last hook of a plug-in.
        has_file: whether it leaves a file in DCPX_TRACE_DIR.
        error: the type of the error that ended it; "" for none.
        has_ended: whether nothing more is noted.
    """

    def __init__(
        self,
        operation: str = "",
        *,
        path: object = "",
        rank: int | None = None,
        is_of_call: bool = False,
        has_file: bool = True,
    ) -> None:
        self.operation = operation
        self.operation_id = ""
        self.path = str(path)
        self.rank = rank or 0
        self.is_of_call = is_of_call
        self.has_file = has_file
        self.error = ""
        self.host = _host_name()
        self.pid = os.getpid()
        # Everything is noted by the monotonic clock, which is that of the engine's spans.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._noted: list[tuple[int, int, str]] = []  # thread, time, begun phase; "": one ends
        self._jobs: list[tuple[int, bytes, bytes]] = []  # thread, spans, sums
        self._thread_names: dict[int, str] = {}
        self.has_ended = False

    def phase(self, name: str) -> _Phase:
        """Notes the block as a phase of this thread; what it interrupts goes on afterwards.
        Notes none that begins after the end: an open checkpoint is read again and again.
        """
        return _Phase(self, name)

    def add_spans(self, report: Mapping[str, Any]) -> None:
        """Adds what a job reports with `spans=True`, called by this thread."""
        if not self.has_ended:
            self._jobs.append((threading.get_native_id(), report["spans"], report["busy"]))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that have ended, in the order of their beginnings."""
        found: list[Phase] = []
        last: dict[int, int] = {}  # by thread, its last phase in `found`
        open_phases: defaultdict[int, list[str]] = defaultdict(list)  # by thread, outermost first
        since: dict[int, int] = {}  # by thread, when its innermost phase began or went on
        for thread, noted_ns, name in tuple(self._noted):
            names, at_ns = open_phases[thread], noted_ns + self._epoch_ns
            if names and at_ns > since[thread]:
                phase, at = Phase(names[-1], since[thread], at_ns, thread), last.get(thread, -1)
                if at >= 0 and found[at].name == phase.name and found[at].ended_ns == since[thread]:
                    found[at] = found[at]._replace(ended_ns=at_ns)  # interrupted by its own name
                else:
                    last[thread] = len(found)
                    found.append(phase)
            since[thread] = at_ns
            if name:
                names.append(name)
            else:
                names.pop()
        return tuple(sorted(found, key=lambda phase: phase.began_ns))

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans of workers: 2,048 a job at most, none shorter than 20 us: see `busy`."""
        kinds = _kinds()
        return tuple(
            Span(kinds[kind], worker, begin + self._epoch_ns, end + self._epoch_ns, n, at)
            for at, spans, _ in self._jobs
            for begin, end, n, kind, worker in _SPAN.iter_unpack(spans)
        )

    @property
    def busy(self) -> tuple[Busy, ...]:
        """The sums of all that workers did, a row a worker and kind."""
        kinds = _kinds()
        return tuple(
            Busy(kinds[kind], worker, count, busy_ns, n, thread)
            for thread, _, sums in self._jobs
            for count, busy_ns, n, kind, worker in _SPAN.iter_unpack(sums)
        )

    def fail(self, error: BaseException) -> None:
        """Notes the error that ends it."""
        self.error = type(error).__name__

    def end(self) -> None:
        """Ends it, once: writes the file of DCPX_TRACE_DIR. Logs what fails there."""
        if self._noted and not self.has_ended:
            self.has_ended = True
            self.operation_id = self.operation_id or os.urandom(16).hex()
            if self.has_file and self.pid == os.getpid():
                _trace_files.write_if_asked(self)

    def end_hooks(self) -> None:
        """Ends it with the last hook of a plug-in, unless a call of ours is around that."""
        if not self.is_of_call:
            self.end()

    def thread_name(self, thread: int) -> str:
        """Returns the name that a thread had."""
        return self._thread_names.get(thread, f"thread {thread}")

    def trace(self) -> dict[str, Any]:
        """Returns it as a Chrome trace (Perfetto): a process is a rank."""
        return _trace_files.trace_of(self)


class _Phase:
    """Notes a block as a phase. No generator: a save of one small tensor has a dozen."""

    __slots__ = ("_name", "_range", "_thread", "_timeline")

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline, self._name = timeline, name

    def __enter__(self) -> None:
        timeline, self._range = self._timeline, None
        self._thread = 0 if timeline.has_ended else threading.get_native_id()
        if self._thread:
            if self._thread not in timeline._thread_names:
                timeline._thread_names[self._thread] = threading.current_thread().name
            timeline._noted.append((self._thread, time.monotonic_ns(), self._name))
            self._range = profiled(f"dcpx.{timeline.operation}/{self._name}")
            if self._range is not None:
                self._range.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._range is not None:
            self._range.__exit__(*error)
        if self._thread:  # that began: the thread of a forked child has another number
            self._timeline._noted.append((self._thread, time.monotonic_ns(), ""))


def _kinds() -> tuple[str, ...]:
    from torch_dcpx._native import _C  # not above: the hook counts in `reports` before it is used

    return _C.SPAN_KINDS


@cache
def _host_name() -> str:
    return socket.gethostname()
