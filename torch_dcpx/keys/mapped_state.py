"""A state renamed to what is stored: each of its tensors as views under the stored names.

A planner that gets it plans as if the state had been made like the checkpoint, and what is read
goes straight to where it belongs: rules of a KeyMap cost no pass over the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.utils import find_state_dict_object

from torch_dcpx._compat import dtype_name, wanted_chunks, wanted_sizes
from torch_dcpx.errors import PlanError
from torch_dcpx.keys.key_map import KeyMap, unwrapped
from torch_dcpx.keys.mapped_tensor import MappedTensor, StoredPart
from torch_dcpx.metadata.lazy import outline_of, sizes_of
from torch_dcpx.tensors.memory import refuse_nested


class MappedTarget:
    """Views of the state's memory that make up what is wanted of one stored tensor."""

    def __init__(self, sizes: torch.Size) -> None:
        """Wants nothing yet of a stored tensor of `sizes`."""
        self._sizes = sizes
        self._parts: list[StoredPart] = []

    def add(self, part: StoredPart) -> None:
        """Wants one more part."""
        self._parts.append(part)

    def size(self) -> torch.Size:
        """Returns the stored tensor's sizes."""
        return self._sizes

    def dtypes(self) -> set[torch.dtype]:
        """Returns the views' dtypes."""
        return {part.view.dtype for part in self._parts}

    def view(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the memory of the part that a read item names."""
        for part in self._parts:
            if index.offset is not None and tuple(index.offset) == part.offsets:
                return part.view
        raise PlanError(
            f"nothing of '{index.fqn}' at {index.offset} was planned to be read", fqn=index.fqn
        )

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.lengths))
            for part in self._parts
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
    """Returns the prefix of the model's names, "model." in a checkpoint that has parts, else "".

    Parts are keys of the saved dict, as its planner noted them.
    """
    paths = metadata.planner_data
    if not isinstance(paths, dict):
        return ""
    is_part = any(
        isinstance(path, tuple) and len(path) > 1 and path[0] == "model" for path in paths.values()
    )
    return "model." if is_part else ""


def map_state(
    state: Mapping[str, Any], stored: Mapping[str, Any], key_map: KeyMap, part: str = ""
) -> MappedState:
    """Returns a flat state by stored names.

    Args:
        state: tensors and objects by their own names.
        stored: entries of the metadata.
        key_map: from stored names to the state's.
        part: what begins the stored names that are meant, and is left out. Default: all.

    Raises:
        PlanError: the map does not fit what is stored, or two names mean the same entry.
        UnsupportedError: a nested tensor without sizes.
    """
    sizes, outline = sizes_of(stored), outline_of(stored)
    entries = key_map.resolve(sizes, part=part)
    found = MappedState({}, {}, [], [], [], [])
    for name, entry_name in _matches(state, entries, key_map).items():
        if entry_name is None:
            found.missing.append(name)
        else:
            _add(found, name, state[name], entries[entry_name], sizes, outline)
    return found


def _matches(
    state: Mapping[str, Any], entries: Mapping[str, MappedTensor], key_map: KeyMap
) -> dict[str, str | None]:
    """Returns for each name of the state the entry that it means."""
    matches: dict[str, str | None] = {name: name if name in entries else None for name in state}
    if not key_map.wrappers:
        return matches
    owners = {entry: name for name, entry in matches.items() if entry is not None}
    exact = frozenset(owners)
    for name in state:
        bare = unwrapped(name)
        if matches[name] is not None or bare not in entries or bare in exact:
            continue
        if bare in owners:
            raise PlanError(
                f"'{owners[bare]}' and '{name}' of the state both mean '{bare}' of the checkpoint: "
                "KeyMap(wrappers=False) compares whole names",
                fqn=name,
            )
        owners[bare] = name
        matches[name] = bare
    return matches


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
    # Several names may be all of one stored tensor where it has no elements.
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
        stored = dict.fromkeys(outline(one).properties.dtype for one in entry.sources)
        found.dtypes.extend(_differing(name, stored, getattr(target, "dtype", None)))
        return
    for number, chunk in enumerate(wanted_chunks(target)):
        local = _local(name, target, chunk.offsets, number)
        for part in entry.parts_of(chunk.offsets, local):
            mapped = found.state.get(part.fqn)
            if not isinstance(mapped, MappedTarget):
                mapped = found.state[part.fqn] = MappedTarget(torch.Size(sizes[part.fqn] or ()))
            mapped.add(part)


def _differing(
    name: str, stored: Iterable[torch.dtype], wanted: torch.dtype | None
) -> list[tuple[str, str, str]]:
    """Returns (name, stored dtype, wanted one) for each stored dtype that is another one."""
    if wanted is None:
        return []
    return [(name, dtype_name(one), dtype_name(wanted)) for one in stored if one != wanted]


def _local(name: str, target: Any, offsets: Sequence[int], number: int) -> torch.Tensor:
    """Returns this rank's memory of one chunk."""
    index = MetadataIndex(name, torch.Size(offsets), number)
    local: torch.Tensor = find_state_dict_object({name: target}, index)
    return local
