"""Records what an optimizer's entries are, where neither names nor parameters tell it.

The metadata has names, sizes and dtypes. `usual_kind` says what an entry most likely is: as its
parameter. A save compares, and its record has only what is otherwise: another class or sharding,
another order of strides, keys that are no texts, empty dicts, entries of an optimizer's own beside
`state` and `param_groups`. It is JSON, in an item named by its digest: ranks that have the same
write one item.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_dcpx._json import parsed_json
from torch_dcpx.checkpoint.containers import is_number
from torch_dcpx.errors import CorruptionError, MismatchError, UnsupportedError
from torch_dcpx.tensors.memory import PLAIN_CLASSES, order_of

RECORD = "dcpx_kinds"  # the key beside `state` and `param_groups`
STATE, GROUPS, PARAMS, NAMES = "state", "param_groups", "params", "param_names"

_TENSOR, _DTENSOR = "Tensor", "DTensor"
_FORMAT = 1
_MAX_DIMS = 64
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
_KEY_TYPES = (int, float, bool, type(None))  # besides texts, as JSON has them

_Path: TypeAlias = tuple[str | int, ...]  # texts of dicts' keys, and places in lists


class Mesh(NamedTuple):
    """A mesh that is not that of the parameter."""

    names: tuple[str, ...] | None
    shape: tuple[int, ...]
    is_world: bool  # whether it is one row of all ranks


class Kind(NamedTuple):
    """A tensor is this, besides its sizes and dtype."""

    cls: str = _TENSOR
    placements: tuple[int | None, ...] | str | None = None  # sharded dimensions, or a text
    mesh: Mesh | None = None  # None of a DTensor: the mesh of its parameter
    order: tuple[int, ...] | None = None  # dimensions by falling strides; None: contiguous
    device: str = "cpu"  # its type, where no parameter gives it

    @property
    def is_plain(self) -> bool:
        return self.cls == _TENSOR

    @property
    def is_made(self) -> bool:
        """Whether a load can make one."""
        return self.is_plain or (self.cls == _DTENSOR and type(self.placements) is tuple)


class UnknownKey(NamedTuple):
    """A key of a type that JSON has not."""

    type_name: str


@dataclass
class KindRecord:
    """One optimizer has this that is not as usual; names and paths are beneath it."""

    kinds: dict[str, Kind] = field(default_factory=dict)  # by name
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name of a dict, by text
    empty: list[_Path] = field(default_factory=list)  # dicts
    extras: list[str] = field(default_factory=list)  # keys beside `state` and `param_groups`
    parameters: set[str] = field(default_factory=set)  # names of `torch.nn.Parameter`
    grads: set[str] = field(default_factory=set)  # names of tensors that require a gradient

    def as_items(self) -> dict[str, dict[str, str]]:
        """Returns what a save adds to the optimizer's state: nothing, if all is as usual."""
        marks = {"parameters": sorted(self.parameters), "grads": sorted(self.grads)}
        if not (self.kinds or self.keys or self.empty or self.extras or any(marks.values())):
            return {}
        names: dict[Kind, list[str]] = {}
        for name, kind in self.kinds.items():
            names.setdefault(kind, []).append(name)
        keys = {name: [[k, _encoded(v)] for k, v in own.items()] for name, own in self.keys.items()}
        text = json.dumps(
            {
                "format": _FORMAT,
                "kinds": list(names.items()),
                "keys": keys,
                "empty": self.empty,
                "extras": self.extras,
                **marks,
            },
            separators=(",", ":"),
        )
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        return {RECORD: {digest: text}}

    @classmethod
    def decoded(cls, texts: Mapping[str, Any]) -> KindRecord:
        """Returns what all ranks' texts say, by their fqns. Raises CorruptionError: one is none."""
        record = cls()
        for fqn, text in texts.items():
            try:
                found = parsed_json(text)
                if found["format"] != _FORMAT:
                    raise ValueError(f"its format is {found['format']!r:.20}, not {_FORMAT}")
                for kind, names in found["kinds"]:
                    record.kinds |= dict.fromkeys(map(_text, names), _kind(*kind))
                for name, pairs in found["keys"].items():
                    own = {_text(key): _decoded(value) for key, value in pairs}
                    record.keys.setdefault(name, {}).update(own)
                record.empty += [_path(path) for path in found["empty"]]
                record.extras += map(_text, found["extras"])
                record.parameters |= set(map(_text, found.get("parameters", ())))
                record.grads |= set(map(_text, found.get("grads", ())))
            except _WRONG as error:
                problem = (
                    f"read the item '{fqn}': it describes no optimizer's state: {error!s:.200}"
                )
                raise CorruptionError(problem, fqn=fqn) from error
        return record

    def rekeyed(self, name: str, loaded: Any, present: Any) -> Any:
        """Returns what was loaded with the saved keys, for a checkpoint has texts; tensors are
        parameters, and require gradients, as they did.

        Where none are recorded, the keys are the present ones, or numbers if all can be.
        Raises MismatchError: a key is of a type that only the optimizer can make.
        """
        if isinstance(loaded, list):
            now: Any = present if isinstance(present, (list, tuple)) else ()
            return [
                self.rekeyed(f"{name}.{place}", one, now[place] if place < len(now) else None)
                for place, one in enumerate(loaded)
            ]
        if isinstance(loaded, torch.Tensor):
            if name in self.parameters and not isinstance(loaded, torch.nn.Parameter):
                return torch.nn.Parameter(loaded.detach(), name in self.grads)
            return loaded.requires_grad_() if name in self.grads else loaded
        if not isinstance(loaded, dict):
            return loaded
        now = present if isinstance(present, Mapping) else {}
        own = {str(key): key for key in now}
        saved = self.keys.get(name) or dict(zip(loaded, usual_keys(loaded), strict=True)) | own
        keys = {text: saved.get(text, text) for text in loaded}
        for text, key in keys.items():
            if isinstance(key, UnknownKey):
                keys[text] = _own_key(own, text, name, key)
        is_marked = bool(self.parameters or self.grads)
        return {
            key: one
            if type(one := loaded[text]) is torch.Tensor and not is_marked
            else self.rekeyed(f"{name}.{text}", one, now.get(key))
            for text, key in keys.items()
        }


