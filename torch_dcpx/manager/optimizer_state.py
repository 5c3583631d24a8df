"""Blank states of optimizers for a load to fill: for each parameter those that are stored.

A fresh optimizer has no state before its first step, and that step would change the training. So
the checkpoint describes the state: the metadata has names, sizes and dtypes, and the record of the
save what else is not as usual (`optimizer_kinds`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from typing import Any, NoReturn, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from torch_dcpx.checkpoint.containers import is_number
from torch_dcpx.errors import MismatchError, UnsupportedError
from torch_dcpx.keys.key_map import keeps_names
from torch_dcpx.manager.optimizer_kinds import (
    GROUPS,
    RECORD,
    STATE,
    Kind,
    KindRecord,
    Mesh,
)
from torch_dcpx.manager.translate import TrainingRules, beneath, owner_of
from torch_dcpx.metadata.lazy import outline_of, sizes_of
from torch_dcpx.tensors.memory import is_expanded

_MAX_DEPTH = 64
_Path: TypeAlias = tuple[Any, ...]  # keys of dicts (str) and places in lists (int)


def stored_names(metadata: Metadata, prefix: str, rules: TrainingRules | None) -> dict[str, str]:
    """Returns stored names by new ones, `beneath` a prefix. Raises: as `resolve`."""
    stored = metadata.state_dict_metadata
    if rules is None or keeps_names(rules, stored):
        return beneath(prefix, ((name, name) for name in stored))
    mapped = rules.resolve(sizes_of(stored))
    return beneath(prefix, ((name, "".join(entry.sources[:1])) for name, entry in mapped.items()))


def check_apart(optimizers: Mapping[str, tuple[Collection[str], Collection[str]]]) -> None:
    """Raises UnsupportedError: entries of one optimizer would be read as those of another.

    Args:
        optimizers: names of each one's parameters, and of its own entries, by its name.
    """
    for (name, (names, extras)), (other, (others, _)) in itertools.permutations(
        optimizers.items(), 2
    ):
        if not str(other).startswith(f"{name}."):
            continue
        kind, _, begin = str(other)[len(str(name)) + 1 :].partition(".")
        begin += "." if begin else ""
        entries = [f"{begin}{GROUPS}.0.", *(f"{begin}{STATE}.{one}." for one in others)]
        is_state = kind == STATE and any(owner_of(entry, names) for entry in entries)
        if is_state or (kind == GROUPS and begin) or kind in (RECORD, *extras):
            raise UnsupportedError(
                f"optimizers '{name}' and '{other}' cannot be saved as one dict: a resume would "
                f"read '{other}' as the {kind} of '{name}'; give one of them another name"
            )


class Blanks:
    """Makes the state of one optimizer for a load to fill, of its stored names."""

    def __init__(
        self,
        names: Mapping[str, str],
        prefix: str,
        metadata: Metadata,
        record: KindRecord,
        templates: Mapping[str, Any],
    ) -> None:
        """Makes it of stored names by new ones.

        Args:
            prefix: of the stored names.
            templates: tensors with the sizes and shards of the parameters, by name.
        """
        self.names = names
        self.record = record
        self._prefix = prefix
        self._metadata = metadata
        self._outline = outline_of(metadata.state_dict_metadata)
        self._templates = templates
        self.stored: dict[str, str] = {}  # names of parameters in the checkpoint, by present ones
        self._settings: dict[str, dict[str, str]] = {}  # stored names by setting, by group
        self.unsaved: dict[str, Collection[str]] = {}  # settings that only a live group has

    def states(self, present: Mapping[str, Mapping[Any, Any]]) -> dict[str, dict[str, Any]]:
        """Returns the states of parameters: `present` tensors, by parameter, and new ones."""
        templates = self._templates
        leaves: dict[str, dict[_Path, Any]] = {}
        for name, source in beneath(f"{STATE}.", self.names.items()).items():
            owner = owner_of(name, templates)
            if owner is None:
                continue
            rest = name[len(owner) + 1 :]
            self.stored[owner] = source.removeprefix(f"{self._prefix}{STATE}.")[: -len(rest) - 1]
            path = self._path_of(source, rest)
            leaf = self._leaf(source, path, _at(present.get(owner), path), templates[owner])
            leaves.setdefault(owner, {})[path] = leaf
        now = {stored: owner for owner, stored in self.stored.items()}
        for kind, stored, *keys in self.record.empty:
            owner = now.get(str(stored), str(stored))
            if kind == STATE and owner in templates:
                leaves.setdefault(owner, {})[tuple(keys)] = {}
        return {owner: _nested(own) for owner, own in leaves.items()}

    def groups(self, parameters: Collection[str] | None) -> dict[str, dict[str, str]]:
        """Returns the stored settings: names by setting, by number of the group or by parameter.

        Args:
            parameters: their names, if settings are stored by parameter.
        """
        for name, source in beneath(f"{GROUPS}.", self.names.items()).items():
            number = name.partition(".")[0]
            owner = number if parameters is None else owner_of(name, parameters)
            if owner is not None and name != owner:
                self._settings.setdefault(owner, {})[name[len(owner) + 1 :]] = source
        return self._settings

    def group(self, owner: str, live: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of a group, or of a parameter, that are stored. REQUIRES: `groups`.

        Args:
            owner: number of the group, or name of the parameter.
            live: the settings now; those that are not stored stay.
        """
        made = self._mapping((GROUPS, owner), self._settings.get(owner, {}), live)
        self.unsaved[owner] = live.keys() - made.keys()
        return {key: made.pop(key, value) for key, value in live.items()} | made

    def extras(self, live: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the optimizer's own entries, stored ones and those that `live` has now."""
        begins = tuple(f"{key}." for key in self.record.extras)
        names = {
            name: source for name, source in self.names.items() if f"{name}.".startswith(begins)
        }
        made = self._mapping((), names, live)
        return {key: made.pop(key, value) for key, value in live.items()} | made

    def _mapping(
        self, at: _Path, names: Mapping[str, str], live: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns a dict of stored names by those in it; `live` is what is there now."""
        leaves: dict[_Path, Any] = {}
        for name, source in names.items():
            path = self._path_of(source, name)
            leaves[path] = self._leaf(source, path, _at(live, path), None)
        for path in self.record.empty:
            if tuple(map(str, path[: len(at)])) == at and (at or path[0] in self.record.extras):
                leaves[tuple(path[len(at) :])] = {}
        return _nested(leaves)

    def _leaf(self, source: str, path: _Path, now: Any, owner: Any) -> Any:
        """Returns what the load fills, or None: it puts the stored object there."""
        entry = self._outline(source)
        if not isinstance(entry, TensorStorageMetadata):
            return None
        is_sharded = isinstance(now, ShardedTensor)  # a torch.Tensor that has no strides
        is_there = isinstance(now, torch.Tensor) and now.size() == entry.size
        if is_there and (is_sharded or not is_expanded(now)):
            return now  # filled in place
        kind = self.record.kinds.get(source.removeprefix(self._prefix))
        if kind is None:
            return _usual(owner, entry, is_step=path[-1] == "step")
        return self._made(source, kind, entry, owner)

    def _made(self, source: str, kind: Kind, entry: TensorStorageMetadata, owner: Any) -> Any:
        """Returns a new tensor of a recorded kind. Raises MismatchError: nobody can make it."""
        sizes, dtype = tuple(entry.size), entry.properties.dtype
        order = list(range(len(sizes)) if kind.order is None else kind.order)
        if not kind.is_made or len(order) != len(sizes):
            self._refuse(source, f"a {kind.cls} of sizes {sizes}, {kind.placements}")
        device = _device(kind, owner, has_dims=len(sizes) > 0)
        shuffled = [sizes[dim] for dim in order]
        back = [order.index(dim) for dim in range(len(sizes))]
        if kind.is_plain:
            return torch.empty(shuffled, dtype=dtype, device=device).permute(back)
        mesh = self._mesh(source, kind, owner, device)
        dims = kind.placements or ()
        if len(dims) != mesh.ndim or any(type(dim) is int and dim >= len(sizes) for dim in dims):
            self._refuse(source, f"a DTensor with the placements {dims}")
        placements = [Shard(back[dim]) if type(dim) is int else Replicate() for dim in dims]
        made = empty_dtensor(*shuffled, dtype=dtype, device_mesh=mesh, placements=placements)
        return made.permute(back) if kind.order is not None else made

    def _mesh(self, source: str, kind: Kind, owner: Any, device: torch.device | None) -> DeviceMesh:
        """Returns the mesh of the parameter, or one that is like the recorded one."""
        if kind.mesh is None:
            if not isinstance(owner, DTensor):
                self._refuse(source, "a DTensor, whose parameter was one")
            mesh: DeviceMesh = owner.device_mesh
            return mesh
        known = [one.device_mesh for one in self._templates.values() if isinstance(one, DTensor)]
        for mesh in known:
            if _is_like(mesh, kind.mesh):
                return mesh
        if not kind.mesh.is_world or not torch.distributed.is_initialized():
            self._refuse(source, f"a DTensor on a mesh {kind.mesh.names or kind.mesh.shape}")
        world = (torch.distributed.get_world_size(),)
        kind_of_device = "cpu" if device is None else device.type
        return init_device_mesh(kind_of_device, world, mesh_dim_names=kind.mesh.names)

    def _refuse(self, source: str, what: str) -> NoReturn:
        raise MismatchError(
            f"'{source}' was saved as {what}, which no resume makes for a new optimizer: step it "
            "once before, so that it has a tensor to fill; load_optimizer=False leaves all of it",
            fqn=source,
        )

    def _path_of(self, source: str, rest: str) -> _Path:
        """Returns the keys beneath a parameter that end a stored name."""
        if "." not in rest:
            return (rest,)
        paths = self._metadata.planner_data
        path = paths.get(source) if isinstance(paths, dict) else None
        if not isinstance(path, tuple):
            path = tuple(int(part) if is_number(part) else part for part in rest.split("."))
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
            made.setdefault(path[0])  # in its place
    for key, own in beneath.items():
        inner: Any = _nested(own)
        if all(type(at) is int for at in inner) and sorted(inner) == list(range(len(inner))):
            inner = [inner[at] for at in range(len(inner))]
        made[key] = inner
    return made


def _device(kind: Kind, owner: Any, *, has_dims: bool) -> torch.device | None:
    if owner is None:
        return torch.device(kind.device)
    local = owner._local_tensor if isinstance(owner, DTensor) else owner
    device: torch.device = local.device
    return device if has_dims else None


def _is_like(mesh: DeviceMesh, wanted: Mesh) -> bool:
    """Returns whether a mesh has the recorded names; without names, as many dimensions."""
    if wanted.names is None:
        return mesh.mesh_dim_names is None and mesh.ndim == len(wanted.shape)
    return mesh.mesh_dim_names == wanted.names


def _usual(owner: Any, entry: TensorStorageMetadata, *, is_step: bool) -> Any:
    """Returns a tensor as `usual_kind` describes it."""
    sizes, dtype = entry.size, entry.properties.dtype
    is_alike = owner is not None and tuple(sizes) == tuple(owner.size()) and not is_step
    if isinstance(owner, ShardedTensor):
        return _blank_shards(owner, dtype) if is_alike else torch.empty(sizes, dtype=dtype)
    if is_alike:  # with the strides that `zeros_like` gives it
        return torch.empty_like(owner, dtype=dtype, requires_grad=False)
    if isinstance(owner, DTensor) and len(sizes) > 0:
        local = torch.empty(sizes, dtype=dtype, device=owner.to_local().device)
        mesh = owner.device_mesh
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    device = owner.device if owner is not None and len(sizes) > 0 else None
    return torch.empty(sizes, dtype=dtype, device=device)


def _blank_shards(template: ShardedTensor, dtype: torch.dtype) -> ShardedTensor:
    metadata = template.metadata()
    properties = dataclasses.replace(metadata.tensor_properties, dtype=dtype, requires_grad=False)
    shards = [
        LocalShard(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata)
        for shard in template.local_shards()
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        dataclasses.replace(metadata, tensor_properties=properties),
        process_group=template._process_group,
    )
