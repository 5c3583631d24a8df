"""A state by stored names: its tensors become views under the names of the checkpoint.

The planner then plans as if the state had been made like the checkpoint, and reads go straight to
where the bytes belong: the rules of a KeyMap cost no pass over the data.

What a name of the state means in the checkpoint (`matched`): all names are read in one way, the one
that finds most of them. A name that differs in wrappers means the only stored name that does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.utils import find_state_dict_object

from torch_dcpx._compat import dtype_name, wanted_chunks, wanted_sizes
from torch_dcpx.errors import PlanError
from torch_dcpx.keys.key_map import KeyMap, readings
from torch_dcpx.keys.mapped_tensor import MappedTensor, Sizes, StoredPart
from torch_dcpx.keys.rules import Entries
from torch_dcpx.keys.wrappers import PRIVATE, has_words, renamed, unwrapped
from torch_dcpx.metadata.lazy import outline_of, sizes_of
from torch_dcpx.tensors.memory import refuse_nested

_NONE: Mapping[str, str] = MappingProxyType({})


class MappedTarget:
    """Views of the state's memory that make up what is wanted of one stored tensor."""

    def __init__(self, sizes: torch.Size) -> None:
        self._sizes = sizes  # of the stored tensor
        self.parts: list[StoredPart] = []

    def size(self) -> torch.Size:
        """Returns the stored tensor's sizes."""
        return self._sizes

    def dtypes(self) -> set[torch.dtype]:
        """Returns the views' dtypes."""
        return {part.view.dtype for part in self.parts}

    def view(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the memory of the part that a read item names."""
        for part in self.parts:
            if index.offset is not None and tuple(index.offset) == part.offsets:
                return part.view
        raise PlanError(
            f"nothing of '{index.fqn}' at {index.offset} was planned to be read", fqn=index.fqn
        )

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.lengths))
            for part in self.parts
        ]


class MappedState(NamedTuple):
    """A state by stored names, and how it does not fit what is stored."""

    state: dict[str, Any]
    names: dict[str, str]  # of the state, by stored name, of what is renamed only
    missing: list[str]  # names of the state of which nothing is stored
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]]  # name of the state, stored, wanted
    dtypes: list[tuple[str, str, str]]  # likewise, of tensors without elements
    kinds: list[tuple[str, str, str]]


def model_part(metadata: Metadata) -> str:
    """Returns the prefix of the model's names: "model." if the saved dict had that part, or ""."""
    paths = metadata.planner_data  # of the saved dict, as its planner noted them
    is_part = isinstance(paths, dict) and any(
        isinstance(path, tuple) and len(path) > 1 and path[0] == "model" for path in paths.values()
    )
    return "model." if is_part else ""


def map_state(
    state: Mapping[str, Any],
    stored: Mapping[str, Any],
    key_map: KeyMap,
    part: str = "",
    plain: Mapping[str, str] = _NONE,
) -> MappedState:
    """Returns a flat state by stored names.

    Args:
        stored: entries of the metadata.
        key_map: from stored names to the state's.
        part: prefix of the stored names to map, which rules do not see. Default "": all.
        plain: names without wrappers, of the state's names that a module at hand has.

    Raises:
        PlanError: the map does not fit what is stored, or a name may mean two entries.
        UnsupportedError: a nested tensor without sizes.
    """
    sizes, outline = sizes_of(stored), outline_of(stored)
    entries, meant = matched(key_map, sizes, state, part=part, plain=plain)
    found = MappedState({}, {}, [], [], [], [])
    for name in state:
        if name in meant:
            _add(found, name, state[name], entries[meant[name]], sizes, outline)
        else:
            found.missing.append(name)
    return found


class _Way(NamedTuple):
    """The entries that names mean if all of them are read in one way."""

    total: int
    exact: int  # of them, those whose names are equal
    entries: Entries
    meant: dict[str, str]  # names of entries by wanted name


def matched(
    key_map: KeyMap,
    stored: Mapping[str, Sizes | None],
    wanted: Iterable[str],
    *,
    part: str = "",
    plain: Mapping[str, str] = _NONE,
) -> tuple[Entries, dict[str, str]]:
    """Returns the entries that a map makes, and by wanted name the name of the entry it means.

    Args: as of `map_state`, and `wanted`, the names of the state.

    Raises: PlanError: as `readings`; a module's names mean two entries each.
    """
    spellings = _spellings(list(wanted), key_map, plain)
    nwanted, ways = len(spellings[0]), list[_Way]()
    for entries in readings(key_map, stored, part=part):
        ways += [_way(names, entries, is_whole=key_map.wrappers is False) for names in spellings]
        if any(way.total == nwanted for way in ways):
            break
    best = max(ways, key=lambda way: way[:2])
    if any(name != new for name, new in plain.items()):
        for way in ways:
            if way[:2] == best[:2]:
                _check_same(best, way)
    return best.entries, best.meant


def _spellings(
    wanted: list[str], key_map: KeyMap, plain: Mapping[str, str]
) -> list[dict[str, str]]:
    """Returns the names that may be stored, by wanted name: those of a module at hand first."""
    as_they_are = {name: name for name in wanted}
    if key_map.wrappers is False or not has_words(wanted):
        return [as_they_are]
    by_word = renamed(wanted, lambda name: unwrapped(name, PRIVATE))
    of_module = renamed(wanted, lambda name: plain.get(name, by_word[name]))
    found = [*([of_module] if plain else []), as_they_are, by_word]
    return [names for at, names in enumerate(found) if names not in found[:at]]


def _way(names: Mapping[str, str], entries: Entries, *, is_whole: bool) -> _Way:
    """Returns what names mean: the entry of that name, else the only one but for wrappers."""
    meant = {name: one for name, one in names.items() if one in entries}
    exact = len(meant)
    if exact < len(names) and not is_whole:
        bare = {name: unwrapped(name) for name in names}
        counts, stored = Counter(bare.values()), dict[str, list[str]]()
        for entry in entries:
            stored.setdefault(unwrapped(entry), []).append(entry)
        for name, one in bare.items():
            alike = stored.get(one, ())
            if counts[one] == len(alike) == 1:
                meant.setdefault(name, alike[0])
    return _Way(len(meant), exact, entries, meant)


def _check_same(best: _Way, other: _Way) -> None:
    """Raises PlanError if a name means two entries, and nothing says which."""
    for name, entry in best.meant.items():
        one = other.meant.get(name, entry)
        if other.entries[one] != best.entries[entry]:
            raise PlanError(
                f"'{name}' of the model may be '{entry}' or '{one}' of the checkpoint: "
                f"key_map=KeyMap({{{one!r}: None}}) takes the first, and KeyMap(wrappers=False) "
                "compares whole names",
                fqn=name,
            )


def _add(
    found: MappedState,
    name: str,
    target: Any,
    entry: MappedTensor,
    sizes: Mapping[str, tuple[int, ...] | None],
    outline: Callable[[str], Any],
) -> None:
    """Puts one tensor or object of the state under the stored names that fill it."""
    source = entry.pieces[0].fqn
    # Several names may each be the whole of one stored tensor that has no elements.
    if source not in found.state and entry.is_whole(sizes[source]):
        found.state[source] = target
        found.names[source] = name
        return
    is_tensor = isinstance(target, torch.Tensor) or hasattr(target, "__create_chunk_list__")
    if not is_tensor or entry.sizes is None:
        found.kinds.append((name, "tensor", f"object ({type(target).__name__})"))
        return
    refuse_nested(name, target)
    wanted = wanted_sizes(target)
    if wanted is not None and wanted != entry.sizes:
        found.shapes.append((name, entry.sizes, wanted))
        return
    if 0 in entry.sizes:
        dtype = getattr(target, "dtype", None)
        for stored in dict.fromkeys(outline(one).properties.dtype for one in entry.sources):
            if dtype not in (None, stored):
                found.dtypes.append((name, dtype_name(stored), dtype_name(dtype)))
        return
    for number, chunk in enumerate(wanted_chunks(target)):
        index = MetadataIndex(name, chunk.offsets, number)
        local = find_state_dict_object({name: target}, index)
        for part in entry.parts_of(chunk.offsets, local):
            mapped = found.state.get(part.fqn)
            if not isinstance(mapped, MappedTarget):
                mapped = found.state[part.fqn] = MappedTarget(torch.Size(sizes[part.fqn] or ()))
            mapped.parts.append(part)