def _own_key(own: Mapping[str, Any], text: str, name: str, key: UnknownKey) -> Any:
    if text not in own:
        raise MismatchError(
            f"the optimizer's '{name}' was saved with the key {text!r:.80}, a {key.type_name}, "
            "which only the optimizer can make: step it once before the resume, so that it has "
            "that key; load_optimizer=False leaves the whole optimizer",
            fqn=name,
        )
    return own[text]


def record_of(
    own: Mapping[str, Any], templates: Mapping[str, torch.Tensor] | None, extras: Sequence[str] = ()
) -> KindRecord:
    """Returns the record of an optimizer's state dict, whose parameters have names.

    Args:
        own: with `state`, `param_groups` (a list, or by parameter), and entries named `extras`.
        templates: the parameters. None: all tensors are as usual (FSDP1 makes them).
    """
    record = KindRecord(extras=list(extras))
    known = templates or {}
    for name, state in own[STATE].items():
        if state:
            _note(record, (STATE, name), state, known.get(name), is_known=templates is not None)
    groups = own[GROUPS]
    for key, group in groups.items() if isinstance(groups, Mapping) else enumerate(groups):
        _note(record, (GROUPS, key), group, None)
    for key in extras:
        _note(record, (key,), own[key], None)
    return record


def _note(
    record: KindRecord, path: _Path, value: Any, owner: Any, *, is_known: bool = True
) -> None:
    """Notes what is not as usual in a value and what it holds; walks as DCP's `traverse`."""
    if type(value) is torch.Tensor and _is_plain_usual(value, owner):
        return
    if isinstance(value, torch.Tensor):
        if is_known and value.is_quantized:  # FSDP1's shards do not say
            raise UnsupportedError(
                f"the optimizer's '{_name(path)}' is a quantized {type(value).__name__} "
                f"({value.dtype}), which no resume can make; keep its int_repr() and its scale"
            )
        if is_known and isinstance(value, torch.nn.Parameter):
            record.parameters.add(_name(path))
        if is_known and value.requires_grad:
            record.grads.add(_name(path))
        kind = kind_of(value, owner) if is_known else None
        if kind != usual_kind(owner, value.size(), is_step=path[-1] == "step") and kind is not None:
            record.kinds[_name(path)] = kind
    elif isinstance(value, Mapping):
        if not value:
            record.empty.append(path)
        elif usual_keys(map(str, value)) != list(value):
            record.keys[_name(path)] = {str(key): key for key in value}
        for key, one in value.items():
            _note(record, (*path, str(key)), one, owner, is_known=is_known)
    elif isinstance(value, list) and not _is_leaf(value):
        for place, one in enumerate(value):
            _note(record, (*path, place), one, owner, is_known=is_known)


def _is_plain_usual(value: torch.Tensor, owner: Any) -> bool:
    """Returns True of most tensors at once: `kind_of` and `usual_kind` would say the same."""
    return (
        (value.is_cpu if owner is None else type(owner) in PLAIN_CLASSES and _is_dense(owner))
        and _is_dense(value)
        and not value.requires_grad
        and not value.is_quantized
    )


def unmade(value: Any) -> str:
    """Returns the class of what `Optimizer.load_state_dict` cannot make anew in a state, else "".

    Where it can iterate, it calls the class: arrays of numpy, ranges and named tuples take no
    iterator.
    """
    if isinstance(value, (torch.Tensor, str, bytes)) or not isinstance(value, Iterable):
        return ""
    make: Any = type(value)
    try:
        parts = value.values() if isinstance(value, dict) else value
        within = next(filter(None, map(unmade, parts)), "")
        if not within and not isinstance(value, dict):
            make(iter(value))
    except (TypeError, ValueError):
        return f"{make.__module__}.{make.__qualname__}"
    return within


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous()


