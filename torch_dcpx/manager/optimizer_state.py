"""Blank states of optimizers, which a load fills: as many of each parameter as are stored.

A fresh optimizer has no state before its first step, and that step would change the training. So
the checkpoint describes the state: its metadata has names, sizes and dtypes. A tensor of the
parameter's sizes is sharded as the parameter is. A state that is not stored is not made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from torch_dcpx.keys.key_map import keeps_names, unwrapped
from torch_dcpx.manager.translate import TrainingRules, owner_of
from torch_dcpx.metadata.lazy import outline_of, sizes_of

_MAX_DEPTH = 64
_Path: TypeAlias = tuple[Any, ...]  # keys of dicts (str) and places in lists (int)


class StoredNames(NamedTuple):
    """The names that begin with a prefix, as the rules of a load make them, without it.

    Attributes:
        sources: the stored name of each.
        metadata: of the checkpoint.
    """

    sources: dict[str, str]
    metadata: Metadata

    @classmethod
    def of(cls, metadata: Metadata, prefix: str, rules: TrainingRules | None) -> StoredNames:
        """Raises: as `TrainingRules.resolve`."""
        stored = metadata.state_dict_metadata
        names: Iterable[tuple[str, str]]
        if rules is None or keeps_names(rules, stored):
            names = ((name, name) for name in stored)
        else:
            mapped = rules.resolve(sizes_of(stored))
            names = ((name, "".join(entry.sources[:1])) for name, entry in mapped.items())
        return cls(_beneath(prefix, names), metadata)

    def beneath(self, prefix: str) -> StoredNames:
        """Returns those that begin so, without it."""
        return StoredNames(_beneath(prefix, self.sources.items()), self.metadata)


def _beneath(prefix: str, names: Iterable[tuple[str, str]]) -> dict[str, str]:
    begin = len(prefix)
    return {name[begin:]: source for name, source in names if name.startswith(prefix)}


def blank_states(
    names: StoredNames,
    templates: Mapping[str, torch.Tensor],
    present: Mapping[str, Mapping[Any, Any]],
    *,
    has_wrappers: bool = False,
) -> dict[str, dict[str, Any]]:
    """Returns the states that a load fills, by parameter; none where none is stored.

    Tensors that are there are filled in place. Of others the bytes are undefined until then.

    Args:
        names: "PARAMETER.KEY" of what is stored.
        templates: tensors with the sizes and shards of the parameters, by name.
        present: what the optimizer holds now, by parameter.
        has_wrappers: whether stored names may lack what wrappers put into names of the parameters.
    """
    outline = outline_of(names.metadata.state_dict_metadata)
    bare = {unwrapped(name): name for name in templates} if has_wrappers else {}
    leaves: dict[str, dict[_Path, Any]] = {}
    for name, source in names.sources.items():
        stored_owner = owner_of(name, templates, bare)
        if stored_owner is None:
            continue
        owner = stored_owner if stored_owner in templates else bare[stored_owner]
        path = _path_of(source, name[len(stored_owner) + 1 :], names.metadata)
        now, entry = _at(present.get(owner), path), outline(source)
        leaf = None  # an object: what is stored takes its place
        if isinstance(entry, TensorStorageMetadata):
            is_there = isinstance(now, (torch.Tensor, ShardedTensor))
            leaf = now if is_there else _blank(templates[owner], entry, is_step=path[-1] == "step")
        leaves.setdefault(owner, {})[path] = leaf
    return {owner: _nested(own) for owner, own in leaves.items()}


def blank_groups(names: StoredNames, begin: int) -> list[dict[str, Any]]:
    """Returns the groups from a number on, for a load to fill.

    Args:
        names: "NUMBER.SETTING" of what is stored.
        begin: how many groups the optimizer has itself.
    """
    outline = outline_of(names.metadata.state_dict_metadata)
    leaves: dict[int, dict[_Path, Any]] = {}
    for name, source in names.sources.items():
        number, _, rest = name.partition(".")
        if rest and _is_number(number) and int(number) >= begin:
            entry, leaf = outline(source), None
            if isinstance(entry, TensorStorageMetadata):
                leaf = torch.empty(entry.size, dtype=entry.properties.dtype)
            leaves.setdefault(int(number), {})[_path_of(source, rest, names.metadata)] = leaf
    groups: list[dict[str, Any]] = []
    while ("params",) in leaves.get(begin + len(groups), ()):
        groups.append(_nested(leaves[begin + len(groups)]))
    return groups


def with_own_keys(loaded: Any, present: Any) -> Any:
    """Returns a loaded state with keys of dicts that are numbers: a checkpoint knows texts only.

    Args:
        loaded: the state of a parameter, or a part of it.
        present: the same of the optimizer as it is now; None where it has none.
    """
    if isinstance(loaded, list):
        now: Any = present if isinstance(present, (list, tuple)) else ()
        return [with_own_keys(v, now[i] if i < len(now) else None) for i, v in enumerate(loaded)]
    if not isinstance(loaded, dict):
        return loaded
    now = present if isinstance(present, Mapping) else {}
    own = {str(key): key for key in now}
    are_numbers = all(type(key) is str and _is_number(key) for key in loaded)
    made = {}
    for text, value in loaded.items():
        key = own.get(text, int(text) if are_numbers else text)
        made[key] = with_own_keys(value, now.get(key))
    return made


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and (text == "0" or text[0] != "0")


def _path_of(source: str, rest: str, metadata: Metadata) -> _Path:
    """Returns the keys beneath a parameter that end a stored name."""
    if "." not in rest:
        return (rest,)
    paths = metadata.planner_data
    path = paths.get(source) if isinstance(paths, dict) else None
    if not isinstance(path, tuple):
        parts = rest.split(".")
        path = tuple(int(part) if _is_number(part) else part for part in parts)
    for begin in range(len(path) - 1, -1, -1):
        if len(path) - begin > _MAX_DEPTH:
            break
        if ".".join(map(str, path[begin:])) == rest:
            return path[begin:]
    return (rest,)


def _at(state: Any, path: _Path) -> Any:
    """Returns the value at a path of a state; None where there is none."""
    for key in path:
        if isinstance(state, Mapping):
            state = next((value for own, value in state.items() if str(own) == str(key)), None)
        elif isinstance(state, (list, tuple)) and type(key) is int and 0 <= key < len(state):
            state = state[key]
        else:
            return None
    return state


def _nested(leaves: Mapping[_Path, Any]) -> dict[str, Any]:
    """Returns dicts and lists with each leaf at its path."""
    beneath: dict[Any, dict[_Path, Any]] = {}
    made: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        if len(path) == 1:
            made[path[0]] = leaf
        else:
            beneath.setdefault(path[0], {})[path[1:]] = leaf
    for key, own in beneath.items():
        inner: Any = _nested(own)
        if all(type(at) is int for at in inner) and sorted(inner) == list(range(len(inner))):
            inner = [inner[at] for at in range(len(inner))]
        made[key] = inner
    return made


def _blank(template: Any, entry: TensorStorageMetadata, *, is_step: bool) -> Any:
    """Returns a tensor to be filled with what is stored, sharded as the template if it has its
    sizes.

    Counters are tensors without dimensions that each rank has; a DTensor takes such as they are.
    """
    sizes, dtype = entry.size, entry.properties.dtype
    is_alike = tuple(sizes) == tuple(template.size()) and not is_step
    if isinstance(template, ShardedTensor):
        return _blank_shards(template, dtype) if is_alike else torch.empty(sizes, dtype=dtype)
    if isinstance(template, DTensor):
        if is_alike:
            return torch.empty_like(template, dtype=dtype, requires_grad=False)
        if len(sizes) > 0:
            local = torch.empty(sizes, dtype=dtype, device=template.to_local().device)
            mesh = template.device_mesh
            return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    device = template.device if len(sizes) > 0 else None
    return torch.empty(sizes, dtype=dtype, device=device)


def _blank_shards(template: ShardedTensor, dtype: torch.dtype) -> ShardedTensor:
    metadata = template.metadata()
    properties = dataclasses.replace(metadata.tensor_properties, dtype=dtype, requires_grad=False)
    shards = [
        Shard(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata)
        for shard in template.local_shards()
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        dataclasses.replace(metadata, tensor_properties=properties),
        process_group=template._process_group,
    )
