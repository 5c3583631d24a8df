"""What a save costs besides time: memory, and what other Python threads can still do."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

Reading = tuple[float, int]  # seconds, count


def resident_bytes(field: str = "VmRSS") -> int:
    """Returns a field of /proc/self/status: VmRSS, or VmHWM, the most it was."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)


def extra_peak_bytes(work: Callable[[], None]) -> int:
    """Returns by how much the resident memory exceeds at its peak what it was before `work`."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work freed must not hide what this one takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident_bytes("VmRSS")
    work()
    return max(0, resident_bytes("VmHWM") - before)


class CountingThread:
    """A thread of pure Python that counts: what it loses during a save, training loses."""

    def __init__(self) -> None:
        self._count = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over:
            self._count += 1

    def __enter__(self) -> CountingThread:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over = True
        self._thread.join()

    def read(self) -> Reading:
        """Returns the time and the count, for `rate`."""
        return time.perf_counter(), self._count

    def idle_rate(self, seconds: float) -> float:
        """Returns counts a second while the caller sleeps."""
        before = self.read()
        time.sleep(seconds)
        return rate(before, self.read())


def rate(before: Reading, after: Reading) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])


def relative_rate(
    work: Callable[[CountingThread], list[tuple[Reading, Reading]]], idle_s: float = 0.4
) -> float:
    """Returns the counting rate during `work`, relative to that before and after it.

    Args:
        work: gets the thread, and returns its readings around what is to be looked at.
        idle_s: how long the thread runs alone, before and after.
    """
    with CountingThread() as thread:
        idle = thread.idle_rate(idle_s)
        spans = work(thread)
        idle = (idle + thread.idle_rate(idle_s)) / 2
    counts = sum(after[1] - before[1] for before, after in spans)
    seconds = sum(after[0] - before[0] for before, after in spans)
    return counts / seconds / idle
