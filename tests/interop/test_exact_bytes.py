"""A reshard reads what it needs: by the engine's count, and by the kernel's."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.chunked import Box, chunked, grid
from support.saves import read_footer, save
from support.states import assert_same

from torch_dcpx import DcpxReader, ReadOptions
from torch_dcpx.reports import ReadReport

BLOCK_BYTES = 64 << 10
SIZES = (1536, 3072)  # of float32, 18 MiB: a third of a row is 4 KiB, of the columns 6 MiB
ITEM_BYTES = 4 * SIZES[0] * SIZES[1]


@pytest.fixture(scope="module")
def matrix() -> torch.Tensor:
    return torch.arange(SIZES[0] * SIZES[1], dtype=torch.float32).reshape(SIZES)


def kernel_bytes() -> int:
    """Returns how many bytes this process has read, by whatever call."""
    return int(Path("/proc/self/io").read_text().split()[1])


def read_part(
    directory: Path, matrix: torch.Tensor, box: Box, verify: Any
) -> tuple[ReadReport, int]:
    """Loads one rank's part; returns the report, and what the kernel counted from the plan on."""
    part = torch.zeros(box.sizes)
    reader = DcpxReader(directory, options=ReadOptions(verify=verify, direct_io=False))
    counted = []

    def count(*args: Any) -> Any:
        gc.collect()
        before = kernel_bytes()
        found = DcpxReader.read_data(reader, *args)
        counted.append(kernel_bytes() - before)
        return found

    reader.read_data = count  # type: ignore[method-assign]
    target = {"m": chunked([box], [part], SIZES)}
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert_same(matrix[box.slices].contiguous(), part)
    assert reader.last_report is not None
    return reader.last_report, counted[0]


def save_parts(directory: Path, matrix: torch.Tensor, counts: tuple[int, int]) -> list[Box]:
    boxes = grid(SIZES, counts)
    parts = [matrix[box.slices].contiguous() for box in boxes]
    save({"m": chunked(boxes, parts, SIZES)}, directory)
    return boxes


def table_bytes(directory: Path) -> int:
    """Returns how much of a footer a load may read: the checksums of all blocks, and of those."""
    return sum(
        read_footer(path).file_bytes - read_footer(path).table_offset
        for path in directory.glob("*.distcp")
    )


@pytest.mark.parametrize("verify", ["blocks", "none"])
def test_rows_read_what_they_need_and_a_block_for_each_end_of_a_run(
    tmp_path: Path, matrix: torch.Tensor, verify: Any
) -> None:
    saved = save_parts(tmp_path, matrix, (2, 1))
    for box in grid(SIZES, (3, 1)):
        report, counted = read_part(tmp_path, matrix, box, verify)
        first, end = box.offsets[0], box.offsets[0] + box.sizes[0]
        runs = sum(one.offsets[0] < end and first < one.offsets[0] + one.sizes[0] for one in saved)
        assert report.needed_bytes == 4 * box.sizes[0] * box.sizes[1]
        ends = 2 * runs * BLOCK_BYTES if verify == "blocks" else 0
        assert report.read_bytes <= 1.02 * report.needed_bytes + ends
        assert report.read_bytes <= counted <= report.read_bytes + table_bytes(tmp_path) + 4096


def test_columns_verified_read_no_more_than_the_whole_items(
    tmp_path: Path, matrix: torch.Tensor
) -> None:
    saved = save_parts(tmp_path, matrix, (1, 2))
    for box in grid(SIZES, (1, 3)):
        report, counted = read_part(tmp_path, matrix, box, "blocks")
        first, end = box.offsets[1], box.offsets[1] + box.sizes[1]
        items = [
            one for one in saved if one.offsets[1] < end and first < one.offsets[1] + one.sizes[1]
        ]
        most = sum(4 * one.sizes[0] * one.sizes[1] for one in items)
        assert report.read_bytes <= most + 2 * len(items) * BLOCK_BYTES
        assert report.read_bytes <= counted <= report.read_bytes + table_bytes(tmp_path) + 4096


def test_columns_unverified_read_little_between_runs_of_4_kib(
    tmp_path: Path, matrix: torch.Tensor
) -> None:
    save_parts(tmp_path, matrix, (1, 1))
    for box in grid(SIZES, (1, 3)):  # runs of 4 KiB, 8 KiB apart
        report, counted = read_part(tmp_path, matrix, box, "none")
        assert report.needed_bytes == 4 * box.sizes[0] * box.sizes[1]
        assert report.read_bytes <= 1.5 * report.needed_bytes
        assert report.read_bytes <= counted <= report.read_bytes + 4096


@pytest.mark.parametrize("verify", ["blocks", "none"])
def test_what_two_targets_want_is_read_once(
    tmp_path: Path, matrix: torch.Tensor, verify: Any
) -> None:
    save({"m": matrix}, tmp_path)
    boxes = [Box((0, 0), SIZES), Box((512, 0), (512, SIZES[1])), Box((0, 0), SIZES)]
    parts = [torch.zeros(box.sizes) for box in boxes]
    reader = DcpxReader(tmp_path, options=ReadOptions(verify=verify, direct_io=False))
    before = kernel_bytes()
    dcp.load({"m": chunked(boxes, parts, SIZES)}, storage_reader=reader, no_dist=True)
    counted = kernel_bytes() - before
    for box, part in zip(boxes, parts, strict=True):
        assert_same(matrix[box.slices].contiguous(), part)
    report = reader.last_report
    assert report is not None
    assert report.needed_bytes == 4 * sum(box.sizes[0] * box.sizes[1] for box in boxes)
    assert report.read_bytes <= ITEM_BYTES + 2 * BLOCK_BYTES
    assert counted <= 1.02 * ITEM_BYTES + 4 * BLOCK_BYTES
