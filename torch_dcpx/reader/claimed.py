"""Whether files hold what their metadata claims: asked before memory or disk is taken by the claim.

A shape is some bytes of a file, whatever it says. What is no tensor's plain bytes (sparse,
expanded, packed by an extension) may be larger in memory than in its file: so there is room beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_dcpx._answered_os import os
from torch_dcpx._text import brief_text, human_bytes
from torch_dcpx.errors import CorruptionError
from torch_dcpx.metadata.lazy import outline_of
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import Place, open_place

_ROOM_BYTES = 256 << 20
_PER_BYTE = 2  # of the files


def check_claims(
    location: Location,
    entries: Mapping[str, Any],
    storage_data: Mapping[Any, Any],
    names: Iterable[str],
) -> None:
    """Raises CorruptionError where tensors of these names claim far more than the files hold.

    Args:
        location: of the files.
        entries, storage_data: of the metadata.
    """
    outline = outline_of(entries)
    claims: dict[str, int] = {}
    shapes: dict[str, torch.Size] = {}
    for name in names:
        entry = outline(name)
        if isinstance(entry, TensorStorageMetadata) and entry.properties.layout == torch.strided:
            shapes[name] = entry.size
            claims[name] = entry.size.numel() * entry.properties.dtype.itemsize
    total = sum(claims.values())
    if total <= _ROOM_BYTES:
        return
    with open_place(location) as place:
        held = _sizes(place, place.names())
        if total > _ROOM_BYTES + _PER_BYTE * held:  # some may lie in folders beneath
            held = _sizes(place, {info.relative_path for info in storage_data.values()})
    if total > _ROOM_BYTES + _PER_BYTE * held:
        name = max(claims, key=claims.__getitem__)
        shape = brief_text(list(shapes[name]))
        raise CorruptionError(
            f"the metadata of '{location}' claims {human_bytes(total)} of tensors, such as "
            f"{brief_text(repr(name))} of {shape}, where the files hold {human_bytes(held)}",
            path=str(location),
            fqn=name,
            touched=(),
        )


def _sizes(place: Place, names: Iterable[str]) -> int:
    """Returns the size of all files; they may be links, as in the cache of a hub."""
    if isinstance(place.path, Path):
        paths = map(place.path.joinpath, names)
        return sum(os.stat(path).st_size for path in paths if os.path.isfile(path))
    look = place.look()
    return sum(look.size(name) or 0 for name in names)
