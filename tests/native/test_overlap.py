"""Which stored boxes hold what is wanted: through the door, by brute force and by stock."""

from __future__ import annotations

import gc
import itertools
import random
from array import array
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torch_dcpx import _C
from torch_dcpx._compat import IS_SWEPT
from torch_dcpx._plan_classes import MAKER
from torch_dcpx.errors import PlanError

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes
Tensor = tuple[int, list[Box], list[Box]]  # dimensions, wanted, stored
Row = tuple[int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def columns(tensors: list[Tensor]) -> list[array[int]]:
    wanted = [box for _, boxes, _ in tensors for box in boxes]
    stored = [box for _, _, boxes in tensors for box in boxes]

    def flat(boxes: list[Box], part: int) -> array[int]:
        return array("q", [n for box in boxes for n in box[part]])

    return [
        array("q", [ndim for ndim, _, _ in tensors]),
        array("q", [len(boxes) for _, boxes, _ in tensors]),
        flat(wanted, 0),
        flat(wanted, 1),
        array("q", [len(boxes) for _, _, boxes in tensors]),
        flat(stored, 0),
        flat(stored, 1),
    ]


def overlaps(tensors: list[Tensor], *, is_swept: bool = True) -> list[Row]:
    """Returns (tensor, wanted, stored, dest offsets, storage offsets, lengths)."""
    found = _C.find_overlaps(*columns(tensors), is_swept)
    counts, wanted, stored, *cells = (memoryview(column).cast("q").tolist() for column in found)
    rows, at, number = [], 0, 0
    for tensor, ((ndim, _, _), count) in enumerate(zip(tensors, counts, strict=True)):
        for _ in range(count):
            regions = [tuple(column[at : at + ndim]) for column in cells]
            rows.append((tensor, wanted[number], stored[number], *regions))
            at, number = at + ndim, number + 1
    assert number == len(wanted) == len(stored)
    assert all(len(column) == at for column in cells)
    return rows  # type: ignore[return-value]


def expected(tensors: list[Tensor]) -> list[Row]:
    """By comparing every pair, as torch 2.9 does."""
    rows = []
    for tensor, (_, wanted, stored) in enumerate(tensors):
        for (w, (w_at, w_n)), (s, (s_at, s_n)) in itertools.product(
            enumerate(wanted), enumerate(stored)
        ):
            both = list(zip(w_at, w_n, s_at, s_n, strict=True))
            if any(a >= b + m or b >= a + n for a, n, b, m in both):
                continue
            begins = tuple(max(a, b) for a, _, b, _ in both)
            ends = tuple(min(a + n, b + m) for a, n, b, m in both)
            rows.append(
                (
                    tensor,
                    w,
                    s,
                    tuple(p - a for p, a in zip(begins, w_at, strict=True)),
                    tuple(p - b for p, b in zip(begins, s_at, strict=True)),
                    tuple(q - p for p, q in zip(begins, ends, strict=True)),
                )
            )
    return rows


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


@settings(max_examples=100, deadline=None)
@given(st.lists(tensors(), max_size=3))
def test_overlaps_are_those_that_comparing_every_pair_finds(drawn: list[Tensor]) -> None:
    assert overlaps(drawn, is_swept=False) == expected(drawn)
    assert sorted(overlaps(drawn)) == expected(drawn)


def chunks(boxes: list[Box]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(at), torch.Size(n)) for at, n in boxes]


@settings(max_examples=100, deadline=None)
@given(tensors())
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


def test_mesh_of_three_dimensions_meets_itself_cell_by_cell() -> None:
    edges = range(0, 40, 4)
    cells: list[Box] = [((a, b, c), (4, 4, 4)) for a in edges for b in edges for c in edges]
    shuffled = random.Random(1).sample(cells, len(cells))
    assert overlaps([(3, cells, shuffled)], is_swept=False) == [
        (0, w, shuffled.index(cell), (0, 0, 0), (0, 0, 0), (4, 4, 4))
        for w, cell in enumerate(cells)
    ]


def test_columns_over_rows_meet_others_such_in_a_moment() -> None:
    """Along either dimension half of the pairs meet, of which there are 10**10."""
    half = 50_000
    columns: list[Box] = [((0, i), (half, 1)) for i in range(half)]
    rows: list[Box] = [((half + i, 0), (1, half)) for i in range(half)]
    wanted = columns + rows
    numbers = random.Random(2).sample(range(2 * half), 2 * half)
    found = overlaps([(2, wanted, [wanted[number] for number in numbers])], is_swept=False)
    assert [row[:3] for row in found] == [
        (0, w, s) for s, w in sorted(enumerate(numbers), key=lambda pair: pair[1])
    ]


def test_no_tensor_has_no_overlap() -> None:
    assert overlaps([]) == []


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({2: [0, 0, 0]}, ValueError),
        ({0: [1, 1]}, ValueError),
        ({1: [2]}, PlanError),
        ({1: [-1]}, PlanError),
        ({0: [-1]}, PlanError),
        ({0: [2**62]}, PlanError),
        ({4: [2**62]}, PlanError),
        ({1: [0]}, PlanError),
        ({2: [2**63 - 1], 3: [1]}, PlanError),
    ],
)
def test_columns_that_contradict_themselves_are_refused(
    changed: dict[int, list[int]], error: type[Exception]
) -> None:
    given = columns([(1, [((0,), (2,))], [((0,), (2,))])])
    for column, values in changed.items():
        given[column] = array("q", values)
    with pytest.raises(error):
        _C.find_overlaps(*given, True)


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
