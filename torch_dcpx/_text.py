"""Words of messages: text that files may have chosen, counts, names in groups. Imports no room."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

_MAX_GROUPS = 3
_MAX_NAMES = 5
_MAX_GLOB = 160  # characters
_MANY = 5000  # names, of which fewer cuts are tried
_Parts = tuple[str, ...]


def printable(value: object) -> str:
    """Returns `str(value)` with unprintable characters escaped: a name that a file has chosen could
    move the cursor, colour the terminal, begin a line or turn the direction of writing.
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


_URL_PARTS = re.compile(r"[/?#]")


def shown_url(text: str) -> str:
    """Returns a URL without what may be a secret: user, password, query, fragment. Other text stays
    as it is.
    """
    scheme, mark, rest = text.partition("://")
    if not mark:
        return text
    host = _URL_PARTS.split(rest, maxsplit=1)[0]
    at = rest.rfind("@") if "@" in host or ":" in host else -1  # a password may have a "/" in it
    rest = rest if at < 0 else f"...{rest[at:]}"
    shown = re.split(r"[?#]", rest, maxsplit=1)[0]
    return f"{scheme.rpartition('@')[2]}://{shown}" + ("?..." if shown != rest else "")


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
    widths = [max(map(cells, column)) for column in zip(*shown, strict=True)]
    numbers = [name.startswith("#") for name in columns]

    def filled(text: str, width: int, is_number: bool) -> str:
        blank = " " * (width - cells(text))
        return blank + text if is_number else text + blank

    return ["  ".join(map(filled, row, widths, numbers)).rstrip() for row in shown]


def cells(text: str) -> int:
    """Returns how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def some(names: Sequence[str]) -> str:
    """Returns five names or fewer as they are, and more of them by groups."""
    return ", ".join(map(repr, names)) if len(names) <= _MAX_NAMES else grouped(names)


def grouped(names: Sequence[str]) -> str:
    """Returns names by what they have in common, as globs: "28 of `model.*.lora_A.weight`, `head`".

    Of all ways to cut names at both ends into three groups or fewer, it takes the one that says
    most of each name.
    """
    split = [tuple(name.split(".")) for name in names]
    best: tuple[int, list[tuple[int, str]]] = (-1, [])
    ends = range(5 if len(names) <= _MANY else 3)
    for first, last in itertools.product(ends, ends):
        groups: dict[tuple[_Parts, _Parts], list[_Parts]] = {}
        for parts in split:
            key = parts[:first], parts[len(parts) - min(last, max(0, len(parts) - first)) :]
            groups.setdefault(key, []).append(parts)
            if len(groups) > _MAX_GROUPS:
                break
        else:
            shown = [_shared(group) for group in groups.values()]
            said = sum(
                known * len(own) for (known, _), own in zip(shown, groups.values(), strict=True)
            )
            rows = [(len(own), glob) for (_, glob), own in zip(shown, groups.values(), strict=True)]
            best = max(best, (said, rows), key=lambda one: one[0])
    counts: Counter[str] = Counter()
    for count, glob in best[1]:
        counts[glob] += count
    others = counts.pop("*", 0)  # they have nothing in common
    if not counts:
        more = f" and {len(names) - _MAX_GROUPS} more" if len(names) > _MAX_GROUPS else ""
        return ", ".join(f"`{_cut(name)}`" for name in names[:_MAX_GROUPS]) + more
    ordered = sorted(counts.items(), key=lambda row: (-row[1], row[0]))
    texts = [f"`{glob}`" if count == 1 else f"{count} of `{glob}`" for glob, count in ordered]
    return ", ".join(texts) + (f" and {counted(others, 'other')}" if others else "")


def _shared(names: Sequence[_Parts]) -> tuple[int, str]:
    """Returns how many parts at both ends names have in common, and the glob of these."""
    if len(names) == 1:
        return len(names[0]), _cut(".".join(names[0]))
    least = min(map(len, names)) - 1  # so that the star stands for something in each
    heads = [set(parts) for parts in zip(*names, strict=False)]
    tails = [set(parts) for parts in zip(*map(reversed, names), strict=False)]
    first = next((at for at in range(least) if len(heads[at]) > 1), least)
    last = next((at for at in range(least - first) if len(tails[at]) > 1), least - first)
    parts = (*names[0][:first], "*", *names[0][len(names[0]) - last :])
    return first + last, _cut(".".join(parts))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_GLOB else f"{text[:_MAX_GLOB]}..."
