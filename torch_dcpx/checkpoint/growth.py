"""Entries that only the checkpoint holds: a load makes room for them, for what was saved is the
template, not the fresh object. A dict that was empty when the process began, a list that was
shorter, and extra states of modules come back as they were.

It changes the state before ranks agree on the load; `undo` makes it as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping
from itertools import filterfalse
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_dcpx.checkpoint.containers import Kept, Path, TensorKind, are_numbers, read_containers
from torch_dcpx.checkpoint.stateful import EXTRA_STATE, Takes, is_extra_state
from torch_dcpx.reader.elements import StateKeys
from torch_dcpx.reader.reader import DcpxReader

logger = logging.getLogger("torch_dcpx")

_HOLE: Any = object()  # an element of a list that has no value yet


class Growth:
    """The changes of one load to the state of this rank."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def keep(self) -> None:
        """Leaves the changes as they are: the load has filled them."""
        self._undo.clear()

    def undo(self) -> None:
        """Takes all changes back, the last one first."""
        while self._undo:
            self._undo.pop()()

    def note(self, container: Any, key: Any, value: list[Any]) -> None:
        """Notes a list at a place that it is to have again: torch's planner makes lists anew."""
        self._undo.append(lambda: container.__setitem__(key, value))

    def put(self, container: Any, key: Any, value: Any) -> None:
        """Puts a value into a dict or list, which grows. Raises TypeError: it takes none."""
        if isinstance(container, list):
            length = len(container)
            container.extend([_HOLE] * (key + 1 - length))
            self._undo.append(lambda: container.__delitem__(slice(length, None)))
        elif not isinstance(container, MutableMapping):
            raise TypeError(f"a {type(container).__name__} takes no entry")
        old = container[key] if not isinstance(container, Mapping) or key in container else _HOLE
        container[key] = value
        if old is not _HOLE:
            self._undo.append(lambda: container.__setitem__(key, old))
        elif not isinstance(container, list):
            self._undo.append(lambda: container.pop(key, None))

    def take(self, container: MutableMapping[Any, Any], key: Any) -> None:
        """Takes a value out of a dict."""
        old = container.pop(key)
        self._undo.append(lambda: container.__setitem__(key, old))


