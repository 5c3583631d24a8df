"""Small values: those that every rank saves alike, and those that each rank has of its own.

`user_content` is one byte item: a `torch.save` archive, which keeps tuples, types of keys and empty
containers. A save takes only exact types whose archives load through the allow-list of
`unpickle.byte_items`, without execution. It refuses others by path: a load would do so too late.

    None bool int float complex str bytes bytearray
    list tuple set frozenset dict OrderedDict Counter      of these
    numpy arrays and scalars (no objects), torch tensors, torch.Size, torch.dtype, torch.device
    PerRank of any of these: each rank's own

A save keeps a rank's own values (states of its data loader, of its random generators) under its
number, and a load gives them back to that rank. After a change of the number of ranks, the user's
function merges the values of all ranks.
"""

from __future__ import annotations

import collections
import copy
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch.distributed.checkpoint.stateful import Stateful

from torch_dcpx.errors import (
    CorruptionError,
    MismatchError,
    OptionError,
    UnsupportedError,
    with_article,
)
from torch_dcpx.options import ReadOptions
from torch_dcpx.unpickle.byte_items import decode_byte_item

# (values of all ranks that saved, by rank; this rank; ranks now) -> value of this rank
MergeFunction: TypeAlias = Callable[[list[Any], int, int], Any]
Merge: TypeAlias = MergeFunction | Mapping[str, MergeFunction] | None


class PerRank:
    """A value of this rank alone; anywhere in `user_content`, or a value of `state`.

    Attributes:
        value: of the types of `user_content`. `resume(state={"name": PerRank(None)})` sets it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> PerRank:
        return PerRank(copy.deepcopy(self.value, memo))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PerRank is a value of state= itself, or lies in user_content")


_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, Mapping)
# Types that are neither `Stateful` nor containers.
_NEITHER = (torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, bytes)


def checked_merge(merge: Any) -> list[str] | bool:
    """Returns `resume(merge=)` as ranks compare it. Raises OptionError: it cannot be called."""
    if merge is None or callable(merge):
        return merge is not None
    if isinstance(merge, Mapping) and all(
        type(name) is str and callable(function) for name, function in merge.items()
    ):
        return sorted(merge)
    problem = f"merge must be a function, or a dict of functions by name, got {merge!r:.80}"
    raise OptionError(problem, option="merge")


def merged(
    saved: Sequence[dict[str, Any]], names: Iterable[str], merge: Merge, rank: int, world_size: int
) -> dict[str, Any]:
    """Returns this rank's value of each name, merged from all values that each rank has saved."""
    return {n: _function(merge, n)([own[n] for own in saved], rank, world_size) for n in names}


def check_mergeable(
    names: Sequence[str], merge: Merge, saved_ranks: int, world_size: int, path: str
) -> None:
    """Raises MismatchError where the number of ranks has changed and a name has no merge."""
    missing = [name for name in names if _function(merge, name) is None]
    if missing and saved_ranks != world_size:
        raise MismatchError(
            f"resume from '{path}': {', '.join(map(repr, missing[:5]))} is each rank's own, of "
            f"{saved_ranks} ranks, and there are {world_size} now; give resume(merge=function) or "
            "merge={name: function}, called as function(values_by_rank, rank, world_size), or do "
            "not ask for it",
            fqn=missing[0],
            path=path,
            missing=tuple(missing),
        )


def _function(merge: Merge, name: str) -> Any:
    return merge.get(name) if isinstance(merge, Mapping) else merge


# ---- Values of `state=` --------------------------------------------------------------------------


