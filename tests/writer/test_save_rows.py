"""Rows of plain tensors made by C++: the same as Python makes, and only of plain ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import WRITERS
from support.states import assert_same
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torch_dcpx.errors import PlanError, UnsupportedError
from torch_dcpx.writer.rows import WriteRow
from torch_dcpx.writer.table import WriteTable, vetted


class Derived(torch.Tensor):
    """A class of tensors of its own."""


def freed() -> torch.Tensor:
    """Returns a tensor whose storage was made smaller under it."""
    tensor = torch.arange(100.0)
    tensor.untyped_storage().resize_(200)
    return tensor


PLAIN: dict[str, torch.Tensor] = {
    "vector": torch.arange(5.0),
    "matrix": torch.arange(6).view(2, 3),
    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    "view at an offset": torch.arange(10.0)[3:7],
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "needs grad": torch.ones(3, requires_grad=True),
}
OTHERS: dict[str, torch.Tensor] = {
    "conjugate": torch.complex(torch.ones(3), torch.ones(3)).conj(),
    "negative": torch._neg_view(torch.ones(3)),
    "transposed": torch.arange(6).view(2, 3).t(),
    "derived": torch.ones(3).as_subclass(Derived),
    "empty": torch.ones(0),
}


def table_of(state: dict[str, Any]) -> tuple[WriteTable, list[Any]]:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plan = planner.create_local_plan()
    return WriteTable(planner, plan), plan.items


def row_of_python(table: WriteTable, item: Any) -> WriteRow | None:
    tensor, about = vetted(item, table._lookup(item))
    return table._row_in_place(item, 3, tensor, about)


def test_row_is_the_one_that_python_makes() -> None:
    for name, tensor in {**PLAIN, **OTHERS}.items():
        table, items = table_of({"t": tensor})
        (row,), owners = table.resolve_in_place(items, [3])
        assert row == row_of_python(table, items[0]), name
        assert type(row) is (WriteRow if row is not None else type(None)), name
        assert owners[0] is tensor or name == "derived"


def test_only_plain_tensors_are_not_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    table, items = table_of({**PLAIN, **OTHERS, "step": 3})
    asked = []
    plain = WriteTable._lookup

    def lookup(self: WriteTable, item: Any) -> Any:
        asked.append(item.index.fqn)
        return plain(self, item)

    monkeypatch.setattr(WriteTable, "_lookup", lookup)
    rows, _ = table.resolve_in_place(items, range(len(items)))
    assert asked == list(OTHERS)
    assert [row is None for row in rows] == [
        item.index.fqn in ("conjugate", "negative", "derived", "step") for item in items
    ]


def test_tensor_whose_storage_shrank_is_refused() -> None:
    table, items = table_of({"t": freed()})
    with pytest.raises(UnsupportedError, match="'t' needs 400 B of a storage that holds 200 B"):
        table.resolve_in_place(items, [0])


def with_sizes(item: Any, sizes: Any) -> Any:
    """Returns the item with other sizes of its chunk."""
    about = item.tensor_data
    chunk = dataclasses.replace(about.chunk, sizes=sizes)
    return dataclasses.replace(item, tensor_data=dataclasses.replace(about, chunk=chunk))


def test_tensor_of_another_shape_than_planned_is_refused_and_sizes_may_be_any_sequence() -> None:
    table, (item,) = table_of({"t": torch.ones(2, 3)})
    shapes: list[tuple[int, ...]] = [(2, 2), (3, 2), (6,), (2, 3, 1), ()]
    for sizes in shapes:
        with pytest.raises(PlanError, match=r"'t': .* the tensor to write has shape \[2, 3\]"):
            table.resolve_in_place([with_sizes(item, torch.Size(sizes))], [0])
    rows = [table.resolve_in_place([each], [0])[0] for each in (item, with_sizes(item, [2, 3]))]
    assert rows[0] == rows[1]


def test_types_are_shared_and_told_apart() -> None:
    table, items = table_of({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2).int()})
    with pytest.raises(ValueError, match="items and files differ in number"):
        table.resolve_in_place(items, [0, 0])
    rows = table.resolve_in_place(items, [0, 0, 0])[0]
    assert [row.type for row in rows if row is not None] == [1, 1, 2]
    assert [kind.dtype for kind in table.types] == ["", "float32", "int32"]


class Doubled(dict[str, Any]):
    """Gives twice what it holds."""

    def __getitem__(self, key: str) -> Any:
        return 2 * super().__getitem__(key)


class DoublingPlanner(DefaultSavePlanner):
    """A planner with stock's hooks over a state of its own."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = Doubled(self.state_dict)


def test_state_with_its_own_lookup_is_saved_as_it_answers(tmp_path: Path) -> None:
    state = {"w": torch.arange(4), "step": 3}
    for name, writer in WRITERS.items():
        made = writer(tmp_path / name)
        dcp.save(state, storage_writer=made, planner=DoublingPlanner(), no_dist=True)
        loaded = {"w": torch.zeros(4, dtype=torch.int64), "step": 0}
        reader = dcp.FileSystemReader(tmp_path / name)
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert_same({"w": 2 * torch.arange(4), "step": 6}, loaded, name)
