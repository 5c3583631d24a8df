"""Keys of dicts and sets that a file chose so that they all meet in one place of the hash table.

Python hashes numbers, and tuples of numbers, by a formula that everybody knows: 200 KB of ints that
are multiples of 2^61 - 1 take ten seconds to insert, 2 MB twenty minutes. Texts and bytes are safe
(their hash has a random key), so are stand-ins (by identity). `scan_pickle` counts the other keys.
`KeyCheckedUnpickler` reads a pickle with many of them, and looks at the hash of each key before it
inserts it. `check_keys` does the same for objects that are built afterwards.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

MAX_SAME_HASH = 64  # honest keys: two, -1 and -2
MAX_COMPOUND_KEYS = 512  # numbers of 64 bits and tuples that may be keys without a look at each


def _refuse(count: int) -> None:
    raise pickle.UnpicklingError(
        f"has {count} keys with one hash, made so that a dict or set of them takes hours"
    )


def check_keys(keys: Collection[Any]) -> None:
    """Refuses keys of a dict or set if more than `MAX_SAME_HASH` of them have one hash."""
    if len(keys) <= MAX_SAME_HASH or all(type(key) is str for key in keys):
        return
    most = max(Counter(map(hash, keys)).values())
    if most > MAX_SAME_HASH:
        _refuse(most)


_Python: Any = pickle._Unpickler  # whose opcodes are methods


class KeyCheckedUnpickler(_Python):  # type: ignore[misc]
    """Python's own unpickler, an opcode at a time, with a look at every key of a scanned pickle."""

    def __init__(
        self,
        data: bytes | memoryview,
        find_class: Callable[[str, str], Any],
        persistent_load: Callable[[Any], Any],
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.find_class = find_class
        self.persistent_load = persistent_load
        # By id of the container, which is kept: no other one gets its id.
        self._hashes: dict[int, tuple[Any, dict[int, int]]] = {}

    def _check(self, container: Any, keys: Iterable[Any]) -> None:
        _, counts = self._hashes.setdefault(id(container), (container, {}))
        for key in keys:
            found = hash(key)
            counts[found] = count = counts.get(found, 0) + 1
            if count > MAX_SAME_HASH:
                _refuse(count)

    def _set(self, items: list[Any]) -> None:
        """Puts keys and values by turns into the container on the stack."""
        target = self.stack[-1]
        self._check(target, items[::2])
        for i in range(0, len(items), 2):
            target[items[i]] = items[i + 1]

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set(items)

    def _load_additems(self) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        self._check(target, items)
        for item in items:
            target.add(item)

    def _load_frozenset(self) -> None:
        items = self.pop_mark()
        check_keys(items)
        self.append(frozenset(items))

    dispatch: ClassVar[Any] = {
        **_Python.dispatch,
        pickle.SETITEM[0]: _load_setitem,
        pickle.SETITEMS[0]: _load_setitems,
        pickle.DICT[0]: _load_dict,
        pickle.ADDITEMS[0]: _load_additems,
        pickle.FROZENSET[0]: _load_frozenset,
    }
