"""How WriteJob writes: its system calls one by one, its memory, its report, its progress."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest
import torch
from support.engine_jobs import SLOT_BYTES, item_type, open_directory, scratch, write, write_row

from torch_dcpx import _C
from torch_dcpx.errors import PlanError, StorageError

LIBC = ctypes.CDLL(None, use_errno=True)
MADV_HUGEPAGE, MADV_NOHUGEPAGE = 14, 15
HUGE_PAGE_BYTES = 2 << 20


def advised(nbytes: int, advice: int) -> torch.Tensor:
    """Returns private memory that was advised before it was filled; it begins within a page."""
    memory = mmap.mmap(-1, nbytes + 64, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes + 64), advice) == 0
    tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=64, count=nbytes)
    return tensor.copy_(torch.arange(nbytes, dtype=torch.int64))


def huge_page_bytes() -> int:
    """Returns how much memory of this process lies on anonymous huge pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def tells_huge_pages() -> bool:
    """Whether this kernel is one that says what lies on huge pages: Linux 6.7 and later."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int(minor)) >= (6, 7)


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
            report = write(directory, [tensor], segment_bytes=1 << 20, in_place="always").report
            if is_packed:
                assert report["in_place_bytes"] == 0
            else:
                assert report["in_place_bytes"] >= numel - 2 * 4096
                assert report["copy_ns"] < report["write_ns"]  # 8 KiB of 960


def test_large_item_is_written_in_place_where_it_lies_on_huge_pages(tmp_path: Path) -> None:
    before = huge_page_bytes()
    on_huge = advised(16 * HUGE_PAGE_BYTES, MADV_HUGEPAGE)
    has_huge = huge_page_bytes() - before >= 15 * HUGE_PAGE_BYTES
    on_small = advised(16 * HUGE_PAGE_BYTES, MADV_NOHUGEPAGE)
    for tensor, is_huge in [(on_huge, has_huge), (on_small, False)]:
        for in_place in ("auto", "always", "never"):
            with scratch() as directory:
                report = write(directory, [tensor], segment_bytes=1 << 20, in_place=in_place).report
            is_in_place = in_place == "always" or (
                in_place == "auto" and is_huge and tells_huge_pages()
            )
            if is_in_place:
                assert report["in_place_bytes"] >= tensor.nbytes - 2 * 4096
            else:
                assert (report["in_place_bytes"], report["slot_bytes"]) == (0, 4 << 20)


def test_item_of_small_pages_is_written_in_place_through_the_page_cache(tmp_path: Path) -> None:
    tensor = advised(4 << 20, MADV_NOHUGEPAGE)
    saved = write(tmp_path, [tensor], segment_bytes=1 << 20, use_direct=False)
    assert saved.report["in_place_bytes"] >= tensor.nbytes - 2 * 4096


def test_payload_that_passes_through_slots_begins_on_a_page(tmp_path: Path) -> None:
    tensor = advised(4 << 20, MADV_NOHUGEPAGE)
    for in_place, phase in [("never", 0), ("always", tensor.data_ptr() % 4096)]:
        with scratch() as directory:
            saved = write(directory, [b"x", tensor], segment_bytes=1 << 20, in_place=in_place)
            (path,) = directory.iterdir()
            content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        offset = next(
            at
            for at in range(saved.wanted[1][1], saved.wanted[1][1] + 2 * 4096)
            if torch.equal(content[at : at + 4096], tensor[:4096])
        )
        assert offset % 4096 == phase
        assert torch.equal(content[offset : offset + tensor.nbytes], tensor)


def test_unknown_way_to_write_in_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="in_place"):
        write(tmp_path, [b"x"], in_place="sometimes")


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


@pytest.mark.parametrize("nth", [0, 12, 13])  # begun, waited for and begun by turns
def test_failed_write_back_is_an_error(tmp_path: Path, nth: int) -> None:
    """The fsync behind it may not be told again of what was lost."""
    tensor = torch.arange(32 << 18, dtype=torch.int32)  # 32 MiB
    _C.arm_fault(nth, errno.EIO, "sync_file_range")
    try:
        with pytest.raises(StorageError, match="sync_file_range") as caught:
            write(tmp_path, [tensor], workers=1, segment_bytes=1 << 20, use_direct=False,
                  is_durable=True)  # fmt: skip
    finally:
        _C.disarm_fault()
    assert caught.value.errno == errno.EIO


def test_file_that_another_has_made_longer_is_refused(tmp_path: Path, no_leaks: None) -> None:
    with open_directory(tmp_path) as fd:
        job = _C.WriteJob(
            dir_fd=fd, dir_path=str(tmp_path), workers=1, segment_bytes=SLOT_BYTES,
            use_direct=False, is_durable=False,
        )  # fmt: skip
    job.add_file(["a"], bytes(16), 0)
    tensor = torch.zeros(2 * SLOT_BYTES, dtype=torch.uint8)
    types = [item_type(torch.uint8)]
    job.write([write_row(tensor, 0, 0, "first")], types, is_final=False)
    os.truncate(tmp_path / "a", 16 * SLOT_BYTES)
    with pytest.raises(StorageError, match=rf"size check \(found {16 * SLOT_BYTES} B\)"):
        job.write([write_row(tensor, 0, 0, "last")], types, is_final=True)


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