class Grower:
    """Makes the entries of one load's parts. `kept` says what names do not tell."""

    def __init__(
        self,
        growth: Growth,
        stored: Mapping[str, Any],
        kept: Mapping[Path, Kept],
        numbered: Container[Path] = (),
        tensors: Mapping[Path, TensorKind] = MappingProxyType({}),
    ) -> None:
        """`stored` are the entries of the metadata, `numbered` paths of dicts whose keys are ints
        though nothing says so, `tensors` what entries do not say.
        """
        self._tensors = tensors
        self._numbered = numbered
        self._growth = growth
        self._stored = stored
        self._kept = kept
        self._keys = StateKeys()
        self._made: dict[Path, Any] = {}  # new dicts and lists, by their paths
        self._touched: dict[Path, list[Any]] = {}  # lists with a new element
        self._added: dict[Path, tuple[Any, dict[str, Any]]] = {}  # dicts, new keys by text
        self._told: set[Path] = set()  # dicts whose keys are taken for numbers
        self._siblings: dict[Path, set[str | int]] = {}  # new keys as texts, by path of their dict

    @classmethod
    def of_saved(
        cls, growth: Growth, metadata: Metadata, reader: DcpxReader, numbered: Container[Path]
    ) -> Grower:
        """Returns one that knows what a checkpoint tells. Raises: as `read_containers`."""
        kept, tensors = read_containers(reader, metadata)
        return cls(growth, metadata.state_dict_metadata, kept, numbered, tensors)

    def grow(
        self, state: Any, parts: Mapping[Any, Takes], names: Mapping[str, Path]
    ) -> list[tuple[str, str]]:
        """Makes an entry for each name at its path in the parts of a state, and what is nameless.
        Returns names of which it can make none, and why.
        """
        refused, keys = [], {str(key): key for key in parts}
        for path in names.values():
            for at in range(1, len(path)):
                self._siblings.setdefault(path[:at], set()).add(path[at])
        for name, path in names.items():
            try:
                self._add(state[keys[str(path[0])]], path, self._blank(name, path))
            except (TypeError, ValueError, RuntimeError) as error:  # the last: no memory
                refused.append((name, str(error)))
        for path in self._nameless(parts):
            try:
                self._add_empty(state[keys[str(path[0])]], path)
            except TypeError as error:
                refused.append((_name(path), str(error)))
        for path, (container, added) in self._added.items():
            for text in self._kept.get(path, Kept()).order:
                if text in added:  # to the end
                    container[added[text]] = container.pop(added[text])
        for path, each in self._touched.items():
            holes = [(*path, at) for at, value in enumerate(each) if value is _HOLE]
            why = "an empty dict or list, of which nothing says which"
            refused += [(_name(hole), why) for hole in holes]
        return refused

    def lacks(self, state: Any, parts: Mapping[Any, Takes]) -> bool:
        """Returns whether anything nameless that these parts take is not there."""
        keys = {str(key): key for key in parts}
        try:
            return any(self._gap(state[keys[str(path[0])]], path) for path in self._nameless(parts))
        except TypeError:  # its key cannot be told: `grow` says so
            return True

    def _nameless(self, parts: Mapping[Any, Takes]) -> list[Path]:
        """Returns the paths of what has, or may have, no name beneath these parts."""
        found = [path for path in self._kept if _is_taken(path, parts)]
        return sorted(found, key=len)

    def replace(
        self,
        state: Any,
        unlike: tuple[Iterable[str], Iterable[str], Iterable[str]],
        metadata: Metadata,
        paths: Mapping[str, Path],
        parts: Mapping[Any, Takes],
    ) -> bool:
        """Puts what is stored in place of values, where it can be made. Returns whether any was.

        These are extra states of other sizes or kinds, or with names that are not stored, and
        values of other kinds in parts that take all: `unlike` has their names.
        """
        is_any = False
        sized, kinds, missing = unlike
        for is_kind, names in enumerate((sized, kinds)):
            for name in names:
                path = paths.get(name, ())
                takes_any = is_kind and path and parts.get(path[0]) is Takes.ALL
                if name in self._stored and (takes_any or any(map(is_extra_state, path))):
                    is_any |= self._replace(state, path, name)
        roots = {
            path[: at + 1]
            for path in (paths.get(name, ()) for name in missing)
            for at, key in enumerate(path)
            if is_extra_state(key)
        }
        for root in roots:
            is_any |= self._make_anew(state, root, metadata, parts)
        return is_any

    def _make_anew(
        self, state: Any, root: Path, metadata: Metadata, parts: Mapping[Any, Takes]
    ) -> bool:
        """Makes an extra state as it was saved. Returns whether any was."""
        begin = f"{_name(root)}."
        names = [name for name in self._stored if f"{name}.".startswith(begin)]
        if not names and root not in self._kept:
            return False
        container = state
        for part in root[:-1]:
            container = container[self._key(container, (), part)]
        self._growth.take(container, self._key(container, (), root[-1]))
        self.grow(state, parts, paths_of(names, metadata, parts))
        return True

    def _replace(self, state: Any, path: Path, name: str) -> bool:
        container, last = state, path[-1]
        for part in path[:-1]:
            container = container[self._key(container, (), part)]
        key = self._key(container, (), last)
        try:
            made = self._blank(name, path, getattr(container[key], "device", None))
        except ValueError:
            return False
        self._growth.put(container, key, made)
        return True

    def _blank(self, name: str, path: Path, device: torch.device | None = None) -> Any:
        """Returns a tensor for a load to fill, None where an object was saved.

        Raises ValueError: it was saved in pieces, and nothing says how to share it.
        """
        entry = self._stored[name]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        if len(entry.chunks) != 1:
            raise ValueError(f"a tensor that was saved in {len(entry.chunks)} pieces, for shards")
        if entry.properties.layout is not torch.strided:
            raise ValueError(f"a tensor of layout {entry.properties.layout}")
        kind = self._tensors.get(path, TensorKind())
        return kind.blank(entry.size, entry.properties.dtype, device)

    def _add(self, state: Any, path: Path, leaf: Any) -> None:
        container = state
        for at in range(1, len(path)):
            here, key = path[:at], self._key(container, path[:at], path[at])
            if at == len(path) - 1:
                child = _at(container, key)
                if isinstance(child, (Mapping, list)) and child:
                    raise TypeError("it was one value, and is a dict or list with values here")
                self._put(container, here, key, leaf)
                return
            child = _at(container, key)
            end = path[: at + 1]
            if not (end in self._made or end in self._touched or _is_way(child, path[at + 1])):
                is_kept = isinstance(child, torch.Tensor) and not is_extra_state(key)
                if is_kept or (isinstance(child, Mapping) and child):
                    kind = type(child).__name__
                    raise TypeError(f"it was a dict or list, and is a {kind} here")
                child = self._new(end, path[at + 1])
                self._put(container, here, key, child)
            elif isinstance(child, list):
                self._growth.note(container, key, child)
            container = child

    def _put(self, container: Any, path: Path, key: Any, value: Any) -> None:
        if isinstance(container, list):
            self._touched[path] = container
        elif key not in container:
            self._added.setdefault(path, (container, {}))[1][str(key)] = key
        self._growth.put(container, key, value)

    def _new(self, path: Path, inner: str | int | None) -> Any:
        """Returns a new dict for a text within, a list for an index, the saved one for None."""
        kept = self._kept.get(path, Kept())
        made = [] if type(inner) is int and not kept.kind else kept.made()
        if made is None or not (inner is None or _is_way(made, inner)):
            raise TypeError(f"it lies in a {kept.kind}, which no load makes anew")
        self._made[path] = made
        return made

    def _key(self, container: Any, path: Path, part: str | int) -> Any:
        """Returns the key that was saved. Raises TypeError: it cannot be told."""
        if type(part) is int:
            return part
        if not isinstance(container, Mapping):
            raise TypeError(f"it lies in a dict, and here is a {type(container).__name__}")
        own = self._keys.of(container, part)
        if own in container:
            return own
        if path not in self._kept and self._is_numbered(container, path):
            return int(part)
        kept = self._kept.get(path, Kept()).keys.get(str(part), part)
        if type(kept) is Kept:
            raise TypeError("its key was an object that no load makes anew")
        return kept

    def _is_numbered(self, container: Mapping[Any, Any], path: Path) -> bool:
        """Returns whether new keys of a dict are ints, of which an earlier save, or stock's, said
        nothing: as those that are there; or if all can be, as of `torch.optim.Optimizer`.
        """
        own = {
            type(key) for key in container if key not in self._added.get(path, (0, {}))[1].values()
        }
        if not are_numbers(self._siblings.get(path, ())) or own - {int}:
            return False
        if not own and path not in self._numbered and path not in self._told:
            self._told.add(path)
            text = (
                "nothing says whether the keys of '%s' were numbers or texts; they are numbers now"
            )
            logger.warning(text, _name(path))
        return True

    def _add_empty(self, part: Any, path: Path) -> None:
        """Puts a nameless dict or list to its path, if what was around it is there."""
        gap = self._gap(part, path)
        if gap is not None:
            self._put(gap[0], path[:-1], gap[1], self._new(path, None))

    def _gap(self, part: Any, path: Path) -> tuple[Any, Any] | None:
        """Returns the dict or list that lacks a nameless one, and its key there."""
        kept, around = self._kept[path], part
        key: Any = None
        for at in range(1, len(path)):
            around = part if at == 1 else _at(around, key)
            if not isinstance(around, list if type(path[at]) is int else Mapping):
                return None
            key = self._key(around, path[:at], path[at])
        if not (kept.is_nameless or path[:-1] in self._made or path[:-1] in self._touched):
            return None  # an older save does not say what is nameless
        if isinstance(around, list):
            is_there = key < len(around) and around[key] is not _HOLE
        else:
            is_there = key in around
        now = _at(around, key) if is_there else None
        is_list = kept.kind == "list" and isinstance(now, Mapping) and not now
        return (around, key) if not is_there or is_list else None


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _at(container: Any, key: Any) -> Any:
    """Returns what lies at a key of a dict or place of a list; None where nothing is."""
    if isinstance(container, Mapping):
        return container.get(key)
    return container[key] if 0 <= key < len(container) else None


