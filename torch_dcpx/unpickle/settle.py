"""Building the real objects of a decoded pickle: exact types, checked parts, cycles kept.

`RestrictedUnpickler` gives a tree of exact builtins and stand-ins. `Settler` walks it once: it
completes builtin containers in place, and replaces each stand-in by the object that its `build`
makes. It checks attribute names, because pickle later asks an instance for `__reduce_ex__` and the
like: a planted one would run.
"""

from __future__ import annotations

import collections
import enum
import pickle
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

import torch

from torch_dcpx.errors import UnsafePickleError
from torch_dcpx.unpickle.hashed_keys import check_keys
from torch_dcpx.unpickle.stand_ins import EMPTY, StandIn, StandInType

_MAX_DEPTH = 500  # stock torch.save reaches 496 nested lists at Python's default recursion limit

# 40 times "a pair of the last one, twice" is a tuple that takes 2^40 steps to hash. The scan sees
# such keys of dicts, the settler those of sets, which may be calls.
MAX_NODES = 10_000_000
_MAX_NODES_PER_BYTE = 16  # of the pickle, beyond: a long tuple has a value a byte

# A thousand calls may each make bytes of one text of a megabyte, so each is charged.
_CALLS_BASE_BYTES = 64 << 20
_CALLS_BYTES_PER_BYTE = 32  # of the pickle; a set of its smallest values has 16 times its bytes
_ELEMENT_BYTES = 32  # of a container that a call makes

_PLAIN = (type(None), type(...), bool, int, float, str, bytes, bytearray)
_ATOMS: frozenset[type] = frozenset({*_PLAIN, torch.dtype, torch.qscheme})
_CONTAINERS: frozenset[type] = frozenset({list, dict, tuple})

_MAX_PLAIN = 8  # parts, which are looked at wherever it is met; a hash of them is soon made
_BUILDING = object()  # in the memo: a tuple, set or stand-in that is not complete yet


def refuse(what: str) -> NoReturn:
    """Raises `UnpicklingError`; `malformed_is_corruption` adds the file and the item."""
    raise pickle.UnpicklingError(what)


def check_attributes(names: Iterable[Any], owner: str, cls: type | None = None) -> None:
    """Refuses attribute names that pickle or copy would call, or that would shadow one of `cls`."""
    for name in names:
        if type(name) is not str:
            refuse(f"a {owner} has an attribute name of type {type(name).__name__}")
        if name.startswith("__") and name.endswith("__"):
            refuse(f"a {owner} has the planted attribute {name!r}: pickle and copy would call it")
        if cls is not None and hasattr(cls, name):
            refuse(f"a {owner} has the planted attribute {name!r}, which its class defines")


def no_more_than(
    raw: StandIn, *, state: bool = False, elements: bool = False, pairs: bool = False
) -> None:
    """Refuses a stand-in with which the pickle did more than a call and the parts allowed here."""
    if raw.kwargs or not (
        (state or raw.state is EMPTY)
        and (elements or raw.elements is None)
        and (pairs or raw.pairs is None)
    ):
        refuse(f"does more with a {raw.global_name} than one of that class needs")


def checked_args(
    raw: StandIn, args: tuple[Any, ...], *kinds: type | tuple[type, ...], least: int | None = None
) -> tuple[Any, ...]:
    """Returns `args`: at least `least` (None: all) of them, each of exactly one of its kinds."""
    if not (len(kinds) if least is None else least) <= len(args) <= len(kinds):
        refuse(f"calls {raw.global_name} with {len(args)} arguments")
    for value, kind in zip(args, kinds, strict=False):
        if type(value) not in (kind if isinstance(kind, tuple) else (kind,)):
            refuse(f"calls {raw.global_name} with a {type(value).__name__}")
    return args


def never_called(raw: StandIn, _settle: Settler) -> NoReturn:
    """Builds nothing: the name may only stand as a value or an argument."""
    refuse(f"calls {raw.global_name}, which no pickle of plain data does")


