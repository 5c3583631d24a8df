"""The handle of a save: may the state change, is the checkpoint there, what failed.

No error is lost: `pending` raises or logs those that nobody has read from the handle.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from torch_dcpx._arguments import check_callable, check_wait
from torch_dcpx._keywords import telling
from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import UnsupportedError
from torch_dcpx.reports import SaveReport
from torch_dcpx.tensors.copy_guard import CopyGuard

T = TypeVar("T")
# None only of a save that on_busy="skip" left out. Any lets type checkers pass a caller who never
# skips and does not look, and still check the names of a report.
Report: TypeAlias = SaveReport | Any

logger = logging.getLogger("torch_dcpx")


class SaveFuture(Future[T]):
    """A future of the save to a path. An exit in a callback keeps no other from its call."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """As `Future.add_done_callback`; logs what `fn` raises, exits and interrupts, too."""
        held = [fn]  # until its call: a future keeps its callbacks
        super().add_done_callback(lambda future: self._call(held.pop(), future))

    def _call(self, fn: Callable[[Future[T]], object], future: Future[T]) -> None:
        try:
            fn(future)
        except BaseException as error:
            logger.exception("a done callback of the save to '%s' failed", self._path)
            # On the save's thread an exit would keep later callbacks, and who awaits, from the end.
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and not isinstance(error, Exception):
                raise


class WatchedFuture(SaveFuture[T]):
    """A future that knows whether somebody has read its result. Belongs to one process."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
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
            del error  # its traceback holds this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `Future.exception`; UnsupportedError in a forked child."""
        self.check_process()
        check_wait("timeout", timeout)
        error = super().exception(timeout)
        self.is_collected = True  # not if the wait was interrupted, though the save may have ended
        return error

    @property
    def has_uncollected_error(self) -> bool:
        """Whether it has failed, and nobody has read the error."""
        return self.done() and not self.is_collected and super().exception() is not None

    def cancel(self) -> bool:
        """Returns False: only `SaveHandle.cancel` ends a save, on all ranks."""
        return False

    def check_process(self) -> None:
        """Raises UnsupportedError in a forked child of the process that saves."""
        if os.getpid() != self._pid:
            raise UnsupportedError(
                f"this save belongs to process {self._pid}, which process {os.getpid()} was forked "
                "from: only the parent can wait for it, or cancel it"
            )


class SaveHandle:
    """A save: under way in the background, or finished when the call that made it blocks.

    As a context manager it waits for the save at the end of the block, and raises its error unless
    the block has raised one. `await` waits for it in any asyncio loop, and returns as `result`.

    Attributes:
        checkpoint_id: its directory.
        staged: done when the state may change in any way: when `async_save` has returned, with
            `overlap=True` later, when the last copy is done. Or an earlier error.
        guard: makes streams wait for the copies that `overlap=True` leaves under way.
        durable: the SaveReport, once the checkpoint is committed and durable on every rank; None
            for a save that was skipped (`on_busy="skip"`). Or the error of any rank.
    """

    def __init__(
        self, checkpoint_id: str, cancel: Callable[[], bool], leave: Callable[[Deadline], None]
    ) -> None:
        self.checkpoint_id = checkpoint_id
        self.leave = leave  # called as the interpreter ends, with a deadline
        self.staged: Future[None] = SaveFuture(checkpoint_id)
        self.staged.set_running_or_notify_cancel()  # nobody but the save ends it
        self.guard = CopyGuard()
        self.durable: WatchedFuture[Report] = WatchedFuture(checkpoint_id)
        self._cancel = cancel
        self.durable.add_done_callback(lambda _: self._forget())

    def _forget(self) -> None:
        """Drops what the save needed: whoever keeps the handle keeps no writer, nor its manager."""
        self.leave, self._cancel = (lambda _: None), (lambda: False)

    @classmethod
    def finished(cls, checkpoint_id: str, report: SaveReport | None) -> SaveHandle:
        """Returns the handle of a save that has ended well; without a report it was skipped."""
        handle = cls(checkpoint_id, lambda: False, lambda _: None)
        handle.staged.set_result(None)
        handle.durable.set_result(report)
        return handle

    @telling
    def result(self, timeout: float | None = None) -> Report:
        """Waits until the checkpoint is there, and returns its report as `durable` does.

        Args:
            timeout: seconds; None (default) waits for the save's own deadlines.

        Raises:
            TimeoutError: the save is still under way.
            DcpxError: it failed on any rank; the previous checkpoint is as it was.
            OutcomeUnknownError: the coordinator was lost while it committed.
        """
        with self._builtin_timeout():
            return self.durable.result(timeout)

    @telling
    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits until the save has ended, and returns its error; None if it ended well.

        Args:
            timeout: seconds; None (default) waits for the save's own deadlines.

        Raises:
            TimeoutError: the save is still under way.
        """
        with self._builtin_timeout():
            return self.durable.exception(timeout)

    @contextmanager
    def _builtin_timeout(self) -> Iterator[None]:
        """Raises the `TimeoutError` of Python where 3.10 has another for futures."""
        try:
            yield
        except concurrent.futures.TimeoutError as error:
            if isinstance(error, TimeoutError) or self.durable.done():  # of the save itself
                raise
            raise TimeoutError("the save is still under way") from error

    @telling
    def add_done_callback(self, fn: Callable[[SaveHandle], object]) -> None:
        """Calls a function once the save has ended, well or not.

        The call comes from the thread that saves. If the save has ended already, it comes from
        this one, before this method returns. Functions are called in the order in which they were
        added. The end of the interpreter waits for them as for saves.

        Args:
            fn: gets this handle. Its errors are logged, and change nothing in the save.

        Raises:
            OptionError: `fn` is no function.
        """
        check_callable("fn", fn, or_none=False)
        self.durable.check_process()
        self.durable.add_done_callback(lambda _: fn(self))

    def __await__(self) -> Generator[Any, None, Report]:
        self.durable.check_process()
        future = asyncio.wrap_future(self.durable, loop=asyncio.get_running_loop())
        return (yield from future.__await__())

    def report(self) -> SaveReport | None:
        """Returns the report of a save that has ended well, else None."""
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
            True: `durable` raises on every rank, and nothing is committed. False: too late.
        """
        self.durable.check_process()
        return not self.durable.done() and self._cancel()

    def __repr__(self) -> str:
        return f"<SaveHandle of {self.checkpoint_id!r}: {self._state()}>"

    def _state(self) -> str:
        if not self.durable.done():
            return "writing" if self.staged.done() else "copying"
        error = Future.exception(self.durable)
        if error is not None:
            return f"failed, {type(error).__name__}: {error}"
        report = Future.result(self.durable)
        return "skipped" if report is None else f"saved, {report.summary()}"

    def __enter__(self) -> SaveHandle:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.result()
