"""The C++ calls of a save or a load, seen from outside: when they ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_dcpx import _C

Calls = list[tuple[Any, Any]]  # a clock's reading before and after each call

WRITE_CALLS, READ_CALLS = ("WriteJob", ("write",)), ("ReadJob", ("locate", "read"))


@contextmanager
def engine_calls(
    clock: Callable[[], Any] = time.perf_counter,
    of: tuple[str, tuple[str, ...]] = WRITE_CALLS,
) -> Iterator[Calls]:
    """Within it, `clock` is read before and after every call of this process.

    Args:
        of: a class of the extension, and its methods that count.
    """
    calls: Calls = []
    class_name, methods = of
    stock = getattr(_C, class_name)

    def clocked(name: str) -> Callable[..., Any]:
        method = getattr(stock, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = clock()
            try:
                return method(self, *args, **kwargs)
            finally:
                calls.append((before, clock()))

        return call

    clocked_class = type(class_name, (stock,), {name: clocked(name) for name in methods})
    setattr(_C, class_name, clocked_class)
    try:
        yield calls
    finally:
        setattr(_C, class_name, stock)


def seconds_in(calls: Calls) -> float:
    return float(sum(end - began for began, end in calls))
