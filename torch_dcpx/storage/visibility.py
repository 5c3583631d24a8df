"""Repeats a look that does not fit: what another node has changed is seen late.

A save notes its id by the path (`note_saved`): a later look of this job goes on until it sees that
save. Without a note a look is repeated for some seconds. On a file system of one node the first
look is the truth, and in a store as well.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch_dcpx._answered_os import os
from torch_dcpx._mounts import is_shared
from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import (
    CorruptionError,
    DcpxError,
    NotCommittedError,
    ShortReadError,
    StorageError,
    UnsafePickleError,
)
from torch_dcpx.storage.names import METADATA_NAME
from torch_dcpx.storage.object_url import Location

logger = logging.getLogger("torch_dcpx")

_T = TypeVar("_T")

UNKNOWN_S = 5.0  # for which a look is repeated that no save of this job is known to end
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 1.0
_PAUSES_S = (0.0, 0.2, 0.8, 1.2, 1.3)  # more than the second for which most clients keep names
_MAX_NOTES = 4096
_MAX_BEFORE = 16  # of one path: which a node may still see
_LATE = frozenset({errno.ESTALE, errno.ENOENT})


class Saved(NamedTuple):
    """A save of this job, and those that it has replaced."""

    save_id: str
    before: tuple[str, ...]  # the last ones, the latest at the end


_saved: dict[str, Saved] = {}  # by path, the oldest first


def note_saved(location: Location, save_id: str, replaced: str = "") -> None:
    """Notes that a save was committed at a path, in place of the save `replaced`, if of any."""
    if not isinstance(location, Path):
        return
    path = str(location)
    known = _saved.pop(path, None)
    before = () if known is None else known.before
    if known is not None and known.save_id != save_id:
        before = (*before, known.save_id)[-_MAX_BEFORE:]
    _saved[path] = Saved(save_id, (*before, replaced) if replaced else before)
    if len(_saved) > _MAX_NOTES:
        _saved.pop(next(iter(_saved)), None)


def saved_at(location: Location) -> Saved | None:
    """Returns the last save of this job at a path; None if there was none, or a later one."""
    if not _saved:
        return None
    known = _saved.get(str(location))
    if known is None and isinstance(location, Path) and not location.is_absolute():
        known = _saved.get(str(location.absolute()))  # as saves note it
    return known


def refuse_older(location: Location, save_id: str) -> None:
    """Raises StorageError where a node sees a save that one of this job has replaced. On a file
    system of one node that save was put back.
    """
    known = saved_at(location)
    if known is None or save_id == known.save_id or not isinstance(location, Path):
        return
    if save_id not in known.before or not is_shared(location):
        _saved.pop(str(location.absolute()), None)  # somebody else has changed what is there since
        return
    path = str(location / METADATA_NAME)
    raise StorageError(
        f"'{path}' is still that of save {save_id} on {socket.gethostname()}, where this job has "
        f"committed save {known.save_id} since",
        errno=errno.ESTALE,
        path=path,
    )


def is_late_look(error: BaseException) -> bool:
    """Returns whether a later look may see what this one did not."""
    if isinstance(error, CorruptionError):
        return not isinstance(error, UnsafePickleError)
    is_short = isinstance(error, ShortReadError)
    return is_short or (isinstance(error, StorageError) and error.errno in _LATE)


def look_until_seen(
    location: Location,
    visible_s: float,
    look: Callable[[], _T],
    check: Callable[[DcpxError], None] | None = None,
    *,
    is_known: bool = False,
) -> _T:
    """Returns what `look` returns, which is called again while a later look may see more.

    Args:
        location: what is looked at. In a store, and on a file system of one node, it looks once.
        visible_s: for how many seconds, where a save of this job is known; else 5 s at most.
        look: opens all that it needs anew.
        check: is called with each such error, and may raise another, which ends the looks.
        is_known: whether the caller knows a save that must be there.

    Raises: the last error of `look`, which then says where and for how long it was looked.
    """
    deadline: Deadline | None = None
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return look()
        except DcpxError as error:
            known = saved_at(location)
            is_known = is_known or known is not None
            is_missing = isinstance(error, NotCommittedError) and error.errno == errno.ENOENT
            if not is_late_look(error) or (is_missing and not is_known):
                raise
            if check is not None:
                check(error)
            if not (isinstance(location, Path) and is_shared(location)):
                raise
            if deadline is None:
                deadline = Deadline(visible_s if is_known else min(visible_s, UNKNOWN_S))
            if deadline.has_passed:
                _say_how_long(error, deadline, known)
                raise
            logger.debug("looked at again: %s", error)
        time.sleep(min(pause_s, deadline.remaining_s))
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        _look_up_anew(location)


def is_of_another_save(error: BaseException) -> bool:
    """Returns whether a load has met two saves, one after the other, or on two ranks."""
    is_plain = isinstance(error, StorageError) and not isinstance(error, NotCommittedError)
    return is_plain and error.errno == errno.ESTALE  # type: ignore[attr-defined]


def until_of_one_save(load: Callable[[], _T]) -> _T:
    """Returns what `load` returns, which begins anew, up to five times in 3.5 s, where it has met
    two saves. The ranks of a load agree on its error, so all begin it equally often.
    """
    for pause_s in _PAUSES_S:
        try:
            return load()
        except StorageError as error:
            if not is_of_another_save(error):
                raise
            logger.debug("loaded again: %s", error)
        time.sleep(pause_s)
    return load()


def _say_how_long(error: DcpxError, deadline: Deadline, known: Saved | None) -> None:
    expected = "" if known is None else f"; this job has committed save {known.save_id} there"
    error.message += (
        f" (on {socket.gethostname()}, for {deadline.waited_s:.0f} s{expected}; another node may "
        "see more)"
    )


def _look_up_anew(path: Path) -> None:
    """Lists a directory and the one above it: so a client forgets which names it has missed."""
    for each in (path.parent, path):
        with suppress(OSError):  # the next look tells
            os.listdir(each)
