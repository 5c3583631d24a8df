"""Lets no thread wait for long to log a line, for others wait for that thread.

A signal's handler may interrupt the main thread where it holds the lock of a handler of logging,
and wait there for a save or a removal. A thread of those would wait for that lock.
"""

from __future__ import annotations

import contextvars
import logging
import threading

_PATIENCE_S = 1.0  # then a line comes late, perhaps behind later ones


class _Line(threading.Thread):
    """Hands one record to the handlers."""

    late: threading.Thread | None = None  # the last one that took too long

    def __init__(self, logger: logging.Logger, record: logging.LogRecord) -> None:
        run = contextvars.copy_context().run  # a handler may look at what is traced
        super().__init__(target=run, args=(logger.handle, record), name="dcpx-log", daemon=True)

    def make(self) -> None:
        """Waits for the handlers, but for no long time. Raises RuntimeError: no thread is left."""
        self.start()
        late = _Line.late
        self.join(0.0 if late is not None and late.is_alive() else _PATIENCE_S)
        if self.is_alive():
            _Line.late = self


def log_apart(logger: logging.Logger) -> None:
    """Makes threads but the main one log by a thread of each line, which nobody waits for."""

    def is_handled_here(record: logging.LogRecord) -> bool:
        thread = threading.current_thread()
        if thread is threading.main_thread() or isinstance(thread, _Line):
            return True
        try:
            _Line(logger, record).make()
        except RuntimeError:
            return True
        return False

    logger.addFilter(is_handled_here)
