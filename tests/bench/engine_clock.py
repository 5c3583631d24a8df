"""The one C++ call of a save, seen from outside: when it ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_dcpx import write_files

Calls = list[tuple[Any, Any]]  # a clock's reading before and after each call


@contextmanager
def engine_calls(clock: Callable[[], Any] = time.perf_counter) -> Iterator[Calls]:
    """Within it, `clock` is read before and after every `WriteJob.write` of this process."""
    calls: Calls = []
    stock = write_files._C.WriteJob

    class ClockedJob(stock):  # type: ignore[misc, valid-type]
        def write(self, *args: Any, **kwargs: Any) -> Any:
            before = clock()
            try:
                return super().write(*args, **kwargs)
            finally:
                calls.append((before, clock()))

    write_files._C.WriteJob = ClockedJob  # type: ignore[misc]
    try:
        yield calls
    finally:
        write_files._C.WriteJob = stock  # type: ignore[misc]
