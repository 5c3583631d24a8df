"""Words of messages: text that files may have chosen, and counts. Imports no room."""

from __future__ import annotations

import re
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


_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))  # of ages
_AGE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(d|h|min|s)")


def age_text(seconds: float | None) -> str:
    """Returns "3 h ago" of a time in seconds, "" where it is unknown."""
    if seconds is None:
        return ""
    unit, size = next((row for row in _UNITS if seconds >= 2 * row[1]), _UNITS[-1])
    return f"{int(seconds // size)} {unit} ago"


def seconds_of(age: str) -> float:
    """Returns the seconds of "90s", "15min", "1h", "2d". Raises ValueError: it is no age."""
    found = _AGE.fullmatch(age)
    if found is None:
        raise ValueError(f"{age!r} is no age: write it as 90s, 15min, 1h or 2d")
    return float(found[1]) * dict(_UNITS)[found[2]]


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
