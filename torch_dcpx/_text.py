"""Words of messages: text that files may have chosen, and counts. Imports nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable


def printable(value: object) -> str:
    """Returns `str(value)` with unprintable characters escaped: a name that a file has chosen could
    move the cursor, colour the terminal, begin a line or turn the direction of writing.
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


_MOST_CHARACTERS = 200


def brief_text(value: object) -> str:
    """Returns `printable(value)`, at most 200 characters of it: what a file has chosen could fill a
    log. Of a longer one its beginning and its end, as causes come last.
    """
    text = str(value)
    if len(text) > _MOST_CHARACTERS:  # first: escapes make it longer, and take time
        half = (_MOST_CHARACTERS - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    text = printable(text)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


# Paths and lists go on, their parts do not: no file system takes a name of more than 255 bytes.
_LONG = re.compile(rf"[^\s/,]{{{_MOST_CHARACTERS + 1},}}")


def with_short_names(message: str, names: Iterable[object]) -> str:
    """Returns a message in which nothing that a file has chosen is longer than 200 characters.

    Args:
        names: what is known to be a file's, and may have spaces in it.
    """
    if len(message) <= _MOST_CHARACTERS:
        return message
    for name in names:
        if isinstance(name, str) and len(name) > _MOST_CHARACTERS:
            for text in (name, printable(name), repr(name)[1:-1]):
                message = message.replace(text, brief_text(name))
    return _LONG.sub(lambda found: brief_text(found[0]), message)


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
