"""Which stored boxes hold what is wanted: as stock says. tests/cpp compares every pair."""

from __future__ import annotations

import gc
import itertools
import random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from support.machine import points
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torch_dcpx._compat import IS_SWEPT
from torch_dcpx._plan_classes import MAKER

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes
Tensor = tuple[int, list[Box], list[Box]]  # dimensions, wanted, stored


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Boxes anywhere, or the cells of meshes, few or enough for every way to find them."""
    ndim = draw(st.integers(0, 4))
    rng = random.Random(draw(st.integers(0, 2**32)))

    def anywhere(count: int) -> list[Box]:
        return [
            (
                tuple(rng.randrange(9) for _ in range(ndim)),
                tuple(rng.choice((0, 1, 2, 3, 9)) for _ in range(ndim)),
            )
            for _ in range(count)
        ]

    def mesh() -> list[Box]:
        cuts = []
        for _ in range(ndim):
            inner = sorted(rng.sample(range(1, 24), rng.randrange(5)))
            edges = [0, *inner, 24]
            cuts.append(list(itertools.pairwise(edges)))
        cells: list[Box] = [
            (tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
            for cell in itertools.product(*cuts)
        ]
        rng.shuffle(cells)
        if rng.random() < 0.3:
            cells.pop()
        if rng.random() < 0.2 and cells:
            cells.append(cells[0])
        return cells

    def boxes() -> list[Box]:
        return mesh() if draw(st.booleans()) else anywhere(draw(st.integers(0, 60)))

    return ndim, boxes(), boxes()


def grid(edge: int) -> list[Box]:
    """Cubes that fill one of 24 x 24 x 24."""
    return [(at, (edge,) * 3) for at in itertools.product(range(0, 24, edge), repeat=3)]


def crowd(seed: int) -> list[Box]:
    """400 boxes that lie in any way, many from one place on."""
    rng = random.Random(seed)
    return [
        (tuple(rng.randrange(6) for _ in range(3)), tuple(rng.randrange(1, 6) for _ in range(3)))
        for _ in range(400)
    ]


def chunks(boxes: list[Box]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(at), torch.Size(n)) for at, n in boxes]


@settings(max_examples=points(100), deadline=None)
@given(tensors())
@example((3, grid(8), grid(4)))  # found by the cells of the mesh
@example((3, crowd(1), crowd(2)))  # found in a sweep
def test_items_are_stocks_in_stocks_order(drawn: Tensor) -> None:
    ndim, wanted, stored = drawn
    entry = TensorStorageMetadata(TensorProperties(), torch.Size([99] * ndim), chunks(stored))
    stock = create_read_items_for_chunk_list("x", entry, chunks(wanted))
    # Of a tensor without elements none can be missing or there twice, however its chunks lie.
    row = ("x", chunks(wanted), entry.chunks, torch.Size([0] * ndim))
    items, offences = MAKER.read_items([row], list, IS_SWEPT)
    if ndim == 0 and offences:
        assert (len(stored) == 1, items) == (False, [])
        return
    assert not offences
    assert items == stock
    for ours, theirs in zip(items, stock, strict=True):
        assert vars(ours).keys() == vars(theirs).keys()
        assert ours.dest_index.index == theirs.dest_index.index
        assert ours.storage_index.index == theirs.storage_index.index
        for name in ("dest_offsets", "storage_offsets", "lengths"):
            assert type(getattr(ours, name)) is torch.Size
        assert type(ours.dest_index.offset) is type(ours.storage_index.offset) is torch.Size
        assert hash(ours.storage_index) == hash(theirs.storage_index)


def test_no_row_has_no_item() -> None:
    assert MAKER.read_items([], list, IS_SWEPT) == ([], [])


def test_row_that_is_none_is_refused() -> None:
    rows: list[Any] = [("x", torch.Size([1])), 5, ("x", 5, [], torch.Size([1])), None]
    for row in rows:
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            MAKER.read_items([row], list, True)


def test_origins_keep_their_dimensions_where_a_collector_makes_items_meanwhile() -> None:
    def row_of(ndim: int) -> Any:
        chunks = [ChunkStorageMetadata(torch.Size([0] * ndim), torch.Size([1] * ndim))]
        return ("x", chunks, chunks, chunks[0].sizes)

    def origin_of(row: Any) -> torch.Size:
        return MAKER.read_items([row], list, True)[0][0].storage_offsets

    rows = [row_of(ndim) for ndim in range(400)]
    calls = iter(range(100, 300))
    ran = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and (ndim := next(calls, None)):
            ran.append(origin_of(rows[ndim]))

    before = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        origin_of(rows[250])
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
    assert ran
    for ndim, row in enumerate(rows):
        assert origin_of(row) == torch.Size([0] * ndim)
