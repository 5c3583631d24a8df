"""WriteJob writes to a few files in turn, and holds no more of them open than it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from engine_jobs import SLOT_BYTES, open_directory, write_row

from torch_dcpx import _C, StorageError
from torch_dcpx._compat import framing_of

SEGMENTS = 5  # of each file


ITEMS = [torch.full((SEGMENTS * SLOT_BYTES,), number, dtype=torch.uint8) for number in range(8)]


def open_files(directory: Path) -> int:
    """Returns how many files beneath `directory` this process has open."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # of the listing itself
    return sum(link.startswith(f"{directory}/") for link in links)


def open_when_call_fails(directory: Path, nth: int, workers: int, files_at_once: int) -> int | None:
    """Returns how many files were open when the nth call failed; None when there was none."""
    with open_directory(directory) as fd:
        job = _C.WriteJob(
            dir_fd=fd, dir_path=str(directory), workers=workers, segment_bytes=SLOT_BYTES,
            use_direct=False, is_durable=True, files_at_once=files_at_once,
        )  # fmt: skip
    for number in range(len(ITEMS)):
        job.add_file([f"__{nth}_{number}.distcp"], bytes(16), 0)
    rows = [write_row(item, number, 0, "x") for number, item in enumerate(ITEMS)]
    _C.arm_fault(nth, 5)
    try:
        job.write(rows, [framing_of(torch.uint8)], is_final=True)
    except StorageError:
        return open_files(directory)
    finally:
        _C.disarm_fault()
        job.abandon()
    return None


@pytest.mark.parametrize(("workers", "files_at_once"), [(1, 1), (1, 3), (3, 1), (2, 4), (2, 99)])
def test_no_more_files_are_open_than_workers_and_files_at_once(
    tmp_path: Path, workers: int, files_at_once: int
) -> None:
    found = []
    for nth in range(200):
        count = open_when_call_fails(tmp_path, nth, workers, files_at_once)
        if count is None:
            break
        found.append(count)
    assert len(found) > 8 * SEGMENTS
    assert max(found) <= min(8, workers + files_at_once)
    assert max(found) >= min(8, files_at_once)
