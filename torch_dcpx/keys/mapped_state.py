"""A state by stored names: its tensors become views under the names of the checkpoint.

The planner then plans as if the state had been made like the checkpoint, and reads go straight to
where the bytes belong: the rules of a KeyMap cost no pass over the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
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
    state: Mapping[str, Any], stored: Mapping[str, Any], key_map: KeyMap, part: str = ""
) -> MappedState:
    """Returns a flat state by stored names.

    Args:
        stored: entries of the metadata.
        key_map: from stored names to the state's.
        part: prefix of the stored names to map, which rules do not see. Default "": all.

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
    """Returns the entry that each name of the state means."""
    matches: dict[str, str | None] = {}
    owners: dict[str, str] = {}  # names of the state by the entries that they mean without wrappers
    for name in state:
        bare = unwrapped(name) if key_map.wrappers else name
        if name in entries:
            matches[name] = name
        elif bare not in entries or bare in state:
            matches[name] = None
        elif bare in owners:
            raise PlanError(
                f"'{owners[bare]}' and '{name}' of the state both mean '{bare}' of the checkpoint: "
                "KeyMap(wrappers=False) compares whole names",
                fqn=name,
            )
        else:
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
