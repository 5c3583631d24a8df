"""Repeats a look that does not fit: what another node has changed is seen late.

A save notes its id by the path (`note_saved`): a later look of this job goes on until it sees that
save. Without a note a look is repeated for some seconds. On a file system of one node the first
look is the truth, and in a store as well.

Where a part of a file system is down, listings leave its files out without an error. So files
without metadata are of a save that did not end only where that save's own record says so
(`hidden`).
"""

from __future__ import annotations

import errno
import functools
import logging
import socket
import time
from collections.abc import Callable, Sequence
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
from torch_dcpx.storage.directory import Directory, storage_errors
from torch_dcpx.storage.names import (
    LOCK_NAME,
    METADATA_NAME,
    PIN_NAME,
    READERS_NAME,
    TOMBSTONE_NAME,
    holds_checkpoint,
    is_data_file_name,
    is_metadata_name,
    is_rank_lock,
    step_in,
)
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.paths import absolute

logger = logging.getLogger("torch_dcpx")

_T = TypeVar("_T")

_PART_DOWN = "a part of the file system that does not answer hides its files"
UNKNOWN_S = 5.0  # for which a look is repeated that no save of this job is known to end
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 1.0
_PAUSES_S = (0.0, 0.2, 0.8, 1.2, 1.3)  # more than the second for which most clients keep names
_MAX_NOTES = 4096
_MAX_BEFORE = 16  # of one path: which a node may still see
_NEW_S = 60.0  # a directory that a save may be about to write to
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
        known = _saved.get(absolute(location))  # as saves note it
    return known


def refuse_older(location: Location, save_id: str) -> None:
    """Raises StorageError where a node sees a save that one of this job has replaced. On a file
    system of one node that save was put back.
    """
    known = saved_at(location)
    if known is None or save_id == known.save_id or not isinstance(location, Path):
        return
    if save_id not in known.before or not is_shared(location):
        _saved.pop(absolute(location), None)  # somebody else has changed what is there since
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


def or_hidden(location: Location) -> str:
    """Returns what else a missing file may mean, for a text: nothing where one node has it all."""
    is_apart = isinstance(location, Path) and is_shared(location)
    return f", or {_PART_DOWN}" if is_apart else ""


def hidden(directory: Directory, names: Sequence[str]) -> str:
    """Returns why nobody can tell if a directory holds a checkpoint; "" where its names say it.

    A file system that other nodes mount may hide the metadata. Only a save that has noted itself,
    and did not end, is known to have left data files: those that are not older than its note. A
    removal is known to have left those that are not younger.

    Args:
        names: in the directory.

    Raises: StorageError: what a look-up of the metadata says, but that there is none.
    """
    if any(map(is_metadata_name, names)) or not is_shared(directory.path):
        return ""
    if directory.is_regular(METADATA_NAME):
        return f"a listing leaves out its '{METADATA_NAME}', which is there: look again"
    if not names and step_in(directory.path.name) is not None:
        with storage_errors("fstat", directory.path, is_read=True):
            is_old = time.time() - os.fstat(directory.fd).st_mtime > _NEW_S
        return f"nothing is seen in it: {_PART_DOWN}, or a save was killed here" if is_old else ""
    files = [file.st_mtime_ns for file in _statuses(directory, names, is_data_file_name)]
    if TOMBSTONE_NAME in names:  # which has the date of the metadata that it was
        notes = _statuses(directory, names, TOMBSTONE_NAME.__eq__)
        is_sure = not files or max(files) <= min(note.st_mtime_ns for note in notes)
        found = "data files behind its removal"
    else:
        marks = [name for name in (READERS_NAME, PIN_NAME) if name in names]
        locks = _statuses(directory, names, lambda name: name == LOCK_NAME or is_rank_lock(name))
        since = max((lock.st_mtime_ns for lock in locks if lock.st_size), default=None)
        is_noted = since is not None and min(files, default=since) >= since
        is_sure = not marks and (is_noted or not holds_checkpoint(names))
        found = f"'{marks[0]}' of a commit" if marks else "data files"
    return "" if is_sure else f"it holds {found}, and no '{METADATA_NAME}' is seen: {_PART_DOWN}"


def _statuses(
    directory: Directory, names: Sequence[str], wanted: Callable[[str], bool]
) -> list[os.stat_result]:
    """Returns the status of each wanted file. Raises: StorageError, also where one has gone."""
    with storage_errors("stat", directory.path, is_read=True):
        stat = functools.partial(os.stat, dir_fd=directory.fd, follow_symlinks=False)
        return [stat(name) for name in names if wanted(name)]


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
