"""Keeps what flattened names do not say of a nested state, for a load that has to make it anew.

A checkpoint holds values by texts: it says no key's type, no class of a dict, and nothing of an
empty one. Where a state has such, a save of `save` or `async_save` keeps one more object,
"dcpx.keys.DIGEST", which no state asks for:

    {"containers": {path: (class of the dict or list, [keys that are no texts])},
     "nameless": [path of an empty dict, or of a dict or list of nothing but such],
     "orders": {path of a dict that holds one: [texts of its keys]},
     "tensors": {path of one that is not plain and contiguous: `TensorKind` as a tuple}}

With nameless ones the object is "dcpx.keys.empty.DIGEST": a load looks there though no name is new
to it. Ranks with equal states write one, others several, so a load joins all of them.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from torch_dcpx._hooks import is_own
from torch_dcpx.checkpoint.stateful import is_extra_state
from torch_dcpx.errors import CorruptionError
from torch_dcpx.planners.load_planner import DcpxLoadPlanner
from torch_dcpx.planners.save_planner import DcpxSavePlanner
from torch_dcpx.reader.reader import DcpxReader, quiet_reader
from torch_dcpx.tensors.memory import PLAIN_CLASSES, order_of

RECORD = "dcpx.keys."  # begins the names of the items
EMPTY = RECORD + "empty."
_MAX_DEPTH = 64
_KEYS = frozenset((int, bool, float, complex, bytes, type(None), torch.dtype, torch.device))
_FACTORIES: dict[str, Any] = {
    f"defaultdict of {made.__name__}": made for made in (int, float, list, dict, set, str, bool)
}
_DICTS: dict[str, Any] = {
    "": dict,
    "list": list,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": defaultdict,
    **{name: lambda made=made: defaultdict(made) for name, made in _FACTORIES.items()},
}
_TENSORS = frozenset(kind.__name__ for kind in PLAIN_CLASSES)
Path = tuple[str | int, ...]


class Kept(NamedTuple):
    """A dict or list of a saved state."""

    kind: str = ""  # its class; "" for a dict or a list itself
    keys: Mapping[str, Any] = {}  # those that are no texts, by text; of no known type: `Kept`
    order: Sequence[str] = ()  # texts of all keys, if one of the values is nameless
    is_nameless: bool = False

    def made(self) -> Any:
        """Returns a new dict or list of its class; None where that cannot be made."""
        make = _DICTS.get(self.kind)
        return None if make is None else make()


class TensorKind(NamedTuple):
    """A saved tensor, as its entry in the metadata does not say it."""

    cls: str = "Tensor"
    order: tuple[int, ...] | None = None  # dimensions by falling strides; None: contiguous
    has_grad: bool = False  # whether it requires one

    def blank(self, sizes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Returns a new tensor. Raises ValueError: it cannot be made."""
        order = range(len(sizes)) if self.order is None else self.order
        if self.cls not in _TENSORS or sorted(order) != list(range(len(sizes))):  # forged
            raise ValueError(f"a {self.cls} of {len(sizes)} dimensions in the order {self.order}")
        made = torch.empty([sizes[dim] for dim in order], dtype=dtype, device=device)
        if self.order is not None:
            made = made.permute([order.index(dim) for dim in range(len(sizes))])
        if self.cls != "Tensor":
            made = torch.nn.Parameter(made, requires_grad=False)
        return made.requires_grad_() if self.has_grad else made


class Record(NamedTuple):
    """A save tells this of its dicts, lists and tensors; the names are the keys of the object."""

    containers: dict[Path, Any]
    nameless: list[Path]
    orders: dict[Path, list[str]]
    tensors: dict[Path, tuple[str, tuple[int, ...] | None, bool]]  # of `TensorKind`


def note_containers(value: Any, path: Path, record: Record) -> bool:
    """Adds to a record what the names of a value at `path` do not say of its dicts and lists.
    Returns whether the value is nameless.
    """
    found, nameless = record.containers, 0
    before = len(found)
    if isinstance(value, Mapping):
        keys = [_told(key) for key in value if type(key) is not str and str(key) != key]
        if not keys and are_numbers(value):
            keys = list(value)  # texts, which a load without a record takes for numbers
        kind = _kind_of(value, dict)
        for key, part in value.items():
            if isinstance(part, torch.Tensor):
                _note_tensor(part, (*path, str(key)), record)
            elif isinstance(part, (Mapping, list)):
                nameless += note_containers(part, (*path, str(key)), record)
        if keys or kind or not value or len(found) > before:
            found[path] = kind, keys
        if nameless:
            record.orders[path] = list(map(str, value))
    else:
        kind = _kind_of(value, list)
        for at, part in enumerate(value):
            if isinstance(part, torch.Tensor):
                _note_tensor(part, (*path, at), record)
            elif isinstance(part, (Mapping, list)):
                nameless += note_containers(part, (*path, at), record)
        if kind or len(found) > before:
            found[path] = kind or "list", []
    is_nameless = nameless == len(value) and (nameless > 0 or isinstance(value, Mapping))
    if is_nameless:
        record.nameless.append(path)
    return is_nameless


def _note_tensor(tensor: torch.Tensor, path: Path, record: Record) -> None:
    """Adds to a record what a load that makes a tensor anew has to know."""
    kind = type(tensor)
    if kind not in PLAIN_CLASSES or tensor.layout is not torch.strided:
        return
    if kind is not torch.Tensor or tensor.requires_grad or not tensor.is_contiguous():
        record.tensors[path] = kind.__name__, order_of(tensor), tensor.requires_grad