def refuse_stateful_within(state: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for a module, optimizer or other `Stateful` object in a value.

    A save would pickle it whole, and resumes refuse its class. In `state` itself it is a part.
    """
    known = set(_NEITHER)
    seen: set[int] = set()  # of containers, one of which may lie in itself
    left: list[tuple[str, Any]] = [("state", state)]
    while left:
        path, value = left.pop()
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            kind = type(part)
            if kind in known:
                continue
            is_exact = kind in _CONTAINERS
            # Nearly all hold tensors and numbers alone.
            if is_exact and known.issuperset(map(type, part.values() if kind is dict else part)):
                continue
            is_stateful = not is_exact and isinstance(part, Stateful) and not isinstance(part, type)
            if is_exact or isinstance(part, _CONTAINERS):
                if id(part) not in seen and not (is_stateful and value is state):
                    seen.add(id(part))
                    left.append((f"{path}.{key}", part))
            elif not is_stateful:
                known.add(kind)
            elif value is not state:
                raise UnsupportedError(
                    f"{path}.{key} is {with_article(kind.__name__)} within "
                    f"{with_article(type(value).__name__)}, which no resume would give its state; "
                    "give it a key of its own in state="
                )


# ---- Values that every rank saves alike ----------------------------------------------------------


_MAX_DEPTH = 64
_MARK = "__dcpx_per_rank__"  # key of the dict that stands where a PerRank was
_BUILTINS = (type(None), bool, int, float, complex, str, bytes, bytearray)
_LEAVES = frozenset((*_BUILTINS, torch.Size, torch.dtype, torch.device))
_SEQUENCES = frozenset((list, tuple))
_SETS = frozenset((set, frozenset))
_MAPPINGS = frozenset((dict, collections.OrderedDict, collections.Counter))


def split_content(value: Any, path: str) -> tuple[Any, dict[str, Any]]:
    """Returns a value without its `PerRank` objects, and their values by path.

    Dots join `path` and the parts beneath it: "user_content.a.0". It copies containers, but no
    tensors and arrays. Raises UnsupportedError: a value of another type, nested too deep, or one
    PerRank in another.
    """
    own: dict[str, Any] = {}
    return _copied(value, path, 0, own), own


def _copied(value: Any, path: str, depth: int, own: dict[str, Any] | None) -> Any:
    kind = type(value)
    if kind in _LEAVES:
        return value
    if depth > _MAX_DEPTH:
        raise UnsupportedError(
            f"keep '{path[:200]}': nested deeper than {_MAX_DEPTH}, or in itself"
        )
    if kind is PerRank:
        if own is None:
            raise UnsupportedError(f"keep '{path}': a PerRank in a PerRank, in a set or in a key")
        own[path] = _copied(value.value, path, depth + 1, None)
        return {_MARK: path}
    if kind in _SEQUENCES:
        parts = [_copied(v, f"{path}.{i}", depth + 1, own) for i, v in enumerate(value)]
        return parts if kind is list else tuple(parts)
    if kind in _SETS:
        return kind(_copied(v, f"{path}.(element)", depth + 1, None) for v in value)
    if kind in _MAPPINGS:
        if _MARK in value:
            raise UnsupportedError(f"keep '{path}': the key {_MARK!r} is torch-dcpx's own")
        made = kind()
        for key, part in value.items():
            copy = _copied(part, f"{path}.{_part(key)}", depth + 1, own)
            made[_copied(key, f"{path}.(key)", depth + 1, None)] = copy
        return made
    if kind is torch.Tensor:
        return _copied_tensor(value, path)
    if _is_plain_numpy(value):
        return value
    hint = "; give parameters and sharded tensors as `state`, or their `.detach()`"
    raise UnsupportedError(
        f"keep '{path}': a {kind.__module__}.{kind.__qualname__} cannot be loaded without running "
        "code of the file; keep numbers, strings, bytes, dicts, lists, tuples, sets, numpy arrays "
        f"and tensors{hint if isinstance(value, torch.Tensor) else ''}"
    )


def _part(key: Any) -> str:
    """Returns a key as a part of a path: no two paths of a value are equal."""
    if type(key) is str:
        return key if key.isidentifier() else repr(key)
    return str(key) if type(key) is int else f"({key!r})"


def _copied_tensor(value: torch.Tensor, path: str) -> torch.Tensor:
    if value.layout != torch.strided or value.is_meta or value.is_quantized:
        raise UnsupportedError(f"keep '{path}': a tensor that is sparse, quantized or on meta")
    value = value.detach()
    whole = value.untyped_storage().nbytes()
    return value if whole == value.nbytes else value.clone()  # without the rest of the storage


def _is_plain_numpy(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    kind = type(value)
    is_numpy = numpy is not None and (
        kind is numpy.ndarray or (issubclass(kind, numpy.generic) and kind.__module__ == "numpy")
    )
    return is_numpy and value.dtype.kind in "biufcSUmM"


def encode_content(value: Any) -> bytes:
    """Returns the archive of a value of `split_content`, as it is at this moment."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def decode_content(data: Any, fqn: str, path: str, options: ReadOptions | None) -> Any:
    """Returns the value of item `fqn` in the checkpoint `path`. Raises: CorruptionError."""
    if type(data) is not bytes:
        problem = f"a {type(data).__name__} where bytes were saved"
        raise CorruptionError(f"decode item '{fqn}' of '{path}': {problem}", fqn=fqn, path=path)
    allowed = () if options is None else options.safe_globals
    return decode_byte_item(data, fqn=fqn, path=path, safe_globals=allowed)


def with_own(value: Any, own: Mapping[str, Any]) -> Any:
    """Returns a value with this rank's own values, by path, in place of their marks."""
    kind = type(value)
    if kind in _SEQUENCES:
        parts = [with_own(part, own) for part in value]
        return parts if kind is list else tuple(parts)
    if kind in _MAPPINGS:
        if kind is dict and _MARK in value and len(value) == 1:
            return own[value[_MARK]]
        return kind({key: with_own(part, own) for key, part in value.items()})
    return value
