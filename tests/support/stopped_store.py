"""A store that is stopped: it takes connections and requests, and answers nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from support.machine import seconds

if TYPE_CHECKING:
    from support.object_proxy import FaultProxy
    from support.object_requests import Request


@contextmanager
def stopped(proxy: FaultProxy, kind: str = "any", key: str = "") -> Iterator[threading.Event]:
    """Yields an event. In the block, until it is set, no request of this kind, with this in its
    key, is answered.
    """
    goes_on = threading.Event()

    def hold(_: Request) -> None:
        goes_on.wait(seconds(120))

    proxy.hook(kind, hold, times=None, key=key)
    try:
        yield goes_on
    finally:
        goes_on.set()
        proxy.heal()
