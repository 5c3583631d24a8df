"""Text for a terminal out of text that files may have chosen. Imports nothing."""

from __future__ import annotations


def printable(value: object) -> str:
    """Returns `str(value)` with what would move the cursor, colour the terminal, begin a new line
    or turn the direction of writing shown escaped; names come from files.
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
