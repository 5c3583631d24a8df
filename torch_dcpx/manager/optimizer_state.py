"""Blank states of optimizers for a load to fill: for each parameter those that are stored.

A fresh optimizer has no state before its first step, and that step would change the training. So
the metadata describes the state: names, sizes and dtypes. A tensor of the parameter's sizes is
sharded as the parameter is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import count
from typing import Any, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from torch_dcpx.keys.key_map import keeps_names
from torch_dcpx.keys.wrappers import unwrapped
from torch_dcpx.manager.translate import TrainingRules, beneath, owner_of
from torch_dcpx.metadata.lazy import outline_of, sizes_of

_MAX_DEPTH = 64
_Path: TypeAlias = tuple[Any, ...]  # keys of dicts (str) and places in lists (int)


def stored_names(metadata: Metadata, prefix: str, rules: TrainingRules | None) -> dict[str, str]:
    """Returns stored names by new ones, `beneath` a prefix. Raises: as `resolve`."""
    stored = metadata.state_dict_metadata
    if rules is None or keeps_names(rules, stored):
        return beneath(prefix, ((name, name) for name in stored))
    mapped = rules.resolve(sizes_of(stored))
    return beneath(prefix, ((name, "".join(entry.sources[:1])) for name, entry in mapped.items()))


def blank_states(
    names: Mapping[str, str],
    metadata: Metadata,
    templates: Mapping[str, torch.Tensor],
    present: Mapping[str, Mapping[Any, Any]],
    *,
    has_wrappers: bool = False,
) -> dict[str, dict[str, Any]]:
    """Returns the states that a load fills, by parameter: present tensors, and new ones.

    Args:
        names: stored names by "PARAMETER.KEY".
        templates: tensors with the sizes and shards of the parameters, by name.
        present: states of the optimizer now, by parameter.
        has_wrappers: whether stored names may lack the components of wrappers.
    """
    outline = outline_of(metadata.state_dict_metadata)
    bare = {unwrapped(name): name for name in templates} if has_wrappers else {}
    leaves: dict[str, dict[_Path, Any]] = {}
    for name, source in names.items():
        stored_owner = owner_of(name, templates, bare)
        if stored_owner is None:
            continue
        owner = stored_owner if stored_owner in templates else bare[stored_owner]
        path = _path_of(source, name[len(stored_owner) + 1 :], metadata)
        now, entry = _at(present.get(owner), path), outline(source)
        leaf = None  # an object: the load puts the stored one in its place
        if isinstance(entry, TensorStorageMetadata):
            is_there = isinstance(now, (torch.Tensor, ShardedTensor))
            leaf = now if is_there else _blank(templates[owner], entry, is_step=path[-1] == "step")
        leaves.setdefault(owner, {})[path] = leaf
    return {owner: _nested(own) for owner, own in leaves.items()}


def blank_groups(names: Mapping[str, str], metadata: Metadata, begin: int) -> list[dict[str, Any]]:
    """Returns the groups from number `begin` on; `names` are by "NUMBER.SETTING"."""
    outline = outline_of(metadata.state_dict_metadata)
    leaves: dict[int, dict[_Path, Any]] = {}
    for name, source in names.items():
        number, _, rest = name.partition(".")
        if rest and _is_number(number) and int(number) >= begin:
            entry, leaf = outline(source), None
            if isinstance(entry, TensorStorageMetadata):
                leaf = torch.empty(entry.size, dtype=entry.properties.dtype)
            leaves.setdefault(int(number), {})[_path_of(source, rest, metadata)] = leaf
    ends = next(at for at in count(begin) if ("params",) not in leaves.get(at, ()))
    return [_nested(leaves[at]) for at in range(begin, ends)]


def rekeyed(loaded: Any, present: Any) -> Any:
    """Returns a loaded state with the present one's keys, or numbers: a checkpoint keeps texts."""
    if isinstance(loaded, list):
        now: Any = present if isinstance(present, (list, tuple)) else ()
        return [rekeyed(v, now[i] if i < len(now) else None) for i, v in enumerate(loaded)]
    if not isinstance(loaded, dict):
        return loaded
    now = present if isinstance(present, Mapping) else {}
    own = {str(key): key for key in now}
    are_numbers = all(type(key) is str and _is_number(key) for key in loaded)
    keys = {text: own.get(text, int(text) if are_numbers else text) for text in loaded}
    return {key: rekeyed(loaded[text], now.get(key)) for text, key in keys.items()}


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and (text == "0" or text[0] != "0")


def _path_of(source: str, rest: str, metadata: Metadata) -> _Path:
    """Returns the keys beneath a parameter that end a stored name."""
    if "." not in rest:
        return (rest,)
    paths = metadata.planner_data
    path = paths.get(source) if isinstance(paths, dict) else None
    if not isinstance(path, tuple):
        path = tuple(int(part) if _is_number(part) else part for part in rest.split("."))
    ends = (path[-nkeys:] for nkeys in range(1, min(len(path), _MAX_DEPTH) + 1))
    return next((end for end in ends if ".".join(map(str, end)) == rest), (rest,))


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
    """Returns a tensor for a load to fill, sharded as the template if it has the same sizes.

    Each rank has all of a counter, a tensor without dimensions; a DTensor takes it as it is.
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
