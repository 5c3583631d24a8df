"""Stock's `.metadata` pickle as columns, from which objects are made when somebody looks.

Without it each of a model's tensors costs a dozen stand-ins and as many objects before the first
byte is read. `csrc/format/metadata_unpickle` takes what torch writes for a Metadata and nothing
else; for whatever it declines, `stock_metadata` has the say, with its refusals and their words.
"""

from __future__ import annotations

import os
import pathlib
from array import array
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from torch_dcpx._compat import HAS_KNOWN_ITEMS, HAS_STRIDES
from torch_dcpx._native import _C
from torch_dcpx._plan_classes import MAKER
from torch_dcpx.metadata.lazy import StoredEntries, StoredPaths, StoredPlaces
from torch_dcpx.metadata.stock_classes import METADATA
from torch_dcpx.metadata.stock_pickle import MEMORY_FORMATS
from torch_dcpx.unpickle.torch_objects import LAYOUTS


def _numbers(column: bytes) -> array[int]:
    return array("q", column)


def _distinct(column: bytes) -> set[int]:
    return set(_numbers(column))


def _planner(columns: dict[str, bytes], strings: list[str]) -> StoredPaths:
    """planner_data, made when it is first looked at."""
    fqns, counts = columns["planner_fqn"], columns["planner_len"]
    tags, values = columns["planner_tag"], columns["planner_value"]

    def make() -> dict[str, Any]:
        keys: list[str | int] = [
            value if tag else strings[value]
            for tag, value in zip(tags, _numbers(values), strict=True)
        ]
        mapping = {}
        begin = 0
        for fqn, count in zip(_numbers(fqns), _numbers(counts), strict=True):
            mapping[strings[fqn]] = tuple(keys[begin : begin + count])
            begin += count
        return mapping

    return StoredPaths.over(make)


def _storage_meta(found: tuple[Any, ...] | None) -> StorageMeta | None:
    if found is None:
        return None
    is_path, place, save_id, load_id, modules = found
    if is_path:
        place = [str(pathlib.PurePosixPath(*place))]
    return StorageMeta(place[0] if place else None, save_id, load_id, modules)


def open_stock_metadata(data: bytes) -> Metadata | None:
    """Returns the Metadata that fills `data`, its dicts filled on demand.

    Args:
        data: a whole `.metadata` file of stock's.

    Returns:
        What `load_stock_metadata` returns for it; None for all that is not exactly as torch writes
        it, whether it is damaged, hostile, or some planner's own.
    """
    hash_key = os.urandom(16)
    found = _C.unpickle_metadata(data, hash_key) if HAS_KNOWN_ITEMS else None
    if found is None:
        return None
    strings: list[str] = found["strings"]
    columns: dict[str, bytes] = found["columns"]
    # The allow-list's constants: another torch's are unknown to it.
    dtypes = {n: METADATA.get(("torch", strings[n])) for n in _distinct(columns["tensor_dtype"])}
    layouts = {n: LAYOUTS.get(strings[n]) for n in _distinct(columns["tensor_layout"])}
    if not {*map(type, dtypes.values())} <= {torch.dtype} or None in layouts.values():
        return None
    values: dict[str, Any] = {
        "dtype": dtypes,
        "layout": layouts,
        "memory_formats": list(MEMORY_FORMATS),
        "descriptors": [*found["descriptors"], None],
        "StorageInfo": _StorageInfo,
        "hash_key": hash_key,
        "has_strides": HAS_STRIDES,
    }
    stored = _C.StoredColumns(MAKER, strings, columns, values)
    if stored.has_twins:
        return None
    names = {strings[n]: at for at, n in enumerate(_numbers(columns["entry_fqn"]))}
    return Metadata(
        state_dict_metadata=StoredEntries.over(stored, names),
        planner_data=_planner(columns, strings) if found["has_planner"] else None,
        storage_data=StoredPlaces.over(stored),
        storage_meta=_storage_meta(found["storage_meta"]),
        version=found["version"],
    )
