"""The thread of an `async_save`: it writes the staged items, votes, and ends the handle."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from torch_dcpx._answers import BOUND
from torch_dcpx.checkpoint import pending as pending_saves
from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.checkpoint.save_items import ItemsInWaves
from torch_dcpx.checkpoint.save_run import Committed, SaveRun
from torch_dcpx.errors import StagingError
from torch_dcpx.events import Operation
from torch_dcpx.reports import SaveReport
from torch_dcpx.writer.items import StagedItems, planned_bytes

logger = logging.getLogger("torch_dcpx")


class BackgroundSave:
    """The thread of one save."""

    def __init__(
        self,
        run: SaveRun,
        plan: SavePlan,
        items: StagedItems | ItemsInWaves,
        handle: SaveHandle,
        begin: float,
        operation: Operation,
    ) -> None:
        """Prepares the thread of a planned `run`; `begin` is the call's time, monotonic. Of the
        `operation` it tells the end, unless the caller withdraws the save.
        """
        self._waves = items if isinstance(items, ItemsInWaves) else None
        self._run = run
        self._work: list[tuple[SavePlan, Any]] = [(plan, items)]  # pop() decides who ends the save
        self._handle = handle
        self._begin = begin
        self._blocked_s: float | None = None  # until the caller goes on
        self._is_overlapped = not handle.guard.is_finished
        self._operation = operation
        self._is_own = False  # whether the end of the save is this thread's
        is_heard = operation.is_heard
        self._staged_bytes = sum(map(planned_bytes, plan.items)) if is_heard else 0

    def start(self) -> None:
        """Starts the thread. Raises StagingError: the system has no thread left."""
        # A daemon: the end of the interpreter waits for it up to DCPX_EXIT_TIMEOUT_S.
        thread = threading.Thread(target=self._make, name="dcpx-save", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise StagingError(f"start the thread that writes: {error}") from error
        pending_saves.add(self._handle, thread)

    def withdraw(self) -> bool:
        """Takes the save from the thread. Returns False if the thread has it, and will end it."""
        try:
            self._work.pop()
        except IndexError:
            return False
        self._handle.durable.is_collected = True  # nobody has the handle: the caller raises
        return True

    def wait_until_staged(self) -> None:
        """Waits until the caller's state may change, perhaps only behind the guard."""
        if self._waves is not None:
            with self._run.timeline.phase("snapshot"):
                self._waves.wait()
        self._blocked_s = time.monotonic() - self._begin
        if not self._is_overlapped:
            self._handle.staged.set_result(None)

    def _make(self) -> None:
        """Runs in the thread. The handle gets every error."""
        try:
            BOUND.set(self._run.exchange.storage)  # of this thread
            self._finish()
        except BaseException as error:  # noqa: BLE001  (the handle raises it)
            self._fail(error)
        if self._is_own:
            with contextlib.suppress(KeyboardInterrupt, SystemExit):  # of a callback; it is logged
                self._tell()
        del self  # else this frame of a kept error keeps the save, and its manager the root

    def _tell(self) -> None:
        durable: Future[Any] = self._handle.durable
        error = Future.exception(durable)  # nobody has read it by this
        if error is not None:
            self._operation.failed(error)
        else:
            report = Future.result(durable)
            self._operation.saved(report, report.write, self._staged_bytes)

    def _finish(self) -> None:
        run, handle = self._run, self._handle
        try:
            pending_saves.set_own(handle)
            committed = run.write_and_settle(self._take_work)
        finally:
            if self._waves is not None:
                self._waves.end()
        try:
            run.end()
        finally:
            # Waits for no `_blocked_s`: a caller whose signal handler drains waits for this result.
            handle.durable.set_result(report_of(run, committed, self._begin, self._blocked_s))

    def _fail(self, error: BaseException) -> None:
        handle = self._handle
        if handle.durable.done():
            logger.error("the save to '%s' is there; ending it: %r", handle.checkpoint_id, error)
            return
        with contextlib.suppress(IndexError):
            self._work.pop()
            self._is_own = True
        try:
            if self._waves is not None:
                self._waves.end()  # the caller waits for it
            self._run.end(error)
        finally:
            _forget_locals(error)
            if self._is_overlapped and not handle.staged.done():
                handle.staged.set_exception(error)
            handle.durable.set_exception(error)

    def _take_work(self) -> tuple[SavePlan, Any]:
        try:
            work = self._work.pop()
        except IndexError:
            raise StagingError("the call was interrupted before its save began") from None
        self._is_own = True
        if self._is_overlapped:
            with self._run.timeline.phase("snapshot"):
                self._handle.guard.finish()
            self._handle.staged.set_result(None)
        return work


def report_of(
    run: SaveRun, committed: Committed, begin: float, blocked_s: float | None = None
) -> SaveReport:
    """Returns the report of a save that ends now; with None its caller was blocked until now."""
    total_s = time.monotonic() - begin
    blocked_s = total_s if blocked_s is None else blocked_s
    written, timeline = run.writer.last_report, run.timeline
    path = str(run.writer.path)
    return SaveReport(path, *committed[:4], blocked_s, total_s, written, timeline=timeline)


def _forget_locals(error: BaseException) -> None:
    """Drops the locals of an error's frames, since a kept error would keep their memory."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            traceback.clear_frames(current.__traceback__)
            todo += current.__cause__, current.__context__
