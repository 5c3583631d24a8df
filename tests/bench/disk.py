"""Between two measurements: what was written is removed, and the disk comes to rest."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

DISKSTATS = Path("/proc/diskstats")


def remove_and_settle(path: Path, *, quiet_s: float = 0.05, limit_s: float = 5.0) -> None:
    """Removes a tree, if there is one, and waits until its removal has reached the disk.

    Freed blocks may be discarded long after the unlink, and would fall into the next side's time.

    Args:
        quiet_s: the disk is at rest when its counters have stood still for so long.
        limit_s: the wait ends here even if somebody else keeps the disk busy.
    """
    if path.exists():  # loads leave none
        shutil.rmtree(path)
    settle(quiet_s=quiet_s, limit_s=limit_s)


def settle(*, quiet_s: float = 0.05, limit_s: float = 5.0) -> None:
    """Writes back what is dirty and waits until no request ends any more."""
    os.sync()
    began = quiet_since = time.monotonic()
    last = _counters()
    while time.monotonic() - began < limit_s:
        time.sleep(quiet_s / 5)
        current = _counters()
        if current != last:
            last, quiet_since = current, time.monotonic()
        elif time.monotonic() - quiet_since >= quiet_s:
            return


def _counters() -> str:
    try:
        return DISKSTATS.read_text()
    except OSError:
        return ""  # not shown in some containers: the sync alone must do
