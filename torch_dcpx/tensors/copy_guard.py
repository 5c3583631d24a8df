"""Orders changes of a state behind the copies of device memory that go on after `async_save`.

With `overlap=True` a save returns once its copies are queued on the devices. A guard lets the
caller's streams go on only behind them, without stopping the host. A hook guards the memory that
an optimizer's step overwrites.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

from torch_dcpx._native import _C
from torch_dcpx.errors import StagingError, UnsupportedError, must_be
from torch_dcpx.tensors import device as device_memory

_TIMEOUT_S = 1800.0
_MAX_PAUSE_S = 0.001

# Each access is one step of the interpreter. A lock could deadlock: its holder may run a signal
# handler that waits for another thread, which needs the lock.
_pending: dict[int, weakref.ref[CopyGuard]] = {}
_numbers = itertools.count()

os.register_at_fork(after_in_child=_pending.clear)  # they go on in the parent


class CopyGuard:
    """The copies of one save that may go on after its call. Thread-safe.

    It keeps the tensors until they are copied. Nothing goes on without `overlap=True`, nor of a
    state in host memory.
    """

    def __init__(self, copies: _C.StagedCopies | None = None, devices: Sequence[int] = ()) -> None:
        """Guards `copies` from the devices of these ordinals. Default: nothing goes on."""
        self._copies = copies
        self._devices = tuple(devices)
        self._error: StagingError | None = None
        self._number = number = next(_numbers)
        if copies is not None:
            pending = _pending  # at the end of the process this module's name for it may be None
            pending[number] = weakref.ref(self, lambda _: pending.pop(number, None))

    @property
    def is_done(self) -> bool:
        """Whether the copies have ended, so that the state may change in any way."""
        copies = self._copies
        return copies is None or copies.is_done

    @property
    def is_finished(self) -> bool:
        """Whether `finish` has nothing to do: nothing goes on, or it has ended."""
        return self._copies is None and self._error is None

    def wait(self) -> None:
        """Makes this thread's current streams run all later work after the copies.

        The host does not wait. From here on these streams, and others that wait for them, may
        overwrite the devices' memory. To resize or free it by hand, wait until `is_done`. A CUDA
        graph that overwrites it runs no hook: call this before each `replay`.

        Raises:
            StagingError: a current stream is capturing a graph; a forked child.
        """
        copies = self._copies
        if copies is not None:
            copies.hold_back([(d, device_memory.current_stream(d)) for d in self._devices])

    def finish(self) -> None:
        """Waits on the host until all is copied, and lets go of the tensors.

        A reader of the copies calls it first.

        Raises:
            StagingError: a copy failed, so that there is nothing to save; a forked child.
        """
        copies = self._copies
        if copies is not None:
            try:
                _wait(copies)
            except StagingError as error:
                self._error = error.with_traceback(None)  # whose frames hold the copies
            finally:
                if copies.is_done:
                    self._copies = None
                    _pending.pop(self._number, None)
                del copies
        if self._error is not None:
            raise self._error


def _wait(copies: _C.StagedCopies) -> None:
    """Waits in Python, where the end of the interpreter can end a daemon thread."""
    end, pause_s = time.monotonic() + _TIMEOUT_S, 0.00002
    while not copies.is_done and time.monotonic() < end:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
    copies.wait(0.0)  # raises the failure


def wait_for_copies() -> None:
    """Calls `CopyGuard.wait` of every save under way."""
    for ref in list(_pending.values()):
        guard = ref()
        if guard is not None:
            guard.wait()


def guard_optimizer(optimizer: Any) -> Any:
    """Makes each step of an optimizer run after the copies of saves with `overlap=True`.

    Call it once for an optimizer: its hook looks for saves under way, and costs nothing without
    one. All other writes to saved tensors must come after `handle.guard.wait()`: buffers that a
    forward pass updates, averages of weights, each `replay` of a CUDA graph, which runs no hook.

    Args:
        optimizer: a `torch.optim.Optimizer`.

    Returns:
        The hook's handle, whose `remove()` takes it away.

    Raises:
        UnsupportedError: an optimizer without hooks before its step.
        OptionError: no optimizer.
    """
    register = getattr(optimizer, "register_step_pre_hook", None)
    if register is None or isinstance(optimizer, type):
        if isinstance(optimizer, type) or not callable(getattr(optimizer, "step", None)):
            raise must_be("optimizer", optimizer, "a torch.optim.Optimizer")
        raise UnsupportedError(
            f"optimizer={type(optimizer).__name__} has no register_step_pre_hook; call "
            "`handle.guard.wait()` of a save before each step that follows it"
        )
    return register(lambda *_: wait_for_copies())
