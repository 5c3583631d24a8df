"""One rank's files: windows of rows through one WriteJob.

A save without temporaries (tensors on the host or on a CUDA device, with stock's planner hooks) is
one window, and one call to C++. Bytes items, copies that torch makes from other devices, and data
that a user's planner makes on the fly count against a budget: when it is used up, the window is
written and its temporaries are dropped.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple, TypeAlias

from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torch_dcpx._gc import paused_gc
from torch_dcpx._native import _C
from torch_dcpx.options import WriteOptions
from torch_dcpx.reports import WriteReport
from torch_dcpx.storage.names import FileEntry, data_file_names
from torch_dcpx.storage.place import Place
from torch_dcpx.tensors import device as device_memory
from torch_dcpx.timelines import Timeline
from torch_dcpx.writer.items import Split, planned_bytes
from torch_dcpx.writer.progress import WriteProgress
from torch_dcpx.writer.rows import WriteRow, stored_bytes, write_results
from torch_dcpx.writer.table import WriteTable

# Counters of `WriteJob.report` that a report has under the same names.
_REPORTED = ("direct_bytes", "buffered_bytes", "in_place_bytes", "slot_bytes")


class Written(NamedTuple):
    """The outcome of `write_files`."""

    results: list[WriteResult]  # one per item, in their order
    files: list[FileEntry]
    counters: dict[str, int]  # of `WriteJob.report`
    payload_bytes: int
    timeline: Timeline

    def report(self, workers: int, total_s: float) -> WriteReport:
        """Returns the report of a written, uncommitted save; `total_s` in its hooks so far."""
        counters, files = self.counters, self.files
        engine_s = counters["engine_ns"] / 1e9
        fsync_s = min(engine_s, counters["fsync_ns"] / 1e9 / max(1, min(workers, len(files))))
        busy_ns = counters["copy_ns"] + counters["write_ns"]
        copy_s = (engine_s - fsync_s) * counters["copy_ns"] / max(1, busy_ns)
        return WriteReport(
            items=len(self.results),
            files=len(files),
            file_bytes=sum(file.nbytes for file in files),
            payload_bytes=self.payload_bytes,
            **{name: counters[name] for name in _REPORTED},
            prepare_s=total_s - engine_s,
            copy_s=copy_s,
            write_s=engine_s - fsync_s - copy_s,
            fsync_s=fsync_s,
            commit_s=0.0,
            total_s=total_s,
            timeline=self.timeline,
        )


def write_files(
    place: Place,
    split: Split,
    table: WriteTable,
    options: WriteOptions,
    progress: WriteProgress,
    timeline: Timeline,
    *,
    prefix: str,
    rank: int,
    save_id: bytes,
    window_bytes: int,
) -> Written:
    """Writes a split plan to new files of a place, durably if `options` say so.

    Args:
        prefix: DCP's storage prefix of the rank, `__{rank}_`.
        rank, save_id: for the footers. timeline: gets the workers' spans.
        window_bytes: bound on temporaries alive at one time.

    Raises:
        StorageError: a write failed; the new files are removed.
        StagingError: likewise for a copy from a device.
    """
    timeline.operation_id = save_id.hex()
    is_fresh = place.is_fresh()
    job = place.write_job(options)
    first_names = []
    for index in range(split.files[-1] + 1 if split.files else 0):
        file_id = secrets.token_bytes(16)
        names = data_file_names(prefix, index, file_id, is_fresh=is_fresh)
        job.add_file(list(names), file_id, rank, save_id)
        first_names.append(names[0])
    planned = [0] * len(first_names)
    for item, file in zip(*split, strict=True):
        planned[file] += planned_bytes(item)
    try:
        progress.start()
        progress.is_ahead = place.is_object

        def poll() -> None:
            progress.poll(job.report()["done_bytes"])

        with place.writing(job, first_names, planned, options, poll, timeline) as more:
            placed = _write_windows(job, split, table, progress, window_bytes)
        files = [FileEntry(*row, save_id) for row in job.results()]
        paths = [files[file].path for file in split.files]
        with paused_gc():
            results = write_results(split.items, paths, *placed, table.descriptors)
        progress.finish()
        timeline.add_spans(counters := job.report(spans=True))
        for name, value in more.items():
            counters[name] += value
        return Written(results, files, counters, progress.done_bytes, timeline)
    except BaseException:
        job.abandon()  # a traceback may keep the job alive, and with it the space of its files
        # The names of objects are nobody else's, whether they are there or not.
        place.remove_leftovers(first_names if place.is_object else job.created())
        timeline.add_spans(job.report(spans=True))
        raise


_MAX_ROWS = 32_768  # of one call: C++ takes about 0.6 KB for each

Placed: TypeAlias = tuple[list[int], list[int]]  # offset and bytes of every item, in their order


class _Window:
    """Rows of one call to C++, with the tensors and bytes they point to."""

    def __init__(
        self, job: _C.WriteJob, table: WriteTable, progress: WriteProgress, budget_bytes: int
    ) -> None:
        self.placed: Placed = [], []
        self.in_place: object = None  # owners of memory that rows of `add_row` point to
        self._job = job
        self._table = table
        self._progress = progress
        self._budget_bytes = budget_bytes
        self._made_ratio = 1.0  # bytes that the planner made to bytes planned: the most so far
        self._rows: list[WriteRow] = []
        self._owners: list[object] = []
        self._temporary: list[int] = []  # numbers of rows whose memory goes with the window
        self._used_bytes = 0

    def add_row(self, row: WriteRow) -> None:
        """Adds a row of an item that needs no memory of its own."""
        if len(self._rows) >= _MAX_ROWS:
            self.flush(is_final=False)
        self._rows.append(row)

    def add(self, item: WriteItem, file: int) -> None:
        """Adds an item; writes the rows so far first where both exceed the budget."""
        makes_temporaries = not self._table.gives_state_as_it_is
        announced_bytes = planned_bytes(item) if makes_temporaries else 0
        self._make_room(math.ceil(announced_bytes * self._made_ratio))
        resolved = self._table.resolve(item, file)
        # A user's planner may make any tensor on the fly: each counts as if it did.
        cost = resolved.row.payload_bytes if makes_temporaries else resolved.temporary_bytes
        if announced_bytes:
            self._made_ratio = max(self._made_ratio, cost / announced_bytes)
        self._make_room(cost)
        self._temporary.append(len(self._rows))
        self._rows.append(resolved.row)
        self._owners.append(resolved.owner)
        self._used_bytes += cost

    def _make_room(self, nbytes: int) -> None:
        if self._rows and nbytes and self._used_bytes + nbytes > self._budget_bytes:
            self.flush(is_final=False)

    def flush(self, *, is_final: bool) -> None:
        """Writes the rows and drops what they point to."""
        # At each call: a device may still compute what a planner has just made.
        devices = {row.device for row in self._rows if row.device >= 0}
        after = device_memory.source_events(devices)
        with self._progress.window(list(map(stored_bytes, self._rows))) as tell:
            try:
                offsets, lengths = self._job.write(
                    self._rows,
                    self._table.types,
                    is_final=is_final,
                    progress=tell,
                    after=after,
                    temporary=self._temporary,
                    owners=(self._owners, self.in_place),
                )
            except BaseException:
                if after is not None:  # the caller may free what a device still reads
                    device_memory.keep_while_copied((self._owners, self.in_place))
                raise
        if after is not None:
            device_memory.log_warning()
        self.placed[0].extend(offsets)
        self.placed[1].extend(lengths)
        self._rows, self._owners, self._temporary, self._used_bytes = [], [], [], 0


def _write_windows(
    job: _C.WriteJob, split: Split, table: WriteTable, progress: WriteProgress, window_bytes: int
) -> Placed:
    window = _Window(job, table, progress, window_bytes)
    rows: Iterable[WriteRow | None] = repeat(None, len(split.items))
    if table.gives_state_as_it_is:
        # First all that needs no memory: it is refused, if at all, before the first byte is
        # written. The rows point into the state; their tensors live as long as `in_place` does.
        with paused_gc():
            rows, window.in_place = table.resolve_in_place(*split)
    for item, file, row in zip(*split, rows, strict=True):
        if row is not None:
            window.add_row(row)
        else:
            window.add(item, file)
    window.flush(is_final=True)
    return window.placed
