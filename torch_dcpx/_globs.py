"""Names and globs of names: which names do the patterns of a call mean? Imports nothing of torch.

A pattern that is a name means that name alone: `w[0]` is no glob where a tensor is called so. Else
it is a glob (`fnmatch`), and case matters.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import re
from collections.abc import Collection, Iterable

from torch_dcpx._text import counted

_MAX_SHOWN = 10  # names in an error


class Patterns:
    """Patterns, asked for one name after the other: `patterns(name)`."""

    def __init__(self, patterns: Iterable[str], *known: Collection[str]) -> None:
        """Reads patterns among the names that are known so far."""
        self._texts = frozenset(patterns)
        self._globs = self._texts
        self.learn(*known)

    def __call__(self, name: str) -> bool:
        """Returns whether a name is meant; a pattern always means the name that it spells."""
        return name in self._texts or self._match(name) is not None

    def learn(self, *known: Collection[str]) -> None:
        """Takes what is one of these names for no glob from now on."""
        self._globs = frozenset(g for g in self._globs if not any(g in names for names in known))
        self._match = re.compile("|".join(map(fnmatch.translate, self._globs)) or "(?!)").match


def chosen_names(
    names: Collection[str], patterns: Iterable[str], *others: Collection[str]
) -> list[str]:
    """Returns the names that patterns mean, in their order; without a pattern none.

    Args:
        others: names of the same question that stand elsewhere, such as on the other side of a
            diff: a pattern that is one of them is no glob, either.
    """
    names = _searchable(names)
    return list(filter(Patterns(patterns, names, *others), names))


def unmatched(
    names: Collection[str], patterns: Iterable[str], *others: Collection[str]
) -> list[str]:
    """Returns the patterns that mean none of the names. Args: as `chosen_names`."""
    names = _searchable(names)
    return [
        one for one in patterns if one not in names and not chosen_names(names, (one,), *others)
    ]


def names_beneath(name: str, *names: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """Returns the first names that begin with `name` and a dot, and text on them, "" if none do."""
    beneath = [one for one in itertools.chain(*names) if one.startswith(f"{name}.")]
    shown = tuple(beneath[:_MAX_SHOWN])
    if not shown:
        return (), ""
    more = f" and {len(beneath) - len(shown)} more" if len(beneath) > len(shown) else ""
    some = ", ".join(map(repr, shown))
    return shown, (
        f"is no name of it, but the beginning of {counted(len(beneath), 'name')}: {some}{more}; "
        f"{f'{glob.escape(name)}.*'!r} means all of them"
    )


def _searchable(names: Collection[str]) -> Collection[str]:
    return dict.fromkeys(names) if isinstance(names, (list, tuple)) else names