def are_numbers(texts: Iterable[Any]) -> bool:
    """Returns whether all of some keys, one at least, are texts of numbers as `str` makes them."""
    texts = list(texts)
    return bool(texts) and all(type(text) is str and is_number(text) for text in texts)


def is_number(text: str) -> bool:
    """Returns whether `str` makes this text of a number that is not negative."""
    return text.isdecimal() and text.isascii() and (text == "0" or text[0] != "0")


def _kind_of(value: Any, plain: type) -> str:
    """Returns the class of a dict or list as a text, "" for `plain`."""
    kind = type(value)
    if kind is plain:
        return ""
    if kind is defaultdict:
        factory = value.default_factory
        name = getattr(factory, "__qualname__", type(factory).__qualname__)
        is_known = factory is None or _FACTORIES.get(f"defaultdict of {name}") is factory
        return "defaultdict" + (f" of {name}" if factory is not None else "") + "?" * (not is_known)
    return kind.__name__ if kind in _DICTS.values() else f"{kind.__module__}.{kind.__qualname__}"


def _told(key: Any) -> Any:
    """Returns a key for the record; in a list its text, of a type that no load makes anew."""
    numpy: Any = sys.modules.get("numpy")
    if type(key) in _KEYS or (type(key) is tuple and _is_told(key)):
        return key
    is_number = (
        numpy is not None and isinstance(key, numpy.number) and hash(key) == hash(key.item())
    )
    return key if is_number else [str(key)]


def _is_told(key: tuple[Any, ...], depth: int = 0) -> bool:
    return depth < _MAX_DEPTH and all(
        type(part) in _KEYS
        or type(part) is str
        or (type(part) is tuple and _is_told(part, depth + 1))
        for part in key
    )


def add_record(planner: Any, state: Mapping[Any, Any], growing: Collection[Any]) -> None:
    """Gives a planner that was set up with `state` the record of it, if there is anything to tell.

    `growing` are the keys of parts whose entries a load makes anew. A planner that takes states its
    own way gets none.
    """
    is_known = isinstance(planner, DcpxSavePlanner) and is_own(
        planner, DcpxSavePlanner, "set_up_planner"
    )
    if not (is_known and planner.flatten_state_dict):
        return
    record = Record({}, [], {}, {})
    for key, part in state.items():
        if isinstance(part, torch.Tensor):  # most are; a Mapping costs more to tell
            continue
        if isinstance(part, (Mapping, list)) and (planner.dcpx_is_odd or key in growing):
            note_containers(part, (str(key),), record)
        elif isinstance(part, Mapping):
            for name in filter(is_extra_state, part):
                if isinstance(part[name], torch.Tensor):
                    _note_tensor(part[name], (str(key), name), record)
                elif isinstance(part[name], (Mapping, list)):
                    note_containers(part[name], (str(key), name), record)
    anew = {str(key) for key in growing}
    for path in [path for path in record.tensors if path[0] not in anew]:
        if not any(map(is_extra_state, path)):
            del record.tensors[path]
    if record.containers or record.tensors:
        parts = record.containers, record.orders, record.tensors
        told = [sorted(own.items(), key=repr) for own in parts]
        digest = hashlib.blake2b(repr(told).encode("utf-8", "replace")).hexdigest()
        name = (EMPTY if record.nameless else RECORD) + digest[:16]
        planner.state_dict[name] = record._asdict()
        planner.mappings[name] = (name,)


def read_containers(
    reader: DcpxReader, metadata: Metadata
) -> tuple[dict[Path, Kept], dict[Path, TensorKind]]:
    """Returns saved dicts and lists that names do not tell, and tensors, by path, of all ranks.

    Raises: as a load. CorruptionError: a record is none.
    """
    names = [name for name in metadata.state_dict_metadata if name.startswith(RECORD)]
    found: dict[Path, Kept] = {}
    tensors: dict[Path, TensorKind] = {}
    for name, record in zip(names, _read(reader, names), strict=True):
        try:
            nameless, orders = set(record.get("nameless", ())), record.get("orders", {})
            for path, (cls, dims, has_grad) in record.get("tensors", {}).items():
                tensors.setdefault(path, TensorKind(cls, dims, has_grad))
            for path, (kind, keys) in record["containers"].items():
                if type(path) is not tuple or not {*map(type, path)} <= {str, int}:
                    raise TypeError(f"{path!r:.80} is no path")
                known = found.get(path, Kept(kind))
                own = {_text_of(key): Kept() if type(key) is list else key for key in keys}
                order = known.order or [*map(_text_of, orders.get(path, ()))]
                is_nameless = known.is_nameless or path in nameless
                found[path] = Kept(known.kind, {**own, **known.keys}, order, is_nameless)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            message = (
                f"read the item '{name}' of '{reader.path}': no record of a save: {error!r:.99}"
            )
            raise CorruptionError(message, fqn=name, path=str(reader.path)) from error
    return found, tensors


def _text_of(key: Any) -> str:
    (text,) = key if type(key) is list else (str(key),)
    hash(text)
    return str(text)


def _read(reader: DcpxReader, names: Iterable[str]) -> Iterable[Any]:
    """Returns objects of a checkpoint, read in this process alone."""
    target: dict[str, Any] = dict.fromkeys(names)
    if target:
        own, planner = quiet_reader(reader.path, reader.options), DcpxLoadPlanner(False, False)
        metadata = own.read_metadata()
        planner.set_up_planner(target, metadata, False)
        own.set_up_storage_reader(metadata, False)
        plan = own.prepare_local_plan(planner.create_local_plan())
        own.read_data(planner.finish_plan(plan), planner).wait()
        target = planner.state_dict
    return target.values()
