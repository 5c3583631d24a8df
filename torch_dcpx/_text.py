"""Words of messages: text that files may have chosen, and counts. Imports no room."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def printable(value: object) -> str:
    """Returns `str(value)` with unprintable characters escaped: a name that a file has chosen could
    move the cursor, colour the terminal, begin a line or turn the direction of writing.
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def counted(count: int, noun: str, nouns: str = "") -> str:
    """Returns "1 file" or "3 files". `nouns` is for several, default the noun with an s."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def human_bytes(nbytes: float) -> str:
    """Returns "1.61 GB" for 1610612736: decimal units, as the makers of storage count, everywhere
    in tables, log lines, reports and pages.
    """
    for exponent, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if abs(nbytes) >= 10**exponent:
            return f"{nbytes / 10**exponent:.2f} {unit}"
    return f"{nbytes:.0f} B"


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a head and a line for each row. Columns that begin with '#' are numbers; the last one
    runs on, uncut as all others.
    """
    shown = [[name.lstrip("#") for name in columns], *rows]
    widths = [max(map(_cells, column)) for column in zip(*shown, strict=True)]
    numbers = [name.startswith("#") for name in columns]

    def filled(text: str, width: int, is_number: bool) -> str:
        blank = " " * (width - _cells(text))
        return blank + text if is_number else text + blank

    return ["  ".join(map(filled, row, widths, numbers)).rstrip() for row in shown]


def _cells(text: str) -> int:
    """Returns how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))
