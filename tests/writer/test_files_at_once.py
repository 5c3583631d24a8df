"""WriteJob writes to a few files in turn, and holds no more of them open than it says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from support.engine_jobs import SLOT_BYTES, scratch, write

from torch_dcpx import _C, StorageError

SEGMENTS = 2  # of each file


ITEMS = [torch.full((SEGMENTS * SLOT_BYTES,), number, dtype=torch.uint8) for number in range(6)]


def open_files(directory: Path) -> int:
    """Returns how many files beneath `directory` this process has open."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # of the listing itself
    return sum(link.startswith(f"{directory}/") for link in links)


def open_when_call_fails(nth: int, workers: int, files_at_once: int) -> int | None:
    """Returns how many files were open when the nth call failed; None when there was none."""
    with scratch() as directory:
        _C.arm_fault(nth, errno.EIO)
        try:
            write(
                directory, ITEMS, files=len(ITEMS), workers=workers, use_direct=False,
                files_at_once=files_at_once,
            )  # fmt: skip
        except StorageError:
            return open_files(directory)  # the traceback keeps the job
        finally:
            _C.disarm_fault()
    return None


@pytest.mark.parametrize(("workers", "files_at_once"), [(1, 1), (1, 3), (3, 1), (2, 4), (2, 99)])
def test_no_more_files_are_open_than_workers_and_files_at_once(
    workers: int, files_at_once: int
) -> None:
    found = []
    for nth in range(200):
        count = open_when_call_fails(nth, workers, files_at_once)
        if count is None:
            break
        found.append(count)
    assert len(found) > 6 * SEGMENTS
    assert max(found) <= min(6, workers + files_at_once)
    assert max(found) >= min(6, files_at_once)
