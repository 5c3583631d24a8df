"""What `ls`, `inspect`, `diff` and `stats` return is readable as a text and in a notebook."""

from __future__ import annotations

from torch_dcpx.views.tables import Shown, Table


class _Result(Shown):
    def __init__(self, rows: int) -> None:
        self._rows = [(f"step-{number}<b>", number) for number in range(rows)]

    def head(self) -> str:
        return "root\x1b[31m of <2>"

    def table(self) -> Table:
        return Table(["name", "#size"], self._rows)


def test_a_text_has_a_head_aligned_rows_and_says_how_many_are_left() -> None:
    lines = str(_Result(1000)).splitlines()
    assert lines[0] == "root\\x1b[31m of <2>"
    assert lines[1] == "name        size"
    assert lines[12] == "step-10<b>    10"
    assert lines[-1] == "and 980 rows more" and len(lines) == 23


def test_a_notebook_gets_a_table_in_which_no_name_is_markup() -> None:
    html = _Result(101)._repr_html_()
    assert html.count("<tr>") == 101 and "<b>" not in html and "\x1b" not in html
    assert html.endswith("<p>and 1 row more</p>")


def test_without_rows_it_is_the_head_alone() -> None:
    assert str(_Result(0)) == "root\\x1b[31m of <2>"
    assert "<table>" not in _Result(0)._repr_html_()