class Settler:
    """Replaces stand-ins by real objects. For one tree and one thread.

    Args:
        read_storage: gives the storage of a storage stand-in; None where tensors do not belong.
        pickle_bytes: size of the tree's pickle, which bounds what its calls may make.
    """

    def __init__(
        self,
        read_storage: Callable[[Any], torch.UntypedStorage] | None = None,
        pickle_bytes: int = 0,
    ) -> None:
        # Keyed by id: the tree outlives the settler's walk, and `_kept` what the walk makes itself.
        self._memo: dict[int, Any] = {}
        self._kept: list[Any] = []
        self._depth = 0
        self._nodes: dict[int, int] = {}  # by id of a made tuple: how many nodes hashing it visits
        self._left_bytes = _CALLS_BASE_BYTES + _CALLS_BYTES_PER_BYTE * pickle_bytes
        self._max_nodes = MAX_NODES + _MAX_NODES_PER_BYTE * pickle_bytes
        self._hashed_nodes = 0
        self.read_storage = read_storage
        self.cache: dict[Any, Any] = {}  # for builds whose parts repeat; keys live with the tree

    def remember(self, raw: Any, made: Any) -> None:
        """Gives `made` wherever `raw` is met again; containers call it before they are filled."""
        self._memo[id(raw)] = made
        self._kept.append(raw)

    def _charge(self, raw: Any, made: Any) -> None:
        """Charges for an object that a call made, and for the texts that it was made of."""
        nbytes = 0
        if isinstance(raw, StandIn):
            nbytes += sum([len(part) for part in raw.args if type(part) is str])
        if isinstance(made, (str, bytes, bytearray)):
            nbytes += len(made)
        elif isinstance(made, (list, tuple, dict, set, frozenset, collections.deque)):
            nbytes += _ELEMENT_BYTES * len(made)
        elif type(made).__module__ == "numpy":  # others may have an `nbytes` that is no count
            nbytes += getattr(made, "nbytes", 0)
        self.charge(nbytes)

    def charge(self, nbytes: int) -> None:
        """Refuses a tree whose calls, with these bytes, make far more than it has bytes."""
        self._left_bytes -= nbytes
        if self._left_bytes < 0:
            refuse("makes far more by its calls than it has bytes")

    def keys(self, made: Collection[Any]) -> None:
        """Refuses settled keys of a dict or set that take far longer to hash than to read."""
        self._hashed_nodes += sum([self._nodes.get(id(key), 0) for key in made])
        if self._hashed_nodes > self._max_nodes:
            refuse(f"has keys that unfold to {self._hashed_nodes} values")
        check_keys(made)

    def __call__(self, raw: Any) -> Any:
        """Returns the real object of `raw`, or refuses a part that its class does not take."""
        kind = type(raw)
        if kind in _ATOMS or (kind in _CONTAINERS and len(raw) <= _MAX_PLAIN and _is_plain(raw)):
            return raw
        made = self._memo.get(id(raw), EMPTY)
        if made is _BUILDING:
            refuse(f"contains a {kind.__name__} that contains itself")
        if made is not EMPTY:
            return made
        if self._depth == _MAX_DEPTH:
            refuse(f"is nested deeper than {_MAX_DEPTH}")
        # Not counted back down when something raises: an error ends the whole walk. One frame a
        # level for the builtin containers (no comprehensions): what torch.save can write at the
        # default recursion limit can be read at it.
        self._depth += 1
        self.remember(raw, raw if kind is list or kind is dict else _BUILDING)
        if kind is dict:
            pairs = []
            for key, value in raw.items():
                pairs.append((self(key), self(value)))
            self.keys([key for key, _ in pairs])
            raw.clear()  # keys may have been stand-ins, which hash by identity
            raw.update(pairs)
            made = raw
        elif kind is list:
            for i, value in enumerate(raw):
                raw[i] = self(value)
            made = raw
        elif kind is tuple or kind is set or kind is frozenset:
            parts, nodes = [], 1
            for value in raw:
                part = self(value)
                parts.append(part)
                nodes += self._nodes.get(id(part), 1)
            if nodes > self._max_nodes:
                refuse(f"has a {kind.__name__} that unfolds to {nodes} values")
            if kind is not tuple:
                self.keys(parts)
            made = kind(parts)
            if kind is tuple:
                self._nodes[id(made)] = nodes
        elif type(kind) is StandInType:
            made = kind.build(raw, self)
            self._charge(raw, made)
        else:
            made = _value(raw)
        self._memo[id(raw)] = made
        self._depth -= 1
        return made


