"""Words of messages: text that files may have chosen, and counts. Imports nothing."""

from __future__ import annotations


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
