"""The dicts of a Metadata over the columns of our `.metadata`, filled when a caller looks.

To make a million chunks as DCP's objects takes as long as the load. A planner wants the names of
its own state, a reader the places of its own items: only these are made. C++ has checked the
columns before.

    StoredEntries   state_dict_metadata: has all names, makes an entry on demand
    StoredPlaces    storage_data: finds and makes places one by one, keys when all are wanted
    StoredPaths     planner_data: made as a whole at the first look

To its user each is a dict. A caller that looks at all values, or changes one, fills the dict: from
then on it is as any dict, and `columns` is None.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata

from torch_dcpx import _compat
from torch_dcpx._gc import paused_gc
from torch_dcpx._native import _C
from torch_dcpx._plan_classes import MAKER
from torch_dcpx.metadata.stock_classes import MEMORY_FORMATS

_T = TypeVar("_T", bound="_Filled")


class _Filled(dict[Any, Any]):
    """A dict whose values are made on demand. Threads may read it at once, as any dict."""

    __slots__ = ("_lock", "columns")
    columns: Any  # the source of the values; None once all are there
    _lock: threading.RLock  # a signal handler may look while its thread fills

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Makes a dict as any other: `dataclasses.asdict` calls the class of a dict so."""
        super().__init__(*args, **kwargs)
        self.columns = None
        self._lock = threading.RLock()

    def _fill(self) -> None:
        """Makes all missing values; after an interrupt anywhere, the next call does it again."""
        if self.columns is None:
            return
        with self._lock:
            if self.columns is None:  # another thread was faster
                return
            with paused_gc():
                made = self._all()
            super().update(made)
            self.columns = None

    @classmethod
    def over(cls: type[_T], columns: Any, numbers: Mapping[str, int] | tuple[()] = ()) -> _T:
        """Returns a dict to be filled from `columns`; `numbers` are those of entries by name."""
        self = cls(numbers)
        self.columns = columns
        return self

    def _all(self) -> Any:
        """Returns all of it. REQUIRES: _lock, and columns."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles, copies and deep-copies it as a plain dict."""
        self._fill()
        return dict, (), None, None, iter(dict.items(self))

    def __iter__(self) -> Iterator[Any]:
        # In Python: C code takes no class with an iterator of its own for a plain dict.
        self._fill()
        return super().__iter__()


def _filling(name: str) -> Any:
    method: Callable[..., Any] = getattr(dict, name)

    def filled(self: _Filled, *args: Any, **kwargs: Any) -> Any:
        self._fill()
        for other in args:  # whose table a method of dict may read as it is
            if isinstance(other, _Filled):
                other._fill()
        return method(self, *args, **kwargs)

    filled.__name__ = name
    filled.__doc__ = method.__doc__
    return filled


# Every method of dict looks at its table or changes it, but for these.
_OTHERS = {"__class_getitem__", "__getattribute__", "__hash__", "__new__", "__sizeof__", "fromkeys"}
for _name in vars(dict).keys() - vars(_Filled).keys() - _OTHERS:
    setattr(_Filled, _name, _filling(_name))


# Flatten leaves empty dicts out, so a list may have gaps. So many places are no bomb.
_SPARE_PLACES = 1 << 16
_PLACES_A_KEY = 64
MANY_PLACES = 256  # a list up to here is always let be


def have_full_lists(paths: Mapping[Any, object], names: Container[Any]) -> bool:
    """Returns whether the lists of a state of these paths are about as long as the paths are many.

    A load without a template makes each list as long as its highest index says, at 8 B a place.
    Paths of names that are not stored, and values that are no tuple or list, are a planner's own:
    they make no list.
    """
    known = [
        path for name, path in paths.items() if isinstance(path, (tuple, list)) and name in names
    ]
    limit = _PLACES_A_KEY * sum(map(len, known)) + _SPARE_PLACES
    root: dict[Any, Any] = {}  # what lies under each key; under None the length of a list
    for path in known:
        node = root
        if set(map(type, path)) <= {str}:
            continue
        for key in path:
            if isinstance(key, (int, float)):
                grown = int(key) + 1 - node.get(None, 0) if 0 <= key < limit else limit + 1
                limit -= max(grown, 0)
                if limit < 0:
                    return False
                node[None] = max(node.get(None, 0), int(key) + 1)
            elif not isinstance(key, str):
                break  # no path of flatten's
            node = node.setdefault(key, {})
    return True


class StoredPaths(_Filled):
    """Metadata.planner_data that is a flatten mapping, over its columns."""

    __slots__ = ()

    def _all(self) -> Any:
        return self.columns()


def stored_paths(
    strings: list[str],
    fqns: Sequence[int],
    counts: Sequence[int],
    tags: Sequence[int],
    values: Sequence[int],
) -> StoredPaths:
    """Returns the paths of checked columns."""

    def make() -> dict[str, tuple[str | int, ...]]:
        keys = [value if tag else strings[value] for tag, value in zip(tags, values, strict=True)]
        rows = zip(fqns, counts, accumulate(counts), strict=True)
        return {strings[fqn]: tuple(keys[end - count : end]) for fqn, count, end in rows}

    return StoredPaths.over(make)


