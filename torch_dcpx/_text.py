"""Words of messages: text that files may have chosen, counts, names in groups."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

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
