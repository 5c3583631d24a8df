"""Memory is given back, and jobs end, while other threads of Python run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import RunPython
from support.call_shim import compiled, preloaded

from torch_dcpx import _C

ARENA_BYTES = 256 << 20


class Gaps:
    """The longest time for which a thread that only looks at the clock did not run."""

    def __enter__(self) -> Gaps:
        self.longest, self._is_over = 0.0, False
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        last = time.monotonic()
        while not self._is_over:
            time.sleep(0.0005)
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()


def shares_of_time(make: Callable[[], Callable[[], None]]) -> Iterator[float]:
    """Yields the longest gap of another thread in parts of the time that a release took.

    Args:
        make: makes what is to be released; what it returns releases it.
    """
    for _ in range(20):
        release = make()
        with Gaps() as gaps:
            begin = time.monotonic()
            release()
            taken = time.monotonic() - begin
        yield gaps.longest / taken


def touched() -> _C.Arena:
    # Shared: of small pages, which take longer to give back than huge ones.
    arena = _C.Arena(ARENA_BYTES, is_shared=True)
    arena.prefault(2)
    return arena


def by_release() -> Callable[[], None]:
    return touched().release


def by_the_last_name() -> Callable[[], None]:
    held = [touched()]
    return held.clear


# With the GIL held the other thread stands for the whole of each release. A busy machine stops it
# in some, for its own reasons, hardly in all. (Of the last tensor torch lets go without the GIL.)
@pytest.mark.parametrize("way", [by_release, by_the_last_name])
def test_other_threads_run_while_an_arena_is_given_back(
    way: Callable[[], Callable[[], None]],
) -> None:
    assert any(share < 0.7 for share in shares_of_time(way))


# The sync never returns, so only a handler that runs meanwhile can end the process.
ENDED_BY_ITS_HANDLER = """
import os, signal, sys
from support.call_shim import Action, Kind, Shim
from torch_dcpx import _C
library, path = sys.argv[1:]
signal.signal(signal.SIGALRM, lambda *_: os._exit(3))
job = _C.RangeJob(
    dir_fd=os.open(path, os.O_RDONLY), dir_path=path, workers=1, slot_bytes=1 << 20,
    is_durable=True, use_direct=False,
)
job.add_file("f", 1 << 20, True)
shim = Shim(library)
shim.watch(path)
shim.arm(0, Action.HOLD, kinds=Kind.FILE_FSYNC)
signal.setitimer(signal.ITIMER_REAL, 0.2)
job.finish(True)
"""


def test_signal_is_answered_while_an_export_syncs(run_python: RunPython, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    library = compiled(tmp_path)
    env = preloaded(library)
    done = run_python(ENDED_BY_ITS_HANDLER, str(library), str(target), env=env, check=False)
    assert done.returncode == 3, done.stderr
