"""Something befalls a process at the n-th line of our modules and of DCP's."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from forks import in_child
from ways import SAVES

import torch_dcpx
from torch_dcpx import DcpxError, WriteOptions
from torch_dcpx.storage import save_lock as lock
from torch_dcpx.writer import locks as save_locks

ROOTS = (str(Path(torch_dcpx.__file__).parent), f"{os.sep}distributed{os.sep}checkpoint{os.sep}")
LOCKS = (lock.__file__, save_locks.__file__, weakref.__file__)  # a lock ends by weakref.finalize
OPTIONS = WriteOptions(workers=2, slot_bytes=256 << 10)
OLD, NEW, NEXT = ({"w": torch.full((100_000,), float(n)), "step": n} for n in range(3))


class Lines:
    """Counts the lines of our modules and of DCP's, and acts at one of them."""

    def __init__(
        self, at: int, act: Callable[[], object], files: tuple[str, ...] = (), thread: str = ""
    ) -> None:
        """With `files` only lines of those count, with `thread` those of ours on such a thread."""
        self.seen = 0
        self._at, self._act, self._files, self._thread = at, act, files, thread

    def __enter__(self) -> Lines:
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if self._files:
            return self._line if name in self._files else None
        if self._thread:
            is_on_it = threading.current_thread().name.startswith(self._thread)
            return self._line if is_on_it and name.startswith(ROOTS[0]) else None
        return self._line if name.startswith(ROOTS[0]) or ROOTS[1] in name else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.seen += 1
            if self.seen == self._at:
                self._act()
        return self._line


def lines_of(act: Callable[[], object], files: tuple[str, ...] = (), thread: str = "") -> int:
    """Returns how many lines `act` takes, in a child."""

    def body() -> int:
        with Lines(0, lambda: None, files, thread) as lines:
            act()
        return lines.seen

    ended = in_child(body)
    assert "value" in ended.said, ended
    return int(ended.said["value"])


def kill(number: int) -> Callable[[], object]:
    return lambda: os.kill(os.getpid(), number)


# What happens, and the exit codes that it may have.
ENDINGS: dict[str, tuple[Callable[[], object], tuple[int, ...]]] = {
    "SIGINT": (kill(signal.SIGINT), (0,)),
    "SIGTERM": (kill(signal.SIGTERM), (-signal.SIGTERM, 0)),
    "os._exit": (lambda: os._exit(7), (7, 0)),
}


def saved_next(path: Path) -> None:
    """The next save of the same process; it may first be told of what nobody asked for."""
    try:
        SAVES["save"](NEXT, path, OPTIONS)
    except DcpxError as error:
        if isinstance(error, torch_dcpx.ConcurrentSaveError):
            raise
        SAVES["save"](NEXT, path, OPTIONS)


def is_locked(path: Path) -> bool:
    """Whether another process would find the directory's lock taken."""
    fd = os.open(path / ".dcpx.lock", os.O_RDONLY | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
