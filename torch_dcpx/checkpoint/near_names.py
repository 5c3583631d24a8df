"""Stored names that are near to one that is missing: other wrappers around it, or a typing error.

Wrappers put a component into a name (`_orig_mod.` of torch.compile, `module.` of DDP) where the
save had none, or the other way round; states are nested one level deeper or shallower.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch_dcpx.keys.key_map import WRAPPERS

_MAX_LENGTH = 300  # of names that are compared letter by letter
_MAX_COMPARED = 1000  # names, for one that is missing
_MAX_NEAREST = 3


def _unwrapped(name: str) -> str:
    """Returns a name without the components of wrappers, and without a leading `model`."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    begin = next((i for i, part in enumerate(parts) if part != "model"), 0)
    return ".".join(parts[begin:])


class NearNames:
    """Finds them among `stored`. The first question costs a walk over all of them."""

    def __init__(self, stored: Iterable[str]) -> None:
        """Searches `stored`: names that nobody asked for."""
        self._stored = list(stored)
        self._by_unwrapped: dict[str, list[str]] = {}
        for name in self._stored:
            self._by_unwrapped.setdefault(_unwrapped(name), []).append(name)

    def is_wrapped(self, name: str) -> bool:
        """Returns whether a stored name differs from this one by wrappers only."""
        return _unwrapped(name) in self._by_unwrapped

    def nearest(self, name: str) -> tuple[str, ...]:
        """Returns up to three stored names, the most likely first."""
        found = self._by_unwrapped.get(_unwrapped(name), [])
        if not found:
            found = [
                one
                for one in self._stored
                if one.endswith(f".{name}") or (one and name.endswith(f".{one}"))
            ]
        return tuple((found or self._alike(name))[:_MAX_NEAREST])

    def _alike(self, name: str) -> list[str]:
        if len(name) > _MAX_LENGTH:
            return []
        last = name.rpartition(".")[2]
        short = [one for one in self._stored if len(one) <= _MAX_LENGTH]
        # Among many, those of the same parameter are more likely than any others.
        short.sort(key=lambda one: one.rpartition(".")[2] != last)
        return difflib.get_close_matches(name, short[:_MAX_COMPARED], _MAX_NEAREST, cutoff=0.75)
