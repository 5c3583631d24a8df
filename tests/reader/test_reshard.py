"""Any layout saved, any other one loaded: every element is the whole tensor's, bit for bit."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from support.chunked import Box, chunked, grid
from support.machine import points
from support.saves import READERS, WRITERS
from support.states import DTYPES, assert_same, random_bytes

from torch_dcpx import DcpxReader, DcpxWriter, ReadOptions, WriteOptions

KIB = 1 << 10
WAYS = [("ours", "ours"), ("stock", "ours"), ("ours", "stock")]
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


@st.composite
def layouts(draw: st.DrawFn, sizes: tuple[int, ...]) -> list[Box]:
    """Rows, columns, blocks of a mesh, uneven and empty shards among them, or cuts anywhere."""
    if not sizes or draw(st.booleans()):
        counts = [draw(st.integers(1, 5)) for _ in sizes]
        return grid(sizes, counts)
    boxes = [Box((0,) * len(sizes), sizes)]
    for _ in range(draw(st.integers(0, 6))):
        offsets, lengths = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(sizes) - 1))
        cut = draw(st.integers(0, lengths[dim]))
        for begin, end in ((0, cut), (cut, lengths[dim])):
            at, n = list(offsets), list(lengths)
            at[dim], n[dim] = offsets[dim] + begin, end - begin
            boxes.append(Box(tuple(at), tuple(n)))
    return boxes


def stored(boxes: list[Box]) -> list[Box]:
    """Without the shards that have no elements: they are named like their neighbours."""
    kept = [box for box in boxes if 0 not in box.sizes]
    return kept or boxes[:1]


@st.composite
def tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[Box], list[Box], list[str]]:
    """(whole, boxes to save, boxes to load, how their memory is laid out)."""
    sizes = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    whole = random_bytes(sizes, draw(st.sampled_from(DTYPES)), generator)
    saved, wanted = draw(layouts(sizes)), draw(layouts(sizes))
    kinds = st.sampled_from(MEMORIES)
    memories = draw(st.lists(kinds, min_size=len(wanted) + 1, max_size=len(wanted) + 1))
    return whole, stored(saved), wanted, memories


def save_chunks(
    directory: Path, writer: Any, state: dict[str, tuple[torch.Tensor, list[Box]]], memory: str
) -> None:
    parts = {
        fqn: chunked(boxes, [into_memory(whole[box.slices], memory) for box in boxes], whole.shape)
        for fqn, (whole, boxes) in state.items()
    }
    dcp.save(parts, storage_writer=writer(directory), no_dist=True)


@pytest.mark.slow
@settings(max_examples=points(100), deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=6), st.sampled_from(WAYS), st.integers(1, 3))
def test_any_layout_loads_from_any_other(
    drawn: list[tuple[torch.Tensor, list[Box], list[Box], list[str]]],
    way: tuple[str, str],
    files: int,
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        writer: Callable[..., Any] = WRITERS[way[0]]
        if way[0] == "ours":
            options = WriteOptions(files_per_rank=files, durability="none")
            writer = lambda path: DcpxWriter(path, options=options)  # noqa: E731
        saved = {f"t{n}": (whole, boxes) for n, (whole, boxes, *_) in enumerate(drawn)}
        save_chunks(Path(directory), writer, saved, drawn[0][3][-1])
        targets = {}
        for n, (whole, _, boxes, memories) in enumerate(drawn):
            parts = [
                canaries(into_memory(whole[box.slices], kind))
                for box, kind in zip(boxes, memories[:-1], strict=True)
            ]
            targets[f"t{n}"] = chunked(boxes, parts, whole.shape)
        dcp.load(dict(targets), storage_reader=READERS[way[1]](directory), no_dist=True)
        for n, (whole, *_) in enumerate(drawn):
            target = targets[f"t{n}"]
            for box, part in zip(target.boxes, target.parts, strict=True):
                assert_same(whole[box.slices], part, f"t{n} {box}")


# ---- Ranks of meshes, blocks of checksums and slots of workers -----------------------------------

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
    save_chunks(tmp_path, DcpxWriter, {"m": (matrix, stored(saved))}, "dense")
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
    save_chunks(tmp_path, DcpxWriter, {"m": (matrix, grid(MATRIX, (1, 1)))}, "dense")
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
