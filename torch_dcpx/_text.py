"""Text for a terminal out of text that files may have chosen. Imports nothing."""

from __future__ import annotations


def printable(value: object) -> str:
    """Returns `str(value)` with unprintable characters escaped: a name that a file has chosen could
    move the cursor, colour the terminal, begin a line or turn the direction of writing.
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def counted(number: int, noun: str) -> str:
    """Returns "1 tensor" for (1, "tensor"), and "3 tensors" for 3."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
