"""Puts loaded values into a nested state, whose keys need not be texts.

A checkpoint knows a key by its text. Stock puts the value there: beside the state's own key 1 then
lies '1', which no save takes, and the state's value is the old one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint._traverse import set_element


class StateKeys:
    """The keys of a state's dicts by their texts. One per load: the dicts gain no others."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, dict[str, Any]]] = {}  # with the dict, to keep its id

    def of(self, container: Mapping[Any, Any], text: Any) -> Any:
        """Returns the key of this text in a dict; the text where the dict has none."""
        if text in container:
            return text
        known = self._known.get(id(container))
        if known is None:
            keys = {str(key): key for key in container if type(key) is not str}
            known = self._known[id(container)] = container, keys
        return known[1].get(text, text)

    def put(self, root: Any, path: Sequence[str | int], value: object) -> None:
        """Puts a value to a path of flattened names, under the state's own keys.

        Source: torch.distributed.checkpoint._traverse.set_element, which makes what is not there.
        """
        container, key = root, path[-1]
        for part in path[:-1]:
            own = self.of(container, part) if isinstance(container, Mapping) else part
            if not _has(container, own):
                set_element(root, tuple(path), value)
                return
            container = container[own]
        if isinstance(container, Mapping):
            container[self.of(container, key)] = value  # type: ignore[index]  # if it takes any
        elif _has(container, key):
            container[key] = value
        else:
            set_element(root, tuple(path), value)


def _has(container: Any, key: Any) -> bool:
    if isinstance(container, Mapping):
        return key in container
    return isinstance(container, list) and type(key) is int and 0 <= key < len(container)