def _is_plain(raw: Any) -> bool:
    """Returns whether a builtin container holds nothing that is to be settled, and no containers.

    Millions of records are such: what the walk knows of another one takes as much memory as it.
    """
    if type(raw) is dict and not _ATOMS.issuperset(map(type, raw.values())):
        return False
    return _ATOMS.issuperset(map(type, raw))


def _value(raw: Any) -> Any:
    """Returns the object of `raw`, which has no parts to settle."""
    kind = type(raw)
    if kind is StandInType:
        if raw.value is EMPTY:
            refuse(f"stores {raw.global_name} itself, not an object of it")
        return raw.value
    if kind is not torch.Size:
        refuse(f"contains a bare {kind.__name__}")
    # In metadata only; torch.Size itself takes any int.
    if any(type(n) is not int or not 0 <= n < 2**63 for n in raw):
        refuse("has a size that is no tuple of ints in [0, 2^63)")
    return raw


def _user_class_state(made: Any, state: Any, owner: str) -> None:
    """Sets the state as pickle does, after a look at its names."""
    set_state = getattr(type(made), "__setstate__", None)
    if set_state is not None:
        if type(state) is dict:
            check_attributes(state, owner)
        set_state(made, state)
        return
    state, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    for attributes in (state, slots):
        if type(attributes) not in (dict, type(None)):
            refuse(f"sets a {owner} to a state of type {type(attributes).__name__}")
        check_attributes(attributes or (), owner)
    if state:
        made.__dict__.update(state)
    for name, value in (slots or {}).items():
        setattr(made, name, value)


def build_user_object(raw: StandIn, settle: Settler) -> Any:
    """Builds an object of a class or function that the user listed in `safe_globals`."""
    target, owner = type(raw).value, raw.global_name
    args, kwargs = settle(raw.args), settle(raw.kwargs)
    made = target(*args, **kwargs) if raw.is_called else target.__new__(target, *args, **kwargs)
    settle.remember(raw, made)
    # Not a method of the settler's: a frame more a level would bring the recursion limit nearer.
    for element in raw.elements or ():
        made.append(settle(element))
    pairs = [(settle(key), value) for key, value in raw.pairs or ()]
    settle.keys([key for key, _ in pairs])
    for key, value in pairs:
        made[key] = settle(value)
    if raw.state is not EMPTY:
        _user_class_state(made, settle(raw.state), owner)
        check_attributes(getattr(made, "__dict__", ()), owner)  # its __setstate__ may set any name
    return made


def build_enum_member(raw: StandIn, settle: Settler) -> enum.Enum:
    """Builds `getattr(ListedEnum, "MEMBER")`, as CPython 3.11.0 to 3.11.3 pickle it; no other."""
    cls, name = raw.args if len(raw.args) == 2 else (None, None)
    target: Any = getattr(cls, "value", None) if type(cls) is StandInType else None
    is_enum = isinstance(target, type) and issubclass(target, enum.Enum)
    if not is_enum or type(name) is not str or name not in target.__members__:
        raise UnsafePickleError(
            "refuse to call getattr for anything but a member of an enum listed in "
            "ReadOptions(safe_globals=[...])",
            global_name=raw.global_name,
        )
    no_more_than(raw)
    return settle(cls).__members__[name]  # type: ignore[no-any-return]
