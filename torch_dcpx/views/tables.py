"""How the results of `ls`, `inspect`, `diff` and `stats` are shown: as a text, or in a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

from torch_dcpx._text import aligned, counted, printable

_MOST_ROWS = 20  # and notes, of a text; a notebook shows five times as many rows
_Each = TypeVar("_Each")


class Table(NamedTuple):
    """The rows of a result."""

    columns: Sequence[str]  # those that begin with '#' are numbers
    rows: Sequence[Sequence[Any]]


class Shown(Generic[_Each]):
    """Gives a result `__str__` and `_repr_html_`, from its head, its table and its notes.

    Iterates over what its rows are of: `pandas.DataFrame` takes it.
    """

    _keeps_last = False  # of too many rows; else the first are shown

    def head(self) -> str:
        """Returns the result in one line."""
        raise NotImplementedError

    def table(self) -> Table:
        """Returns the rows, all of them."""
        raise NotImplementedError

    @property
    def notes(self) -> Sequence[str]:
        """The lines below the rows."""
        return ()

    def each(self) -> Sequence[_Each]:
        """Returns what it iterates over."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[_Each]:
        return iter(self.each())

    def __len__(self) -> int:
        return len(self.each())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {printable(self.head())}>"

    def __str__(self) -> str:
        found = self.table()
        lines = [printable(self.head())]
        if found.rows:
            lines += aligned(found.columns, self._some_of(found.rows, _MOST_ROWS))
        if left := _left(found.rows, _MOST_ROWS):
            lines.append(left)
        return "\n".join([*lines, *self._some_notes()])

    def _repr_html_(self) -> str:
        found = self.table()
        most = 5 * _MOST_ROWS
        align = ["right" if name[0] == "#" else "left" for name in found.columns]

        def row_of(tag: str, texts: Sequence[str]) -> str:
            cells = (
                f'<{tag} style="text-align:{side}">{escape(text)}</{tag}>'
                for side, text in zip(align, texts, strict=True)
            )
            return f"<tr>{''.join(cells)}</tr>"

        rows = "".join(row_of("td", row) for row in self._some_of(found.rows, most))
        left = _left(found.rows, most)
        more = f"<p>{left}</p>" if left else ""
        names = row_of("th", [name.lstrip("#") for name in found.columns])
        body = f"<table><thead>{names}</thead><tbody>{rows}</tbody></table>" if rows else ""
        notes = "<br>".join(map(escape, self._some_notes()))
        below = f"<p>{notes}</p>" if notes else ""
        return f"<p>{escape(printable(self.head()))}</p>{body}{more}{below}"

    def _some_of(self, rows: Sequence[Sequence[Any]], most: int) -> list[list[str]]:
        first = max(0, len(rows) - most) if self._keeps_last else 0
        return [[printable(value) for value in row] for row in islice(rows, first, first + most)]

    def _some_notes(self) -> list[str]:
        left = len(self.notes) - _MOST_ROWS
        more = [f"and {counted(left, 'note')} more"] if left > 0 else []
        return [*map(printable, self.notes[:_MOST_ROWS]), *more]


def _left(rows: Sequence[Any], most: int) -> str:
    left = len(rows) - most
    return f"and {counted(left, 'row')} more" if left > 0 else ""
