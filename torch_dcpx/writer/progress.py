"""Reports the progress of a save: `WriteOptions.progress`, in bytes, while C++ writes."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_dcpx.options import ProgressFunction

logger = logging.getLogger("torch_dcpx")


class WriteProgress:
    """Counts the payload bytes of one rank's save, window by window. Not thread-safe.

    `report` gets (0, total) before the first byte, then ascending counts below the total, and
    (total, total) once, when all is durable. The total is the sum of the bytes `planned` for each
    item, in their order. Each window corrects it by the items' real bytes (bytes items, tensors
    that torch serialises, a planner that changes them). An exception of `report` fails the save.
    """

    def __init__(self, report: ProgressFunction | None, planned: Sequence[int]) -> None:
        self.done_bytes = 0  # payload of all written windows
        self.is_ahead = False  # a window's end does not say that it is stored
        self._report = report
        self._planned = planned
        self._total_bytes = sum(planned)
        self._count = 0  # items in the windows so far
        self._told_bytes = 0

    def poll(self, done_bytes: int) -> None:
        """As `tell`; raises if the save is to end, also where there is nothing to report."""
        self.tell(done_bytes)
        look = getattr(self._report, "poll", None)
        if look is not None:
            look()

    def start(self) -> None:
        """Reports that nothing is written yet."""
        if self._report is not None:
            self._report(0, self._total_bytes)

    @contextmanager
    def window(self, payload_bytes: Sequence[int]) -> Iterator[Callable[[int], None] | None]:
        """Gives the function for `WriteJob.write` of the next items; None where nobody listens."""
        begin, nbytes = self._count, sum(payload_bytes)
        self._count += len(payload_bytes)
        self._total_bytes += nbytes - sum(self._planned[begin : self._count])

        def tell(done_bytes: int) -> None:  # bytes of all calls
            self.tell(min(done_bytes, self.done_bytes + nbytes))

        yield tell if self._report is not None else None
        self.done_bytes += nbytes
        if not self.is_ahead:
            self.tell(self.done_bytes)

    def finish(self) -> None:
        """Reports that everything is written."""
        if self._report is not None:
            self._report(self._total_bytes, self._total_bytes)

    def tell(self, done_bytes: int) -> None:
        """Reports that so much is stored, if that is more than before."""
        if self._report is not None and self._told_bytes < done_bytes < self._total_bytes:
            self._told_bytes = done_bytes
            self._report(done_bytes, self._total_bytes)


@contextmanager
def reporting(
    option: bool | ProgressFunction, path: str, *, is_coordinator: bool
) -> Iterator[ProgressFunction | None]:
    """Gives the callable of `WriteOptions.progress`; for True, that of a bar on the coordinator's
    terminal, which stands behind the name of `path` while the block runs.
    """
    if callable(option):
        yield option
        return
    bar_type = _bar_type() if option and is_coordinator and _is_terminal() else None
    if bar_type is None:
        yield None
        return
    with bar_type(
        desc=Path(path).name,
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        file=_Terminal(sys.stderr),
    ) as bar:

        def show(done_bytes: int, total_bytes: int) -> None:
            bar.total = total_bytes
            bar.update(done_bytes - bar.n)
            bar.refresh()

        yield show


class _Terminal:
    """A stream whose first error is logged and ends it: a closed terminal fails no save."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        self._try(self._stream.write, text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, function: Callable[..., object], *args: str) -> None:
        try:
            if not self._is_lost:
                function(*args)
        except (OSError, ValueError) as error:  # gone, closed, or of another encoding
            self._is_lost = True
            logger.warning("the progress bar has ended: %s", str(error))


def _is_terminal() -> bool:
    """Whether stderr is one; a stand-in of it may be closed, or have no `isatty`."""
    isatty = getattr(sys.stderr, "isatty", None)
    return isatty is not None and not getattr(sys.stderr, "closed", False) and bool(isatty())


def _bar_type() -> Any:
    """Returns tqdm's class without its thread, which would outlive the save; None without tqdm."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        logger.info("progress=True shows no bar: tqdm is not installed")
        return None
    return type("Bar", (tqdm,), {"monitor_interval": 0})
