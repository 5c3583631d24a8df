"""One rank's files: windows of rows through one WriteJob.

Where nothing is made for the save alone (CPU tensors with stock's planner hooks) there is one
window, and one call to C++. Bytes items, device tensors and what a user's planner makes on the fly
count against a budget: when it is used up, the window is written and its temporaries are dropped.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from torch_dcpx import _C
from torch_dcpx.directory import Directory
from torch_dcpx.errors import StorageError
from torch_dcpx.layout import FileEntry, data_file_names
from torch_dcpx.options import WriteOptions
from torch_dcpx.write_table import Resolved, WriteTable

__all__ = ["Written", "write_files"]

logger = logging.getLogger("torch_dcpx")

_HOOKS = ("resolve_data", "lookup_object", "transform_object")


class Written(NamedTuple):
    """What was written: (item, file name, offset, length in bytes) per item, and the files."""

    items: list[tuple[WriteItem, str, int, int]]
    files: list[FileEntry]
    counters: dict[str, int]


def has_stock_hooks(planner: SavePlanner) -> bool:
    """Returns whether the planner hands out the state's own tensors, never temporaries."""
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(type(planner), name) is getattr(DefaultSavePlanner, name)
        and name not in vars(planner)
        for name in _HOOKS
    )


def write_files(
    directory: Directory,
    items: Sequence[WriteItem],
    table: WriteTable,
    options: WriteOptions,
    *,
    prefix: str,
    rank: int,
    is_fresh: bool,
    is_one_file: bool,
    window_bytes: int,
) -> Written:
    """Writes `items` to new files beneath `directory`, fsynced with it if `options` say so.

    Args:
        prefix: DCP's storage prefix of the rank, `__{rank}_`.
        rank: noted in the footers.
        is_fresh: the directory holds no metadata, so stock's file names may be used.
        is_one_file: one file for all items, else one each.
        window_bytes: bound on temporaries alive at one time.

    Raises:
        StorageError: a write failed; the files made here are removed.
    """
    job = _C.WriteJob(
        dir_fd=directory.fd,
        dir_path=os.fsencode(directory.path),
        workers=options.resolved_workers(),
        segment_bytes=options.slot_bytes,
        use_direct=options.direct_io,
        is_durable=options.durability == "full",
    )
    for index in range(1 if is_one_file else len(items)):
        file_id = secrets.token_bytes(16)
        names = data_file_names(prefix, index, file_id, is_fresh=is_fresh)
        job.add_file(list(names), file_id, rank)
    try:
        placed = _write_windows(job, items, table, is_one_file, window_bytes)
        if items and options.durability == "full":
            directory.sync()
    except BaseException:
        _remove_created(directory, job)
        raise
    files = [FileEntry(*row) for row in job.results()] if items else []
    located = [
        (item, files[0 if is_one_file else number].path, offset, nbytes)
        for number, (item, (offset, nbytes)) in enumerate(zip(items, placed, strict=True))
    ]
    return Written(located, files, job.report())


def _write_windows(
    job: _C.WriteJob,
    items: Sequence[WriteItem],
    table: WriteTable,
    is_one_file: bool,
    window_bytes: int,
) -> list[tuple[int, int]]:
    makes_temporaries = not has_stock_hooks(table.planner)
    # All that needs no memory comes first: what cannot be kept is refused before the first byte.
    in_place: list[Resolved | None] = [None] * len(items)
    if not makes_temporaries:
        in_place = [
            table.resolve_in_place(item, 0 if is_one_file else number)
            for number, item in enumerate(items)
        ]
    placed: list[tuple[int, int]] = []
    window: list[Resolved] = []
    used = 0
    for number, item in enumerate(items):
        resolved = in_place[number] or table.resolve(item, 0 if is_one_file else number)
        # A user's planner may make its tensors on the fly: each counts as if it did.
        cost = resolved.row.payload_bytes if makes_temporaries else resolved.temporary_bytes
        if window and cost and used + cost > window_bytes:
            placed += job.write([entry.row for entry in window], table.framings, is_final=False)
            window, used = [], 0
        window.append(resolved)
        used += cost
    placed += job.write([entry.row for entry in window], table.framings, is_final=True)
    return placed


def _remove_created(directory: Directory, job: _C.WriteJob) -> None:
    """Removes what a failed save made here: no metadata names it, nobody else can."""
    job.abandon()  # a traceback may keep the job alive, and with it the space of its files
    for name in job.created():
        try:
            directory.unlink(name)
        except StorageError as error:
            logger.warning("leftover of a failed save stays: %s", error)
