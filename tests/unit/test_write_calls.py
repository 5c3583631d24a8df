"""How WriteJob writes: its system calls one by one, its memory, its report, its progress."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_jobs import SLOT_BYTES, item_type, open_directory, scratch, write, write_row

from torch_dcpx import _C


def test_small_items_are_packed_and_every_call_writes_a_full_segment(tmp_path: Path) -> None:
    items = [torch.full((65536,), i % 251, dtype=torch.uint8) for i in range(1000)]
    before = _C.call_counts()
    saved = write(tmp_path, items, segment_bytes=1 << 20, workers=2, is_durable=True)
    calls = {name: n - before[name] for name, n in _C.call_counts().items()}
    item_bytes = -(-saved.wanted[0][2] // 64) * 64
    per_segment = (1 << 20) // item_bytes
    footer_bytes = saved.files[0][2] - -(-saved.data_bytes(0) // 4096) * 4096
    assert per_segment == 15
    assert calls["pwrite"] == -(-1000 // per_segment) + -(-footer_bytes // (1 << 20))
    assert (calls["fallocate"], calls["fsync"], calls["close"]) == (1, 1, 1)
    report = saved.report
    assert (calls["sync_file_range"] > 0) == (report["buffered_bytes"] > 0)
    assert report["direct_bytes"] + report["buffered_bytes"] == saved.files[0][2]
    assert report["in_place_bytes"] == 0
    assert report["slot_bytes"] == 2 * (-(-per_segment * item_bytes // 4096) * 4096)
    assert report["done_bytes"] == report["total_bytes"] == 1000 * 65536
    assert report["engine_ns"] > 0


def test_item_that_fills_a_segment_is_written_from_where_it_lies(tmp_path: Path) -> None:
    for numel, is_packed in [((15 << 16) - 1, True), (15 << 16, False)]:
        with scratch() as directory:
            tensor = torch.arange(numel, dtype=torch.int64).to(torch.uint8)
            report = write(directory, [tensor], segment_bytes=1 << 20).report
            if is_packed:
                assert report["in_place_bytes"] == 0
            else:
                assert report["in_place_bytes"] >= numel - 2 * 4096


def test_slots_are_no_larger_than_what_passes_through_them(tmp_path: Path) -> None:
    saved = write(tmp_path, [torch.zeros(3), b"x"], segment_bytes=1 << 20)
    assert saved.report["slot_bytes"] == 4096


@pytest.mark.parametrize("files", [1, 2])
def test_files_through_the_page_cache_are_written_back_before_the_fsync(
    tmp_path: Path, files: int
) -> None:
    tensor = torch.arange(32 << 18, dtype=torch.int32)  # 32 MiB
    before = _C.call_counts()
    saved = write(tmp_path, [tensor] * files, files=files, files_at_once=files, workers=1,
                  segment_bytes=1 << 20, use_direct=False, is_durable=True)  # fmt: skip
    calls = {name: n - before[name] for name, n in _C.call_counts().items()}
    assert saved.report["buffered_bytes"] == sum(file[2] for file in saved.files)
    # Every write starts one; those more than 8 MiB behind in their file are waited for.
    waits = calls["sync_file_range"] - calls["pwrite"]
    assert 24 * files <= waits <= calls["pwrite"] - 7 * files
    before = _C.call_counts()
    with scratch() as directory:
        write(directory, [tensor], use_direct=False, is_durable=False)
    assert _C.call_counts()["sync_file_range"] == before["sync_file_range"]


def test_progress_is_told_and_what_it_raises_cancels_the_job(
    tmp_path: Path, no_leaks: None
) -> None:
    slow = torch.zeros(1, dtype=torch.uint8).expand(1 << 30)  # gathered byte by byte
    told: list[int] = []

    def progress(done_bytes: int) -> None:
        told.append(done_bytes)
        if len(told) == 2:
            raise KeyboardInterrupt

    with open_directory(tmp_path) as fd:
        job = _C.WriteJob(
            dir_fd=fd, dir_path=str(tmp_path), workers=1, segment_bytes=SLOT_BYTES,
            use_direct=True, is_durable=True,
        )  # fmt: skip
    job.add_file(["a"], bytes(16), 0)
    row = write_row(slow, 0, 0, "slow")
    with pytest.raises(KeyboardInterrupt):
        job.write([row], [item_type(torch.uint8)], is_final=True, progress=progress)
    assert 0 < told[0] <= told[1] <= job.report()["done_bytes"] < 1 << 30
    assert job.report()["total_bytes"] == 1 << 30
    job.abandon()
