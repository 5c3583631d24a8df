"""Answers what a monitor asks: a checkpoint's step, when it was saved, by how many ranks, whom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import MetadataIndex

from torch_dcpx._native import _C
from torch_dcpx.errors import DcpxError
from torch_dcpx.integrity.states import Kind, State, utc_text
from torch_dcpx.metadata.file import CheckpointMetadata
from torch_dcpx.storage.names import METADATA_NAME, PIN_NAME, Look, data_file_parts, step_in
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import Place

_RECORD_ITEM = "dcpx.manager"  # a manager's record, as manager/stored.py writes it
_MAX_RECORD_BYTES = 1 << 20
_MAX_STEP = 10**18


class Facts(NamedTuple):
    """Six answers, which `ls`, `inspect` and `verify` give by the same names."""

    step: int | None = None  # of the training, as its manager or its name says
    saved_at: str | None = None  # "2026-01-31T23:59:59Z"
    ranks: int | None = None  # that saved it
    pinned: bool = False
    state: Kind = "none"
    save_id: str = ""  # "": unknown


def facts_of(
    place: Place, look: Look, state: State, commits: Sequence[CheckpointMetadata] = ()
) -> Facts:
    """Returns what a place and its metadata say. Reads one small item of a manager's checkpoint.

    Args:
        commits: the metadata there: of all ranks, or each rank's own; none that cannot be read.
    """
    named, is_pinned = _step_named(place.path), PIN_NAME in look.names
    if not commits:
        return Facts(named, pinned=is_pinned, state=state.kind)
    record = _record(place, commits[0])
    names = list(filter(lambda name: name.endswith(METADATA_NAME), look.names))
    written = max(filter(None, map(look.modified_s, names)), default=None)
    step, ranks = _number(record, "step"), _number(record, "ranks")
    saved = utc_text(_number(record, "saved_at") or written) or utc_text(written)
    return Facts(
        named if step is None else step,
        saved,
        ranks or _ranks_of(look, commits),
        is_pinned,
        state.kind,
        commits[0].save_id,
    )


def facts_of_export(path: Location, look: Look, name: str) -> Facts:
    """Returns what is known of files that `export` wrote, whose file or index has this name."""
    return Facts(_step_named(path), utc_text(look.modified_s(name)), state="committed")


def _step_named(path: Location) -> int | None:
    """Returns the step that a path says: a part of a framework's folder is of the folder's."""
    return step_in("/".join(str(path).split("/")[-2:]))


def _number(record: Any, name: str) -> int | None:
    value = record.get(name) if isinstance(record, dict) else None
    return value if type(value) is int and 0 <= value < _MAX_STEP else None


def _record(place: Place, found: CheckpointMetadata) -> Any:
    """Returns a manager's record, None where there is none, or none that can be read."""
    stored = found.metadata.storage_data or {}
    where = stored.get(MetadataIndex(_RECORD_ITEM))
    if found.files is None or where is None or where.relative_path not in found.files:
        return None
    if where.offset < 0 or not 0 < where.length <= _MAX_RECORD_BYTES:
        return None
    try:
        (data,) = place.read_at(where.relative_path, [where.offset], where.length)
        (text,) = _C.plain_values([data])
        return json.loads(text) if isinstance(text, str) else None
    except (DcpxError, ValueError, RecursionError):
        return None


def _ranks_of(look: Look, commits: Sequence[CheckpointMetadata]) -> int | None:
    """Returns how many ranks have written data files; None where their names do not say it."""
    names: set[str] = set()
    for found in commits:
        stored = found.metadata.storage_data or {}
        names.update(found.files or (info.relative_path for info in stored.values()))
        if found.files is None:  # stock leaves an empty one for a rank without data
            names.update(name for name in look.names if look.size(name) == 0)
    parts = filter(None, map(data_file_parts, names))
    return max((rank + 1 for rank, _, _ in parts), default=None)
