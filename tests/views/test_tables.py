"""What `ls`, `inspect`, `diff` and `stats` return is readable as a text and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_type_hints

import torch
from support.saves import save

import torch_dcpx as dcpx
from torch_dcpx.views.ls import ListedCheckpoint, Listing
from torch_dcpx.views.tables import Shown, Table


class _Result(Shown[int]):
    def __init__(self, rows: int, notes: Sequence[str] = ()) -> None:
        self._rows = [(f"step-{number}<b>", number) for number in range(rows)]
        self._notes = notes

    def head(self) -> str:
        return "root\x1b[31m of <2>"

    def table(self) -> Table:
        return Table(["name", "#size"], self._rows)

    @property
    def notes(self) -> Sequence[str]:
        return self._notes


def test_a_text_has_a_head_aligned_rows_and_says_how_many_are_left() -> None:
    lines = str(_Result(1000)).splitlines()
    assert lines[0] == "root\\x1b[31m of <2>"
    assert lines[1] == "name        size"
    assert lines[12] == "step-10<b>    10"
    assert lines[-1] == "and 980 rows more" and len(lines) == 23


def test_of_many_checkpoints_the_newest_are_shown() -> None:
    rows = [ListedCheckpoint(f"step-{step}", f"r/step-{step}", "committed") for step in range(25)]
    lines = str(Listing("r", tuple(rows))).splitlines()
    assert lines[2].endswith("step-5") and lines[21].endswith("step-24")
    assert lines[22] == "and 5 rows more"


def test_a_notebook_gets_a_table_in_which_no_name_is_markup() -> None:
    html = _Result(101)._repr_html_()
    assert html.count("<tr>") == 101 and "<b>" not in html and "\x1b" not in html
    assert html.endswith("<p>and 1 row more</p>")


def test_without_rows_it_is_the_head_alone() -> None:
    assert str(_Result(0)) == "root\\x1b[31m of <2>"
    assert "<table>" not in _Result(0)._repr_html_()


def test_notes_stand_below_the_rows_in_a_notebook_too() -> None:
    found = _Result(1, [f"step-{number}: <b>\x1b[31m" for number in range(21)])
    assert str(found).splitlines()[3:6:2] == ["step-0: <b>\\x1b[31m", "step-2: <b>\\x1b[31m"]
    html = found._repr_html_()
    assert "<p>step-0: &lt;b&gt;\\x1b[31m<br>step-1: " in html and "step-20" not in html
    assert str(found).endswith("\nand 1 note more") and html.endswith("<br>and 1 note more</p>")


def test_results_are_short_to_an_interpreter_and_iterate_over_their_rows(tmp_path: Path) -> None:
    for step in (1, 2):
        save({f"w{n}": torch.full((2,), float(step)) for n in range(50)}, tmp_path / f"step-{step}")
    one, two = tmp_path / "step-1", tmp_path / "step-2"
    listing, inspection = dcpx.ls(tmp_path), dcpx.inspect(one)
    difference, numbers = dcpx.diff(one, two, "w1*"), dcpx.stats(one)
    assert repr(listing) == f"<Listing {tmp_path}: 2 committed>"
    for result in (inspection, inspection.saves[0], difference, numbers):
        assert repr(result) == f"<{type(result).__name__} {result.head()}>"
    assert list(listing) == list(listing.checkpoints) and len(listing) == 2
    assert list(inspection) == inspection.items and len(inspection) == 50
    assert list(inspection.saves[0]) == inspection.items and len(inspection.saves[0]) == 50
    assert list(difference) == list(difference.differences) and len(difference) == 11
    assert list(numbers) == list(numbers.tensors) and len(numbers) == 50


def test_no_property_has_a_literal_type_for_which_notebooks_complete_no_name() -> None:
    found = []  # jedi 0.20 fails
    every = (getattr(dcpx, name) for name in dcpx.__all__)
    for cls in (one for one in every if isinstance(one, type)):
        for key, member in vars(cls).items():
            if isinstance(member, property) and member.fget is not None:
                hint = str(get_type_hints(member.fget).get("return"))
                found += [f"{cls.__name__}.{key}"] if "Literal" in hint else []
    assert found == []
