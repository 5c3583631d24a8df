"""Boxes that tile a tensor, by a count of every element: `check_coverage` through the door."""

from __future__ import annotations

import itertools
import random
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from support.machine import points

from torch_dcpx import _C
from torch_dcpx.errors import PlanError

Tensor = tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]  # sizes, boxes


def offences(tensors: list[Tensor]) -> list[tuple[int, str, int, int, tuple[int, ...]]]:
    boxes = [box for _, own in tensors for box in own]
    return _C.check_coverage(
        array("q", [len(sizes) for sizes, _ in tensors]),
        array("q", [n for sizes, _ in tensors for n in sizes]),
        array("q", [len(own) for _, own in tensors]),
        array("q", [n for offsets, _ in boxes for n in offsets]),
        array("q", [n for _, lengths in boxes for n in lengths]),
    )


def expected(sizes: tuple[int, ...], boxes: Any) -> tuple[str, tuple[int, ...]] | None:
    """Returns (offence, its first element); by counting."""
    for offsets, lengths in boxes:
        ends = zip(offsets, lengths, sizes, strict=True)
        if 0 not in lengths and any(at < 0 or at + n > size for at, n, size in ends):
            return "outside", ()
    counts = Counter(
        point
        for offsets, lengths in boxes
        for point in itertools.product(
            *(range(at, at + n) for at, n in zip(offsets, lengths, strict=True))
        )
    )
    twice = sorted(point for point, count in counts.items() if count > 1)
    if twice:
        return "overlap", twice[0]
    for point in itertools.product(*map(range, sizes)):
        if point not in counts:
            return "hole", point
    return None


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Boxes cut out of a tensor, some of them changed, doubled or left out."""
    sizes = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    boxes = [((0,) * len(sizes), sizes)]
    for _ in range(draw(st.integers(0, 6)) if sizes else 0):
        offsets, lengths = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(sizes) - 1))
        cut = draw(st.integers(0, lengths[dim]))
        for begin, end in ((0, cut), (cut, lengths[dim])):
            at, n = list(offsets), list(lengths)
            at[dim], n[dim] = offsets[dim] + begin, end - begin
            boxes.append((tuple(at), tuple(n)))
    boxes = draw(st.permutations(boxes))
    for _ in range(draw(st.integers(0, 2))):
        number = draw(st.integers(0, len(boxes) - 1))
        offsets, lengths = boxes[number]
        change = draw(st.sampled_from(["leave out", "double", "offset", "length"]))
        step = draw(st.sampled_from([-1, 1]))
        dim = draw(st.integers(0, len(sizes) - 1)) if sizes else -1
        if change == "double" or dim < 0:
            boxes.append(boxes[number])
        elif change == "leave out":
            del boxes[number]
        elif change == "offset":
            boxes[number] = (*offsets[:dim], offsets[dim] + step, *offsets[dim + 1 :]), lengths
        elif lengths[dim] + step >= 0:
            boxes[number] = offsets, (*lengths[:dim], lengths[dim] + step, *lengths[dim + 1 :])
        if not boxes:
            break
    return sizes, boxes


@settings(max_examples=points(150), deadline=None)
@given(st.lists(tensors(), max_size=6))
def test_offences_are_those_that_counting_finds(drawn: list[Tensor]) -> None:
    found = {row[0]: row[1:] for row in offences(drawn)}
    assert list(found) == sorted(found)
    for number, (sizes, boxes) in enumerate(drawn):
        wanted = expected(sizes, boxes)
        assert (number in found) == (wanted is not None), (sizes, boxes)
        if wanted is None:
            continue
        offence, box, other, point = found[number]
        assert offence == wanted[0]
        if offence == "hole":
            assert point == wanted[1]
        elif offence == "overlap":
            assert box < other
            assert expected(sizes, [boxes[box], boxes[other]])[0] == "overlap"  # type: ignore[index]
        else:
            assert expected(sizes, [boxes[box]])[0] == "outside"  # type: ignore[index]


def test_no_tensor_is_no_offence() -> None:
    assert offences([]) == []


def test_columns_that_contradict_themselves_are_refused() -> None:
    rows: list[tuple[tuple[list[int], ...], type[Exception]]] = [
        (([1], [2], [1], [0], []), ValueError),
        (([1, 1], [2], [1], [0], [2]), ValueError),
        (([1], [2], [1], [0, 0], [2, 2]), PlanError),
        (([2], [2], [1], [0], [2]), PlanError),
        (([-1], [2], [1], [0], [2]), PlanError),
        (([1], [2], [2**62], [0], [2]), PlanError),
        (([2**62], [2], [8], [0], [2]), PlanError),
    ]
    for columns, error in rows:
        with pytest.raises(error):
            _C.check_coverage(*(array("q", column) for column in columns))


HUGE = 2**63 - 1


def test_boxes_that_no_tensor_holds_are_named_by_tensor_and_number() -> None:
    whole = ((4, 3), [((0, 0), (4, 3))])
    for box in (
        ((3, 0), (2, 1)), ((-1, 0), (1, 1)), ((0, 0), (-1, 3)), ((0, 0), (0, -3)),
        ((HUGE, 0), (1, 1)), ((1, 0), (HUGE, 1)), ((HUGE, HUGE), (HUGE, HUGE)),
    ):  # fmt: skip
        assert offences([whole, ((4, 3), [*whole[1], box]), whole])[0][:3] == (1, "outside", 1), box
    for sizes in ((HUGE, 2), (HUGE, HUGE, HUGE), (-1, 2)):
        assert [row[:2] for row in offences([(sizes, [])])] == [(0, "too large")], sizes
    assert offences([((HUGE,), [((0,), (5,)), ((5,), (HUGE - 5,))]), ((HUGE, HUGE, 0), [])]) == []


def test_column_of_no_int64_is_refused() -> None:
    good = array("q", [1])
    for bad in (b"1234", memoryview(bytearray(16))[1:9], 4096, None):
        with pytest.raises((ValueError, TypeError, BufferError)):
            _C.check_coverage(bad, good, good, good, good)


@pytest.mark.parametrize("is_turned", [False, True])
def test_boxes_that_only_one_dimension_separates_are_told_apart(is_turned: bool) -> None:
    """A staircase: along the wrong dimension each box meets all others, in a minute."""
    count = 200_000
    turn = -1 if is_turned else 1
    stairs = [((i, i)[::turn], (count - i, 1)[::turn]) for i in range(count)]
    found = offences([((count, count), stairs)])
    assert found == [(0, "hole", -1, -1, (0, 1) if not is_turned else (1, 0))]


def columns_over_rows(count: int) -> Tensor:
    """Columns above, rows below: along either dimension half of the boxes meet each other."""
    half = count // 2
    columns = [((0, i), (half, 1)) for i in range(half)]
    rows = [((half + i, 0), (1, half)) for i in range(half)]
    return (2 * half, half), columns + rows


def nested_rings(count: int) -> Tensor:
    """Four thin boxes around four thin boxes, and so on: no straight cut parts them."""
    rings = count // 4
    side = 2 * rings + 1
    boxes = [((rings, rings), (1, 1))]
    for i in range(rings):
        end, length = side - i, side - 2 * i - 1
        boxes.append(((i, i), (1, length)))
        boxes.append(((i, end - 1), (length, 1)))
        boxes.append(((end - 1, i + 1), (1, length)))
        boxes.append(((i + 1, i), (length, 1)))
    return (side, side), boxes


@pytest.mark.slow
@pytest.mark.parametrize("make", [columns_over_rows, nested_rings])
def test_boxes_that_no_one_dimension_separates_take_a_moment(
    make: Callable[[int], Tensor],
) -> None:
    """Compared along one dimension they are many minutes' work."""
    sizes, boxes = make(200_000)
    random.Random(3).shuffle(boxes)
    assert offences([(sizes, boxes)]) == []
    (at, lengths), longer = boxes[7], max(boxes[7][1])
    boxes[7] = at, tuple(n - (n == longer) for n in lengths)
    ((_, offence, _, _, point),) = offences([(sizes, boxes)])
    assert offence == "hole"
    assert point == tuple(a + (n - 1) * (n == longer) for a, n in zip(at, lengths, strict=True))
    boxes[7] = at, lengths
    boxes.append((at, (1, 1)))
    assert offences([(sizes, boxes)]) == [(0, "overlap", 7, len(boxes) - 1, ())]
