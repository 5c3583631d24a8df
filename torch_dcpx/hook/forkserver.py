"""A forkserver that began before a change of the hook's variables: its processes never learn of it.

Processes of `spawn` get the variables as they are then, and those of `fork` the hook itself. Those
of a forkserver get the variables of the moment when it began, with the first process or pool.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from torch_dcpx.hook.settings import INSTALL

logger = logging.getLogger("torch_dcpx")

Variables = Mapping[str, str | None]


class ForkserverWatch:
    """Compares the hook's variables with those that a running forkserver has. Not thread-safe."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._its: Variables = {}

    def note_change(self, before: Variables, now: Variables) -> None:
        """Warns where the processes of a running forkserver have other variables than `now`."""
        pid = _running()
        if pid is None or before == now:
            return
        if pid != self._pid:  # it began since the last change
            self._pid, self._its = pid, before
        if self._its == now:
            return
        begun = "with" if self._its.get(INSTALL) else "without"
        logger.warning(
            "a forkserver of multiprocessing (process %d) began before this change of the hook, "
            "%s the hook: processes that it starts stay so. Call install() before the first of "
            "them, set DCPX_INSTALL=1 in the environment of this program, or start them by 'spawn'",
            pid,
            begun,
        )


def _running() -> int | None:
    """Returns the process of multiprocessing's forkserver, if one was started."""
    module = sys.modules.get("multiprocessing.forkserver")
    pid = getattr(getattr(module, "_forkserver", None), "_forkserver_pid", None)
    return pid if type(pid) is int else None
