"""Answers what a monitor asks: a checkpoint's step, when it was saved, by how many ranks, whom, and
whether the files that its metadata names are there. Imports no torch.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch_dcpx import _mounts
from torch_dcpx._mounts import is_shared
from torch_dcpx._native import _C
from torch_dcpx._text import brief_text
from torch_dcpx.errors import DcpxError, StorageError
from torch_dcpx.integrity.contents import commits_among, read_brief
from torch_dcpx.integrity.states import Kind, State, ranks_without_metadata, utc_text
from torch_dcpx.metadata.brief import Brief
from torch_dcpx.storage.names import METADATA_NAME, PIN_NAME, Look, data_file_parts, step_in
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import Place, PosixPlace
from torch_dcpx.storage.visibility import UNKNOWN_S, look_until_seen

_MAX_RECORD_BYTES = 1 << 20
_MAX_STEP = 10**18
_RECENT_S = 60.0


class Facts(NamedTuple):
    """Six answers, which `ls`, `inspect` and `verify` give by the same names."""

    step: int | None = None  # of the training, as its manager or its name says
    saved_at: str | None = None  # "2026-01-31T23:59:59Z"
    ranks: int | None = None  # that saved it
    pinned: bool = False
    state: Kind = "none"
    save_id: str = ""  # "": unknown


def facts_of(place: Place, look: Look, state: State, commits: Sequence[Brief] = ()) -> Facts:
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


def _record(place: Place, found: Brief) -> Any:
    """Returns a manager's record, None where there is none, or none that can be read."""
    if found.record is None:
        return None
    name, offset, nbytes = found.record
    if name not in found.sizes or offset < 0 or not 0 < nbytes <= _MAX_RECORD_BYTES:
        return None
    try:
        (data,) = place.read_at(name, [offset], nbytes)
        (text,) = _C.plain_values([data])
        return json.loads(text) if isinstance(text, str) else None
    except (DcpxError, ValueError, RecursionError):
        return None


def _ranks_of(look: Look, commits: Sequence[Brief]) -> int | None:
    """Returns how many ranks have written data files; None where their names do not say it."""
    names: set[str] = set()
    for found in commits:
        names.update(found.sizes)
        if not found.is_exact:  # stock leaves an empty one for a rank without data
            names.update(name for name in look.names if look.size(name) == 0)
    parts = filter(None, map(data_file_parts, names))
    return max((rank + 1 for rank, _, _ in parts), default=None)


# ---- The files that metadata names ---------------------------------------------------------------


class Files(NamedTuple):
    """Says what lies there of the files that metadata names, by names and sizes alone."""

    sizes: dict[str, int]  # bytes of each that is named; 0 of a missing one
    missing: int = 0  # no regular file
    short: int = 0
    long: int = 0  # of ours, whose metadata says each size
    faults: tuple[str, ...] = ()  # each in words

    @property
    def is_whole(self) -> bool:
        """Whether each file is there, and at least as long as the last byte recorded in it."""
        return not self.faults

    def __str__(self) -> str:
        counts = len(self.sizes), self.missing, self.short, self.long
        return files_text(*counts, is_whole=self.is_whole)


def files_text(files: int, *wrong: int, is_whole: bool) -> str:
    """Returns "whole", or "1 of 2 missing, 1 short". `wrong`: missing, short, too long ones."""
    counts = zip(wrong, ("missing", "short", "too long"), strict=True)
    texts = [f"{count} {word}" for count, word in counts if count]
    if not texts:
        return "whole" if is_whole else "a rank's metadata missing"
    (count, word), *more = (text.split(" ", 1) for text in texts)
    return ", ".join([f"{count} of {files} {word}", *map(" ".join, more)])


def files_of(look: Look, commits: Sequence[Brief]) -> Files:
    """Compares the files that metadata names with those of one listing. Reads no data."""
    sizes: dict[str, int] = {}
    faults: list[str] = []
    counts = {"missing": 0, "short": 0, "long": 0}
    for brief in commits:
        for name, wanted in sorted(brief.sizes.items()):
            found, shown = look.size(name), brief_text(name)
            sizes[name] = found or 0
            if found is None:
                counts["missing"] += 1
                is_there = name in look.names  # a directory, a link
                faults.append(f"'{shown}' is {'no regular file' if is_there else 'missing'}")
            elif found != wanted if brief.is_exact else found < wanted:
                counts["short" if found < wanted else "long"] += 1
                faults.append(f"'{shown}' has {found} B, {wanted} B were written")
    alone = ranks_without_metadata(look.names)
    faults += [f"'{name}' is of a rank whose metadata is not there" for name in alone]
    return Files(sizes, **counts, faults=tuple(faults))


def seen_whole(place: Place, look: Look) -> Look:
    """Returns a look at a checkpoint of the last minute once this node sees its files as long as
    its metadata says, or after 5 s: on file systems that others mount the sizes may be late.
    """
    if not (isinstance(place, PosixPlace) and _mounts.HAS_SHARED and is_shared(place.path)):
        return look
    directory: PosixPlace = place
    dates = [look.modified_s(name) or 0.0 for name in commits_among(look.names)]
    if not dates or time.time() - max(dates) > _RECENT_S:
        return look

    def again() -> None:
        nonlocal look
        look = directory.look()
        commits = [read_brief(directory, name) for name in commits_among(look.names)]
        found = files_of(look, commits)
        if found.short or found.long:
            for name in found.sizes:  # sshfs keeps a size for 20 s, unless the file is opened
                with suppress(DcpxError), directory.open_regular(name):
                    pass
        if found.faults:
            raise StorageError(found.faults[0], errno=errno.ESTALE, path=str(directory.path))

    with suppress(DcpxError):  # what is wrong then is wrong
        look_until_seen(directory.path, UNKNOWN_S, again)
    return look
