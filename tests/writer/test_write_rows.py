"""Rows through the door: what the footer says of them, and rows that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine_jobs import item_type, open_directory, scratch, write_row
from support.saves import read_footer

from torch_dcpx import _C
from torch_dcpx.errors import PlanError

TYPES = [item_type(torch.uint8)]


def write(directory: Path, rows: list[Any], types: list[Any] = TYPES) -> None:
    with open_directory(directory) as fd:
        job = _C.WriteJob(
            dir_fd=fd, dir_path=str(directory), workers=1, segment_bytes=256 << 10,
            use_direct=False, is_durable=False,
        )  # fmt: skip
    job.add_file(["data"], bytes(16), 0)
    job.write(rows, types, is_final=True)


keys = st.one_of(st.text(st.characters(), max_size=8), st.integers())


@given(st.lists(keys, max_size=5).map(tuple))
def test_path_is_json_as_python_writes_it(path: tuple[str | int, ...]) -> None:
    with scratch() as directory:
        write(directory, [write_row(b"x", 0, 0, "x")._replace(path=path)])
        (row,) = read_footer(directory / "data").rows
    assert row.path == json.dumps(path, ensure_ascii=False)


def test_every_character_with_an_escape_of_its_own_is_escaped_as_python_does(
    tmp_path: Path,
) -> None:
    path = (*map(chr, range(0x100)), "\u2028\ud800\U0001f600", '"\\' * 3)  # few are ever drawn
    write(tmp_path, [write_row(b"x", 0, 0, "x")._replace(path=path)])
    (row,) = read_footer(tmp_path / "data").rows
    assert row.path == json.dumps(path, ensure_ascii=False)


def test_what_is_no_path_leaves_none(tmp_path: Path) -> None:
    paths: list[Any] = [None, "model", ["model"], ("a", 1.5), ("a", True), ("a", None)]
    write(tmp_path, [write_row(b"x", 0, 0, f"x{n}")._replace(path=p) for n, p in enumerate(paths)])
    assert [row.path for row in read_footer(tmp_path / "data").rows] == [""] * len(paths)


CHANGES: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"file": -1}, OverflowError),
    ({"file": "0"}, TypeError),
    ({"file": 1 << 32}, PlanError),  # not the file 0
    ({"kind": 4}, PlanError),
    ({"type": 1}, PlanError),
    ({"source": 1.5}, TypeError),
    ({"sizes": 3}, TypeError),
    ({"sizes": ("3",)}, TypeError),
    ({"sizes": (1 << 63,)}, OverflowError),
    ({"sizes": (3,)}, PlanError),  # and no stride
    ({"is_dense": 1}, TypeError),  # a row that is taken for strided reads other memory
    ({"is_dense": False}, PlanError),  # of bytes
    ({"fqn": b"x"}, TypeError),
]


def test_row_that_is_none_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    for change, error in CHANGES:
        with pytest.raises(error):
            write(tmp_path, [write_row(b"x", 0, 0, "x")._replace(**change)])
        assert not list(tmp_path.iterdir()), change


@pytest.mark.parametrize("is_strided", [True, False])
def test_stride_of_a_single_element_may_be_anything(is_strided: bool, tmp_path: Path) -> None:
    values = torch.arange(6, dtype=torch.int32)
    tensor = values.as_strided((1, 3), (1 << 62, 1 + is_strided))
    row = write_row(tensor, 0, 0, "x")
    assert row.is_dense is not is_strided
    write(tmp_path, [row], [item_type(torch.int32)])
    (found,) = read_footer(tmp_path / "data").rows
    data = (tmp_path / "data").read_bytes()[found.payload_offset :]
    assert data[:12] == tensor.numpy().tobytes()


class Emptying:
    """A size that empties a list when it is asked for its value."""

    def __init__(self, victim: list[Any]) -> None:
        self.victim = victim

    def __index__(self) -> int:
        self.victim.clear()
        return 1


def test_list_that_shrinks_while_it_is_read_is_read_as_it_was(tmp_path: Path) -> None:
    row = write_row(b"x", 0, 0, "x")
    rows: list[Any] = []
    rows += [row._replace(sizes=(Emptying(rows),), strides=(1,)), *[row] * 5]
    sizes: list[Any] = []
    sizes += [Emptying(sizes), *range(1000)]
    rows.append(row._replace(sizes=sizes, strides=(1,) * 1001))
    with pytest.raises(PlanError):  # bytes have no sizes
        write(tmp_path, rows)
    assert not list(tmp_path.iterdir())


def test_table_of_another_shape_is_refused(tmp_path: Path) -> None:
    row, kind = write_row(b"x", 0, 0, "x"), TYPES[0]
    tables: list[tuple[Any, Any]] = [
        (row[:-1], kind), (list(row), kind), (row, kind[:-1]), (row, kind._replace(flags=256))
    ]  # fmt: skip
    for made, type_ in tables:
        with pytest.raises((ValueError, PlanError)):
            write(tmp_path, [made], [type_])
        assert not list(tmp_path.iterdir())