def _is_way(value: Any, inner: str | int) -> bool:
    """Returns whether names lead into a value: into a list by an index, into a dict by a text."""
    if type(inner) is not int or not isinstance(value, list):
        return type(inner) is not int and isinstance(value, Mapping)
    # A list without any of these is one value, such as a list of numbers.
    return not value or any(isinstance(v, (Mapping, list, torch.Tensor)) for v in value)


def new_names(
    stored: Mapping[str, Any], flat: Container[str], parts: Mapping[Any, Takes]
) -> list[str]:
    """Returns the stored names beneath parts that take them and that have no such name."""
    beginnings = {f"{key}.": takes for key, takes in parts.items() if takes is not Takes.NOTHING}
    if not beginnings:
        return []
    return [
        name
        for name in filterfalse(flat.__contains__, stored)
        for beginning, takes in beginnings.items()
        if name.startswith(beginning) and (takes is Takes.ALL or EXTRA_STATE in name)
    ]


def paths_of(
    names: Iterable[str], metadata: Metadata, parts: Mapping[Any, Takes]
) -> dict[str, Path]:
    """Returns the paths of those names that were saved beneath a part that takes them, in the
    state's order: the entries stand rank by rank.
    """
    paths, found, wanted = metadata.planner_data, {}, set(names)
    for name in paths if isinstance(paths, Mapping) and wanted else ():
        if name not in wanted:
            continue
        path = paths[name]
        is_path = isinstance(path, tuple) and len(path) > 1 and {*map(type, path)} <= {str, int}
        if is_path and _name(path) == name and _is_taken(path, parts):
            found[name] = path
    return found


def _is_taken(path: Path, parts: Mapping[Any, Takes]) -> bool:
    """Returns whether a path lies beneath a part that takes it."""
    if len(path) < 2:
        return False
    takes = next((own for key, own in parts.items() if str(key) == path[0]), Takes.NOTHING)
    return takes is Takes.ALL or (takes is not Takes.NOTHING and is_extra_state(path[1]))
