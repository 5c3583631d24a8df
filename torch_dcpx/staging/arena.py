"""Memory for snapshots: arenas of the process, used for one save after another.

An arena is lent to the tensors over it, and free when the last of their storages is gone. A save
that finds none free takes another one within its budget, or waits; an arena that a save still reads
is never overwritten.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch_dcpx._native import _C
from torch_dcpx.errors import StagingError, StorageError
from torch_dcpx.staging.host_memory import available_memory

_POLL_S = 0.0002
_MAX_POLL_S = 0.02
_COLLECT_S = 0.02  # from here on a cycle may be what holds an arena (torch 2.9 makes one a save)
_COMING_BACK_S = 0.25  # how long a save that has written all may still hold what it wrote
_ROUND_BYTES = 2 << 20
_RESERVE_BYTES = 64 << 20  # of available memory, left to everything else

# Where the arenas of this process lie, to find the one that a tensor is over.
_arenas: weakref.WeakSet[_C.Arena] = weakref.WeakSet()


class ArenaPool:
    """Arenas that are used again. Thread-safe; refuses a child of a process that has had one.

    The smallest free arena that fits is taken. If none fits, the pool gives free ones back to the
    system before it makes a larger one, so that a growing state never holds both.

    Attributes:
        budget_bytes: bound on the bytes of all arenas together; None (default): available memory.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._arenas: list[_C.Arena] = []
        self._taken: set[int] = set()  # ids of arenas that somebody is filling
        self._seen_written: dict[int, int] = {}  # by id: `written` when it was lent last
        self._guard = threading.Condition()
        self._pid = os.getpid()
        self._has_made_one = False

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        with self._held():
            return sum(arena.nbytes for arena in self._arenas)

    @property
    def count(self) -> int:
        """Number of arenas."""
        with self._held():
            return len(self._arenas)

    @contextmanager
    def lease(
        self,
        nbytes: int,
        *,
        is_shared: bool = False,
        budget_bytes: int | None = None,
        timeout_s: float = 1800.0,
    ) -> Iterator[_C.Arena]:
        """Gives an arena of at least `nbytes` to fill; nobody else has it until the block ends.

        After the block it stays lent as long as there are tensors over it.

        Args:
            is_shared: in a memfd, for another process.
            budget_bytes: bound on the pool's bytes while this is lent; None: the pool's.
            timeout_s: seconds to wait for an arena to come back.

        Raises:
            StagingError: a forked child; more than the budget or than the available memory; no
                arena came back in time.
        """
        arena = self._acquire(nbytes, is_shared, budget_bytes, timeout_s)
        try:
            yield arena
        finally:
            with self._held():
                self._taken.discard(id(arena))
                self._seen_written[id(arena)] = arena.written
                self._guard.notify_all()

    def prewarm(
        self,
        nbytes: int,
        *,
        is_shared: bool = False,
        budget_bytes: int | None = None,
        workers: int = 2,
        timeout_s: float = 1800.0,
        device: int = -1,
    ) -> None:
        """Takes memory for a state of `nbytes` now; arguments as of `lease` and `make_ready`."""
        with self.lease(
            nbytes, is_shared=is_shared, budget_bytes=budget_bytes, timeout_s=timeout_s
        ) as arena:
            make_ready(arena, device, workers)

    def close(self) -> None:
        """Gives all memory back to the system, arenas in use once they are free. Reusable."""
        with self._held():
            for arena in list(self._arenas):
                if id(arena) not in self._taken:
                    self._drop(arena)

    @contextmanager
    def _held(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise StagingError(
                f"this process (pid {os.getpid()}) was forked from pid {self._pid}, which owns the "
                "staging memory: stage in the parent, or start the child by 'spawn'"
            )
        with self._guard:
            yield

    def _acquire(
        self, nbytes: int, is_shared: bool, budget_bytes: int | None, timeout_s: float
    ) -> _C.Arena:
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        if budget is not None and nbytes > budget:
            raise StagingError(
                f"cannot stage {nbytes} B: more than the budget of {budget} B for staging memory"
            )
        begin, has_collected = time.monotonic(), False
        while True:
            waited_s = time.monotonic() - begin
            if not has_collected and waited_s > _COLLECT_S:
                has_collected = True
                gc.collect()
            with self._held():
                arena = self._try_acquire(nbytes, is_shared, budget, waited_s)
                if arena is not None:
                    self._taken.add(id(arena))
                    return arena
                held = sum(arena.nbytes for arena in self._arenas)
            if waited_s > timeout_s:
                raise StagingError(
                    f"no staging memory for {nbytes} B after {timeout_s:g} s: {held} B of the "
                    f"budget of {budget} B are held by saves under way, or by whoever keeps a "
                    "staged state (a planner, an exception, a variable)"
                )
            with self._guard:
                self._guard.wait(min(_MAX_POLL_S, _POLL_S + waited_s / 10))

    def _try_acquire(
        self, nbytes: int, is_shared: bool, budget: int | None, waited_s: float
    ) -> _C.Arena | None:
        """Returns an arena, or None where one must come back first. REQUIRES: in `_held`."""
        usable = [arena for arena in self._arenas if is_shared <= (arena.fd >= 0)]
        free = [a for a in self._arenas if a.lent == 0 and id(a) not in self._taken]
        fitting = [arena for arena in usable if arena in free and arena.nbytes >= nbytes]
        if fitting:
            return min(fitting, key=lambda arena: arena.nbytes)
        if waited_s < _COMING_BACK_S and any(map(self._is_coming_back, usable)):
            return None  # rather than a second one
        for arena in free:  # too small, or of the other kind
            self._drop(arena)
        wanted = -(-nbytes // _ROUND_BYTES) * _ROUND_BYTES
        if budget is not None:
            left = budget - sum(arena.nbytes for arena in self._arenas)
            if nbytes > left:
                return None
            wanted = min(wanted, left)
        return self._make(wanted, is_shared)

    def _is_coming_back(self, arena: _C.Arena) -> bool:
        """Whether a save has written all that is staged there, and so no longer reads it."""
        return id(arena) not in self._taken and arena.written > self._seen_written[id(arena)]

    def _make(self, nbytes: int, is_shared: bool) -> _C.Arena:
        available = available_memory()
        if available.nbytes is not None and nbytes + _RESERVE_BYTES > available.nbytes:
            raise StagingError(
                f"cannot stage {nbytes} B: {available.nbytes} B of memory are available "
                f"({available.source}), of which {_RESERVE_BYTES} B are left to others"
            )
        try:
            arena = _C.Arena(nbytes, is_shared=is_shared)
        except StorageError as error:
            raise StagingError(f"cannot stage {nbytes} B: {error}") from error
        self._has_made_one = True
        self._arenas.append(arena)
        self._seen_written[id(arena)] = 0
        _arenas.add(arena)
        return arena

    def _drop(self, arena: _C.Arena) -> None:
        self._arenas.remove(arena)
        del self._seen_written[id(arena)]
        _arenas.discard(arena)
        arena.release()


@contextmanager
def no_memory_is_staging_error(arena: _C.Arena) -> Iterator[None]:
    """Raises StagingError where the system has less memory for `arena` than it said."""
    try:
        yield
    except StorageError as error:
        raise StagingError(f"cannot take {arena.nbytes} B of memory: {error}") from error


def make_ready(arena: _C.Arena, device: int, workers: int) -> None:
    """Takes an arena's memory from the system, and begins to register it with the driver, so that
    devices copy to it at full rate.

    Registering goes on in the background; a copy waits for it. Does nothing for an arena that was
    registered before, or that the driver has refused: a warning says so once a process.

    Args:
        arena: nobody else fills it.
        device: CUDA ordinal; untouched memory will lie near it. -1: the arena is not registered.
        workers: threads that take the memory.

    Raises:
        StagingError: the system has less memory than it said.
    """
    if arena.is_pin_begun:
        return
    if device >= 0:
        arena.place_near(device)
    with no_memory_is_staging_error(arena):
        arena.prefault(workers)  # by many threads: the driver takes memory by one
    if device >= 0:
        arena.pin(device)


_pool = ArenaPool()


def _start_anew() -> None:
    """In a forked child: it has no mapping of the parent's, and other memory may lie there. A pool
    that the parent has never used is the child's own.
    """
    _arenas.clear()
    if not _pool._has_made_one:
        _pool._guard = threading.Condition()  # another thread of the parent may have held it
        _pool._taken.clear()
        _pool._pid = os.getpid()


os.register_at_fork(after_in_child=_start_anew)


def process_pool() -> ArenaPool:
    """Returns the pool that all stagers of this process share."""
    return _pool


# ---- What another process has staged ------------------------------------------------------------

_attached: list[_C.Arena] = []


def attach(fd: int, nbytes: int) -> _C.Arena:
    """Maps the arena of another process; `fd` stays the caller's. Raises StorageError."""
    _attached[:] = [arena for arena in _attached if arena.lent]
    arena = _C.Arena.attach(fd, nbytes)
    _attached.append(arena)
    _arenas.add(arena)
    return arena


def has_arenas() -> bool:
    """Returns whether this process has arenas, of its own or of another one."""
    return bool(_arenas)


def note_written(address: int) -> None:
    """Notes that a save has written the arena around `address`, if any; its stager sees it, too."""
    for arena in list(_arenas):
        if arena.address <= address < arena.address + arena.nbytes:
            arena.add_written()
