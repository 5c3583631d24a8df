"""One mesh saves, another one loads: every element is the whole tensor's, bit for bit."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.chunked import Box, chunked, grid
from support.states import assert_same, random_bytes

from torch_dcpx import DcpxReader, DcpxWriter, ReadOptions

KIB = 1 << 10
CANARY = 0x5A


def into_memory(part: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns the part's values in memory that is dense, transposed, or every second element."""
    if kind == "dense" or not part.dim():
        return part.clone(memory_format=torch.contiguous_format)
    if kind == "transposed":
        order = list(range(part.dim()))[::-1]
        return part.permute(order).contiguous().permute(order)
    space = torch.zeros([2 * n + 1 for n in part.shape], dtype=part.dtype)
    place = space[tuple(slice(1, 2 * n + 1, 2) for n in part.shape)]
    place.copy_(part)
    return place


def canaries(like: torch.Tensor) -> torch.Tensor:
    """Returns memory of the same layout with the same known byte everywhere."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    if made.untyped_storage().nbytes():
        bits = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())
        bits.fill_(1 if like.dtype == torch.bool else CANARY)
    return made


MEMORIES = ["dense", "transposed", "strided"]


def stored(boxes: list[Box]) -> list[Box]:
    """Without the shards that have no elements: they are named like their neighbours."""
    kept = [box for box in boxes if 0 not in box.sizes]
    return kept or boxes[:1]


def save_chunks(directory: Path, whole: torch.Tensor, boxes: list[Box]) -> None:
    parts = [into_memory(whole[box.slices], "dense") for box in boxes]
    state = {"m": chunked(boxes, parts, whole.shape)}
    dcp.save(state, storage_writer=DcpxWriter(directory), no_dist=True)


MATRIX = (700, 601)  # of float32: rows of 2404 B, 26 blocks of checksums
RESHARDS = {
    "rows 2 to 3": ((2, 1), (3, 1)),
    "rows 3 to 2": ((3, 1), (2, 1)),
    "columns 2 to 3": ((1, 2), (1, 3)),
    "rows to columns": ((4, 1), (1, 3)),
    "columns to rows": ((1, 3), (4, 1)),
    "mesh to mesh": ((2, 3), (3, 2)),
    "mesh to one": ((5, 4), (1, 1)),
    "one to mesh": ((1, 1), (5, 4)),
    "uneven, empty at the end": ((2, 1), (699, 1)),
}


@pytest.fixture(scope="module")
def matrix() -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    return random_bytes(MATRIX, torch.float32, generator)


@pytest.mark.parametrize("reshard", RESHARDS)
def test_each_rank_of_another_mesh_loads_its_part(
    tmp_path: Path, matrix: torch.Tensor, reshard: str
) -> None:
    saved, wanted = (grid(MATRIX, counts) for counts in RESHARDS[reshard])
    save_chunks(tmp_path, matrix, stored(saved))
    ranks = wanted if len(wanted) < 30 else [wanted[0], wanted[349], *wanted[-2:]]
    for number, (box, memory) in enumerate(itertools.product(ranks, MEMORIES)):
        verify: Any = ("blocks", "none")[number % 2]
        options = ReadOptions(slot_bytes=256 * KIB, workers=2, verify=verify)
        part = canaries(into_memory(matrix[box.slices], memory))
        target = chunked([box], [part], MATRIX)
        reader = DcpxReader(tmp_path, options=options)
        dcp.load({"m": target}, storage_reader=reader, no_dist=True)
        assert_same(matrix[box.slices], part, f"{box}, {memory}")
        if memory == "strided" and part.numel():  # what lies between is nobody's
            space = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
            part.view(torch.int32).fill_(0)
            assert int((space == CANARY).sum()) == space.numel() - part.nbytes
        assert reader.last_report is not None
        assert reader.last_report.needed_bytes == 4 * math.prod(box.sizes)


@pytest.mark.usefixtures("no_leaks")
def test_one_chunk_that_feeds_many_targets_is_read_once(
    tmp_path: Path, matrix: torch.Tensor
) -> None:
    """All ranks' boxes in one state, in an order that is not the file's, some of them twice."""
    save_chunks(tmp_path, matrix, grid(MATRIX, (1, 1)))
    boxes = [*grid(MATRIX, (4, 3)), *grid(MATRIX, (2, 2))][::-1]
    parts = [canaries(matrix[box.slices].contiguous()) for box in boxes]
    reader = DcpxReader(tmp_path)
    dcp.load({"m": chunked(boxes, parts, MATRIX)}, storage_reader=reader, no_dist=True)
    for box, part in zip(boxes, parts, strict=True):
        assert_same(matrix[box.slices], part, f"{box}")
    report = reader.last_report
    assert report is not None
    assert report.needed_bytes == 2 * matrix.nbytes
    assert report.read_bytes <= matrix.nbytes + 2 * 64 * KIB
