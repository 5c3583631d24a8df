"""The handle of an `async_save`: may the state change, is the checkpoint there, what failed.

An error that nobody has looked at is not lost: `pending` knows which futures somebody has asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import UnsupportedError
from torch_dcpx.reports import SaveReport
from torch_dcpx.tensors.copy_guard import CopyGuard

T = TypeVar("T")


class WatchedFuture(Future[T]):
    """A future that knows whether somebody has looked at its end. Belongs to one process."""

    def __init__(self) -> None:
        super().__init__()
        self.is_collected = False
        self._pid = os.getpid()

    def result(self, timeout: float | None = None) -> T:
        """As `Future.result`; UnsupportedError in a forked child."""
        error = self.exception(timeout)
        try:
            if error is not None:
                raise error
            return super().result(0)
        finally:
            del error  # whose traceback holds this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `Future.exception`; UnsupportedError in a forked child."""
        self.check_process()
        error = super().exception(timeout)
        self.is_collected = True  # not where the wait ended otherwise, as the save ended just then
        return error

    def cancel(self) -> bool:
        """Returns False: `SaveHandle.cancel` ends a save, with all ranks; its future does not."""
        return False

    def check_process(self) -> None:
        """Raises UnsupportedError if the save belongs to the parent of this forked process."""
        if os.getpid() != self._pid:
            raise UnsupportedError(
                f"this save belongs to process {self._pid}, which process {os.getpid()} was forked "
                "from: only the parent can wait for it, or cancel it"
            )


class SaveHandle:
    """A save that goes on in the background.

    As a context manager, the end of the block waits for the save and raises its error, unless the
    block raised already.

    Attributes:
        checkpoint_id: its directory.
        staged: done when the state may change in any way: when `async_save` has returned, with
            `overlap=True` later, when the last copy is done. Or the error that came before.
        guard: lets streams go on behind the copies that `overlap=True` leaves under way.
        durable: the SaveReport, once the checkpoint is committed and durable on every rank; None
            for a save that was skipped (`on_busy="skip"`). Or the error of any rank.
    """

    def __init__(
        self, checkpoint_id: str, cancel: Callable[[], bool], leave: Callable[[Deadline], None]
    ) -> None:
        self.checkpoint_id = checkpoint_id
        self.leave = leave  # called as the interpreter ends, with a deadline
        self.staged: Future[None] = Future()
        self.staged.set_running_or_notify_cancel()  # nobody but the save ends it
        self.guard = CopyGuard()
        self.durable: WatchedFuture[SaveReport | None] = WatchedFuture()
        self._cancel = cancel

    def result(self, timeout: float | None = None) -> SaveReport | None:
        """Waits until the checkpoint is there.

        Args:
            timeout: seconds; None (default) waits for the save's own deadlines.

        Raises:
            TimeoutError: it is still under way.
            DcpxError: it failed, on this rank or another; the previous checkpoint is as it was.
            OutcomeUnknownError: the coordinator was lost, and nobody can say.
        """
        return self.durable.result(timeout)

    def report(self) -> SaveReport | None:
        """Returns the report of a save that ended well; None if it goes on, or failed."""
        self.durable.check_process()
        if not self.durable.done() or Future.exception(self.durable) is not None:
            return None
        return Future.result(self.durable)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.durable.done()

    def cancel(self) -> bool:
        """Stops the save on every rank, unless the coordinator has begun to commit it.

        Returns:
            True: it will not be committed, and `durable` raises on every rank. False: too late.
        """
        self.durable.check_process()
        return not self.durable.done() and self._cancel()

    def __enter__(self) -> SaveHandle:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.result()
