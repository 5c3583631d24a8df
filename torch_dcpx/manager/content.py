"""Small values of a user's own, kept exactly and loaded without execution.

They are saved as one byte item, a `torch.save` archive, so that tuples stay tuples, keys keep their
types, and what is empty is there. Only exact types whose archives load through the allow-list of
`trust` are taken; anything else is refused when it is saved, by its path, not when it is needed.

    None bool int float complex str bytes bytearray
    list tuple set frozenset dict OrderedDict Counter      of these
    numpy arrays and scalars (no objects), torch tensors, torch.Size, torch.dtype, torch.device
    PerRank of any of these: each rank's own (see `per_rank`)
"""

from __future__ import annotations

import collections
import io
import sys
from collections.abc import Mapping
from typing import Any

import torch

from torch_dcpx.errors import CorruptionError, UnsupportedError
from torch_dcpx.manager.per_rank import PerRank
from torch_dcpx.options import ReadOptions
from torch_dcpx.unpickle.byte_items import decode_byte_item

_MAX_DEPTH = 64
_MARK = "__dcpx_per_rank__"  # key of the dict that stands where a PerRank was
_LEAVES = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, bytearray),
        *(torch.Size, torch.dtype, torch.device),
    )
)
_SEQUENCES = frozenset((list, tuple))
_SETS = frozenset((set, frozenset))
_MAPPINGS = frozenset((dict, collections.OrderedDict, collections.Counter))


def split_content(value: Any, path: str) -> tuple[Any, dict[str, Any]]:
    """Returns a value without what ranks have of their own, and that by its path.

    Args:
        value: of the types above.
        path: its name, such as "user_content"; parts are joined by dots.

    Returns:
        A copy of the containers, tensors as they are; and the values of `PerRank` objects.

    Raises:
        UnsupportedError: something of another type, nested too deep, or one PerRank in another.
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
        return _copied_mapping(value, path, depth, own)
    if kind is torch.Tensor:
        return _copied_tensor(value, path)
    if _is_plain_numpy(value):
        return value
    raise _refusal(value, path)


def _copied_mapping(
    value: Mapping[Any, Any], path: str, depth: int, own: dict[str, Any] | None
) -> Any:
    if _MARK in value:
        raise UnsupportedError(f"keep '{path}': the key {_MARK!r} is torch-dcpx's own")
    made: Any = type(value)()
    for key, part in value.items():
        name = f"{path}.{_part(key)}"
        made[_copied(key, f"{path}.(key)", depth + 1, None)] = _copied(part, name, depth + 1, own)
    return made


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
    return value if whole == value.nbytes else value.clone()  # not what it is a view of


def _is_plain_numpy(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return False
    is_array = type(value) is numpy.ndarray or (
        isinstance(value, numpy.generic) and type(value).__module__ == "numpy"
    )
    return is_array and value.dtype.kind in "biufcSUmM"


def _refusal(value: Any, path: str) -> UnsupportedError:
    kind = type(value)
    hint = ""
    if isinstance(value, torch.Tensor):
        hint = "; give parameters and sharded tensors as `state`, or their `.detach()`"
    return UnsupportedError(
        f"keep '{path}': a {kind.__module__}.{kind.__qualname__} cannot be loaded without running "
        "code of the file; keep numbers, strings, bytes, dicts, lists, tuples, sets, numpy arrays "
        f"and tensors{hint}"
    )


def encode_content(value: Any) -> bytes:
    """Returns the archive of what `split_content` gave: what it held at this moment."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def decode_content(data: Any, fqn: str, path: str, options: ReadOptions | None) -> Any:
    """Returns what was encoded; nothing of it is executed.

    Args:
        data: the item's value.
        fqn: its name.
        path: of the checkpoint, for errors.
        options: of the reader: its `safe_globals`.

    Raises:
        CorruptionError: it is no archive of ours.
    """
    if type(data) is not bytes:
        raise CorruptionError(
            f"decode item '{fqn}' of '{path}': a {type(data).__name__} where bytes were saved",
            fqn=fqn,
            path=path,
        )
    allowed = () if options is None else options.safe_globals
    return decode_byte_item(data, fqn=fqn, path=path, safe_globals=allowed)


def with_own(value: Any, own: Mapping[str, Any]) -> Any:
    """Returns a decoded value with this rank's own in the places where a PerRank was.

    Args:
        value: of `decode_content`.
        own: by path.
    """
    kind = type(value)
    if kind in _SEQUENCES:
        parts = [with_own(part, own) for part in value]
        return parts if kind is list else tuple(parts)
    if kind in _MAPPINGS:
        if kind is dict and _MARK in value and len(value) == 1:
            return own[value[_MARK]]
        made = kind()
        for key, part in value.items():
            made[key] = with_own(part, own)
        return made
    return value
