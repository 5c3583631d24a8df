"""Stock's `.metadata` pickle as columns, from which `lazy` makes objects on demand.

Without it each tensor costs a dozen stand-ins and as many objects before the first byte is read.
`csrc/format/metadata_unpickle` takes exactly the pickles that torch writes for a Metadata; `stock`
reads all others, or refuses them in its words.
"""

from __future__ import annotations

import os
import pathlib

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from torch_dcpx._compat import HAS_KNOWN_ITEMS
from torch_dcpx._native import _C
from torch_dcpx.metadata.lazy import MANY_PLACES, have_full_lists, stored_dicts, stored_paths
from torch_dcpx.metadata.stock_classes import METADATA
from torch_dcpx.unpickle.torch_objects import LAYOUTS


def _numbers(column: bytes) -> memoryview:
    return memoryview(column).cast("q")


def open_stock_metadata(data: bytes) -> Metadata | None:
    """As `load_stock_metadata` of a whole file, but with dicts that are filled on demand.

    None: the file is not exactly as torch writes it: damaged, hostile, or some planner's own.
    """
    hash_key = os.urandom(16)
    found = _C.unpickle_metadata(data, hash_key) if HAS_KNOWN_ITEMS else None
    if found is None:
        return None
    strings: list[str] = found["strings"]
    columns: dict[str, bytes] = found["columns"]
    # The allow-list's constants: another torch's are unknown to it.
    dtypes = {n: METADATA.get(("torch", strings[n])) for n in {*_numbers(columns["tensor_dtype"])}}
    layouts = {n: LAYOUTS.get(strings[n]) for n in {*_numbers(columns["tensor_layout"])}}
    if not {*map(type, dtypes.values())} <= {torch.dtype} or None in layouts.values():
        return None
    names = {strings[n]: at for at, n in enumerate(_numbers(columns["entry_fqn"]))}
    descriptors = [*found["descriptors"], None]
    dicts = stored_dicts(strings, columns, names, dtypes, layouts, descriptors, hash_key)
    if dicts is None:
        return None
    planner = None
    if found["has_planner"]:
        fqns, counts, values = (_numbers(columns[f"planner_{n}"]) for n in ("fqn", "len", "value"))
        tags = columns["planner_tag"]
        planner = stored_paths(strings, fqns, counts, tags, values)
        longest = _C.longest_list(tags, columns["planner_value"])
        if longest > MANY_PLACES and not have_full_lists(planner, names):
            return None
    meta = None
    if found["storage_meta"] is not None:
        is_path, place, save_id, load_id, modules = found["storage_meta"]
        if is_path:
            place = [str(pathlib.PurePosixPath(*place))]
        meta = StorageMeta(place[0] if place else None, save_id, load_id, modules)
    return Metadata(dicts[0], planner, dicts[1], storage_meta=meta, version=found["version"])