def _is_leaf(value: Any) -> bool:
    """Returns whether DCP keeps a value as one item."""
    if not isinstance(value, list):
        return not isinstance(value, (Mapping, torch.Tensor))
    return all(map(_is_leaf, value))


def _name(path: _Path) -> str:
    return ".".join(map(str, path))


# ---- What is usual -------------------------------------------------------------------------------


def usual_keys(texts: Iterable[str]) -> list[Any]:
    """Returns the keys that texts stand for: numbers, if all are."""
    texts = list(texts)
    return [int(text) for text in texts] if all(map(is_number, texts)) else texts


def usual_kind(owner: Any, sizes: Sequence[int], *, is_step: bool) -> Kind:
    """Returns what a tensor of a parameter's state is, if nothing is recorded.

    As the parameter, if it has its sizes. Else each rank has all of it; a counter is plain.
    """
    is_alike = owner is not None and tuple(sizes) == tuple(owner.size()) and not is_step
    if isinstance(owner, DTensor) and (is_alike or len(sizes) > 0):
        if not is_alike:
            return Kind(_DTENSOR, (None,) * owner.device_mesh.ndim)
        return Kind(_DTENSOR, _placements(owner), None, _kept_order(owner._local_tensor))
    return Kind(order=_kept_order(owner) if is_alike else None)


def kind_of(value: torch.Tensor, owner: Any) -> Kind:
    """Returns what a tensor is; `owner` is its parameter, or None."""
    device = "cpu" if owner is not None else value.device.type
    if isinstance(value, DTensor):
        is_own = isinstance(owner, DTensor) and owner.device_mesh == value.device_mesh
        mesh = None if is_own else _described(value.device_mesh)
        return Kind(_DTENSOR, _placements(value), mesh, order_of(value._local_tensor), device)
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return Kind(_TENSOR if is_plain else type(value).__name__, order=order_of(value), device=device)


def _kept_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the order that `torch.zeros_like` gives a state of a parameter."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    return order_of(torch.empty_like(tensor, device="meta"))


def _placements(tensor: DTensor) -> tuple[int | None, ...] | str:
    """Returns the sharded dimension for each of the mesh, None for a replica; else a text."""
    placements = tensor.placements
    if all(type(one) in (Shard, Replicate) for one in placements):
        return tuple(one.dim % tensor.ndim if type(one) is Shard else None for one in placements)
    return repr(placements)


def _described(mesh: DeviceMesh) -> Mesh:
    ranks = mesh.mesh.flatten().tolist()
    is_world = mesh.ndim == 1 and ranks == list(range(torch.distributed.get_world_size()))
    return Mesh(mesh.mesh_dim_names, tuple(mesh.mesh.shape), is_world)


# ---- JSON ----------------------------------------------------------------------------------------


def _encoded(key: Any) -> Any:
    """Returns a key as JSON has it."""
    if type(key) is str or type(key) in _KEY_TYPES:
        return key
    if type(key) is tuple:
        return {"tuple": [_encoded(one) for one in key]}
    if type(key) is bytes:
        return {"bytes": key.hex()}
    return {"type": f"{type(key).__module__}.{type(key).__qualname__}"}


def _decoded(key: Any) -> Any:
    """Returns a key of `_encoded`; an `UnknownKey` of a type that it cannot have."""
    if not isinstance(key, dict):
        if type(key) is not str and type(key) not in _KEY_TYPES:
            raise TypeError(f"the key {key!r:.80}")
        return key
    ((kind, text),) = key.items()
    if kind == "tuple":
        return tuple(map(_decoded, text))
    return bytes.fromhex(text) if kind == "bytes" else UnknownKey(_text(text))


def _kind(cls: Any, placements: Any, mesh: Any, order: Any, device: Any) -> Kind:
    """Returns a kind of JSON. Raises ValueError, TypeError: it is none."""
    if isinstance(placements, list):
        placements = tuple(None if one is None else _dim(one) for one in placements)
    elif placements is not None:
        placements = _text(placements)
    if mesh is not None:
        names, shape, is_world = mesh
        names = None if names is None else tuple(map(_text, names))
        mesh = Mesh(names, tuple(map(int, shape)), bool(is_world))
    if order is not None:
        order = tuple(map(_dim, order))
        if sorted(order) != list(range(len(order))):
            raise ValueError(f"the order {order!r:.80}")
    return Kind(_text(cls), placements, mesh, order, _text(device))


def _dim(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_DIMS:
        raise ValueError(f"the dimension {value!r:.20}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r:.80} is no text")
    return value


def _path(value: Any) -> _Path:
    if not (type(value) is list and value and all(type(one) in (str, int) for one in value)):
        raise TypeError(f"{value!r:.80} is no path")
    return tuple(value)
