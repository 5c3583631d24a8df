"""Processes that use a store through a proxy, and are killed at one of their requests."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

from support.machine import seconds
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.warm import warm_parent

_DEADLINE_S = seconds(300)


def killed_at(proxy: FaultProxy, number: int, arguments: Sequence[str], *, is_done: bool) -> int:
    """Runs a worker, and kills it when a request has come, which is lost then; or, `is_done`, when
    the store has done it. Returns its status: 0 if it ended before.
    """
    started = threading.Event()
    victim: list[Any] = []

    def kill(_: Request) -> str:
        if not started.wait(_DEADLINE_S):
            raise TimeoutError
        os.kill(victim[0].pid, signal.SIGKILL)
        return "lost_answer" if is_done else "reset"

    proxy.hook(number, kill, is_done=is_done)
    with tempfile.TemporaryFile("w+") as out:
        victim.append(warm_parent().start(list(arguments), out, out, env=os.environ))
        started.set()
        try:
            status: int = victim[0].wait(_DEADLINE_S)
        finally:
            victim[0].kill()
        out.seek(0)
        said = out.read()
    assert status in (0, -signal.SIGKILL), said
    return status
