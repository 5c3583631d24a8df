"""`dcpx ls`: prints what `dcpx.ls` returns. Imports no torch."""

from __future__ import annotations

import errno

from torch_dcpx._text import age_text
from torch_dcpx.cli.output import (
    CANNOT,
    FINE,
    UNSOUND,
    put_json,
    put_lines,
    put_problem,
    put_table,
)
from torch_dcpx.errors import CorruptionError, StorageError
from torch_dcpx.storage.object_url import Location
from torch_dcpx.views.ls import ListedCheckpoint, Listing, ls


def show(
    path: Location,
    *,
    with_all: bool,
    newest: bool = False,
    max_age_s: float | None = None,
    as_json: bool,
) -> int:
    """Prints the checkpoints at `path`. Returns the exit code.

    Raises: StorageError: it cannot be listed; of a URL, nothing is there.
    """
    found = ls(path, with_all=with_all)
    if newest:
        return _show_newest(path, found, max_age_s, as_json=as_json)
    if as_json:
        put_json(found.checkpoints)
    elif found.checkpoints:
        put_table(*found.table())
        put_lines(found.notes)
    else:
        put_lines([found.head()])
    if found.broken:
        return UNSOUND
    return CANNOT if any(one.state == "unreadable" for one in found.checkpoints) else FINE


def _show_newest(path: Location, found: Listing, max_age_s: float | None, *, as_json: bool) -> int:
    """Prints the newest whole one. Returns the exit code: 1 where it is older than wanted, or one
    that was committed behind it is damaged.

    Raises: CorruptionError: all are damaged; StorageError: there is none.
    """
    one = found.newest
    damaged = [each for each in found.broken if each.state != "unfinished"]
    if one is None and damaged:
        text = f"'{path}' holds no whole checkpoint: '{damaged[-1].path}': {damaged[-1].problem}"
        raise CorruptionError(text, path=str(path))
    if one is None:
        text = f"'{path}' holds no committed checkpoint ({found.head().rpartition(': ')[2]})"
        raise StorageError(text, errno=errno.ENOENT, path=str(path))
    if as_json:
        put_json(one)
    else:
        put_table(*Listing(found.path, (one,)).table())
    newer = [each for each in damaged if _is_behind(each, one)]
    for each in newer:
        put_problem(f"'{each.path}' is newer, and damaged: {each.problem}")
    if newer:
        return UNSOUND
    if max_age_s is None:
        return FINE
    if one.age_s is None:
        put_problem(f"'{one.path}': nobody knows when it was saved")
        return CANNOT
    if one.age_s > max_age_s:
        text = f"the newest committed one, '{one.path}', was saved {age_text(one.age_s)}"
        put_problem(f"{text}: more than {max_age_s:g} s")
        return UNSOUND
    return FINE


def _is_behind(each: ListedCheckpoint, newest: ListedCheckpoint) -> bool:
    """Whether a damaged one was committed behind the newest whole one, as far as one can tell."""
    if each.saved_at and newest.saved_at and each.saved_at != newest.saved_at:
        return each.saved_at > newest.saved_at
    return each.step is None or newest.step is None or each.step > newest.step
