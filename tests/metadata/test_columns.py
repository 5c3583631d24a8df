"""Lists of numbers and texts as columns: exact values, exact types, nothing half done."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from torch_dcpx import _C

I64 = (1 << 63) - 1


class Text(str):
    """No exact str."""


class Number(int):
    """No exact int."""


def i64(data: bytes) -> list[int]:
    return array("q", data).tolist()


def test_texts_are_numbered_in_the_order_of_their_first_use() -> None:
    numbers = {"a": 0}
    assert i64(_C.text_column(["b", "a", "c", "b"], numbers)) == [1, 0, 2, 1]
    assert numbers == {"a": 0, "b": 1, "c": 2}


def test_what_is_no_exact_str_is_refused() -> None:
    for value in (Text("a"), b"a", None, 1):
        with pytest.raises(TypeError):
            _C.text_column(["b", value], {})  # type: ignore[list-item]


def test_sizes_and_rows_come_back_with_none_as_minus_one() -> None:
    assert i64(_C.size_column([0, I64, None], True)) == [0, I64, -1]
    counts, flat = _C.row_columns([(1, I64), None, torch.Size([]), torch.Size([7])], True)
    assert (i64(counts), i64(flat)) == ([2, -1, 0, 1], [1, I64, 7])


def test_numbers_that_are_no_exact_ints_in_range_and_rows_that_are_no_tuples_are_refused() -> None:
    wrong: list[Any] = [True, Number(1), 1.0, "1", None]
    ranges = [(-1, ValueError), (I64 + 1, OverflowError)]
    for value, error in [*((value, TypeError) for value in wrong), *ranges]:
        with pytest.raises(error):
            _C.size_column([1, value], False)
        with pytest.raises(error):
            _C.row_columns([(1,), (1, value)], True)
    for row in ([1], None, 1):
        with pytest.raises(TypeError):
            _C.row_columns([(1,), row], False)


def test_paths_keep_texts_and_ints_apart() -> None:
    numbers: dict[str, int] = {}
    columns = _C.path_columns([("a", 1, "1"), (), (-I64 - 1, "a")], numbers)
    assert columns is not None
    counts, tags, values = columns
    assert (i64(counts), list(tags)) == ([3, 0, 2], [0, 1, 0, 1, 0])
    assert i64(values) == [0, 1, 1, -I64 - 1, 0]
    assert numbers == {"a": 0, "1": 1}


def test_paths_of_anything_else_give_none_and_number_nothing() -> None:
    numbers: dict[str, int] = {}
    for path in (["a"], ("a", True), (I64 + 1,), (None,), (Text("a"),), "a"):
        assert _C.path_columns([("b",), path], numbers) is None
        assert numbers == {}


def test_a_range_that_ends_beyond_int64_is_found() -> None:
    def column(*values: int) -> bytes:
        return array("q", values).tobytes()

    assert _C.have_ends(column(0, I64 - 1), column(5, 1))
    assert not _C.have_ends(column(0, I64 - 1), column(5, 2))
    assert _C.have_ends(b"", b"")
    with pytest.raises(ValueError, match="as many"):
        _C.have_ends(column(1), b"")