class StoredEntries(_Filled):
    """Metadata.state_dict_metadata over columns."""

    __slots__ = ()

    # The keys are there from the beginning; the value of one whose entry is not made is its number.
    __contains__ = dict.__contains__
    __len__ = dict.__len__
    __reversed__ = dict.__reversed__
    keys = dict.keys

    def __iter__(self) -> Iterator[Any]:
        return dict.__iter__(self)  # not dict's own function, see _Filled

    def __getitem__(self, name: Any) -> Any:
        entry = dict.__getitem__(self, name)
        return entry if type(entry) is not int else self._made(name)

    def get(self, name: Any, default: Any = None) -> Any:
        # Not by dict.get: a default may be an int too.
        return self[name] if name in self else default  # noqa: SIM401

    def _stored(self, name: Any) -> tuple[Any, Any]:
        """Returns (number, columns) while the entry is not made, else (entry or None, None)."""
        with self._lock:
            entry = dict.get(self, name)
            return entry, self.columns if type(entry) is int else None

    def outline(self, name: Any) -> Any:
        """Returns the entry, without chunks while it is not made, or None."""
        entry, columns = self._stored(name)
        return entry if columns is None else columns.entry(entry, has_chunks=False)

    def chunks(self, name: Any) -> Any:
        """Returns the chunks of a tensor; its number in `columns` while it is not made."""
        entry, columns = self._stored(name)
        return entry if columns is not None else self[name].chunks

    def chunk(self, name: Any, at: int) -> Any:
        """Returns one chunk of a tensor; makes no other one."""
        entry, columns = self._stored(name)
        return entry.chunks[at] if columns is None else columns.chunk(entry, at)

    def _made(self, name: Any) -> Any:
        with self._lock:  # all threads get one object
            entry, columns = dict.__getitem__(self, name), self.columns
            if type(entry) is not int or columns is None:
                return entry
            entry = columns.entry(entry)
            dict.__setitem__(self, name, entry)
            return entry

    def _all(self) -> dict[Any, Any]:
        raw = dict.copy(self)
        missing = {name: number for name, number in raw.items() if type(number) is int}
        raw.update(zip(missing, self.columns.entries(list(missing.values())), strict=True))
        return raw


_MISSING = object()


class StoredPlaces(_Filled):
    """Metadata.storage_data over columns."""

    __slots__ = ()

    def __len__(self) -> int:
        columns = self.columns
        return dict.__len__(self) if columns is None else columns.item_count

    def __contains__(self, index: object) -> bool:
        return self.get(index, _MISSING) is not _MISSING

    def __getitem__(self, index: Any) -> Any:
        place = self.get(index, _MISSING)
        if place is _MISSING:
            raise KeyError(index)
        return place

    def get(self, index: Any, default: Any = None) -> Any:
        if self.columns is not None:
            with self._lock:  # not while all are made: there is one object for an index
                place = NotImplemented if self.columns is None else self.columns.place(index)
            if place is not NotImplemented:
                return default if place is None else place
            self._fill()
        return dict.get(self, index, default)

    def find(self, indices: list[Any]) -> list[Any]:
        """Returns the places of many items; None for each that is not stored."""
        with self._lock:
            places = None if self.columns is None else self.columns.places(indices)
        return list(map(self.get, indices)) if places is None else places

    def _all(self) -> Any:
        return self.columns.all_places()


def stored_dicts(
    strings: list[str],
    columns: dict[str, Any],
    names: Mapping[str, int],
    dtypes: Mapping[int, Any],
    layouts: Mapping[int, Any],
    descriptors: Sequence[list[str] | None],
    hash_key: bytes,
) -> tuple[StoredEntries, StoredPlaces] | None:
    """Returns state_dict_metadata and storage_data over columns; None where two items are one.

    Args:
        strings: that the columns number.
        columns: bytes or views by name (docs/reference/format.md), checked.
        names: numbers of the entries.
        dtypes, layouts: torch's, by the numbers of their strings.
        descriptors: the distinct transform_descriptors; the last one is None.
        hash_key: 16 random bytes, so that no file chooses which indices collide.
    """
    values = {
        "dtype": dtypes,
        "layout": layouts,
        "memory_formats": list(MEMORY_FORMATS),
        "descriptors": descriptors,
        "StorageInfo": _StorageInfo,
        "hash_key": hash_key,
        "has_strides": _compat.HAS_STRIDES,
    }
    stored = _C.StoredColumns(MAKER, strings, columns, values)
    if stored.has_twins:
        return None
    return StoredEntries.over(stored, names), StoredPlaces.over(stored)


def outline_of(stored: Mapping[str, Any]) -> Callable[[str], STORAGE_TYPES | None]:
    """Returns a function from a name to its entry or None, if possible without chunks."""
    return stored.outline if isinstance(stored, StoredEntries) else stored.get


def raw_entries(stored: Mapping[str, Any]) -> tuple[dict[str, Any], _C.StoredColumns | None]:
    """Returns entries, or their numbers in the columns, by name; and the columns or None."""
    if isinstance(stored, StoredEntries):
        return stored, stored.columns
    return stored if isinstance(stored, dict) else dict(stored), None


def chunks_in(stored: Mapping[str, Any]) -> Callable[[str], Any]:
    """Returns a function from a tensor's name to its chunks; to its number until they are made."""
    if isinstance(stored, StoredEntries):
        return stored.chunks
    return lambda name: stored[name].chunks


def plain_metadata(metadata: Metadata) -> Metadata:
    """Returns metadata of plain dicts, to encode what a reader has handed out."""
    found = {key: dict(own) for key, own in vars(metadata).items() if isinstance(own, _Filled)}
    return dataclasses.replace(metadata, **found) if found else metadata  # type: ignore[arg-type]


def sizes_of(stored: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """Returns the sizes of the tensors in a Metadata's entries, None for objects."""
    return {
        name: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in zip(stored, map(outline_of(stored), stored), strict=True)
    }
