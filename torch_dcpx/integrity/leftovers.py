"""`dcpx gc`: data files that no metadata names, left by saves that did not end or were replaced.

Our next save to a directory removes them there as well. A file is a leftover only by the exact form
of name that a save gives. Where a directory holds no metadata, every data file is one, also of a
checkpoint whose `.metadata` was lost: the caller must have named that directory. What a repair
could use of a rank whose own metadata was lost beside those of others is none.

A store has no locks that would show a save under way: there only what is older than a grace goes.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator
from typing import NamedTuple

from torch_dcpx._answered_os import os
from torch_dcpx.errors import CorruptionError, StorageError, UnsupportedError, must_be
from torch_dcpx.integrity.compare import look_at_file
from torch_dcpx.integrity.contents import commits_among, open_checkpoint
from torch_dcpx.integrity.facts import seen_whole
from torch_dcpx.integrity.states import ranks_without_metadata, refuse_hidden
from torch_dcpx.options import ReadOptions
from torch_dcpx.storage.names import (
    LOCK_NAME,
    METADATA_NAME,
    TOMBSTONE_NAME,
    is_metadata_name,
    is_probe_name,
)
from torch_dcpx.storage.object_place import ObjectPlace
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import Place, PosixPlace
from torch_dcpx.storage.running_save import RunningSave
from torch_dcpx.storage.save_lock import saves_elsewhere
from torch_dcpx.storage.visibility import or_hidden
from torch_dcpx.writer.commit import referenced_files, unnamed_files
from torch_dcpx.writer.locks import SaveLocks

GRACE_S = 86400.0
_MARKS = frozenset({LOCK_NAME, TOMBSTONE_NAME})  # of a manager, in a store


class Leftovers(NamedTuple):
    """The leftovers of one directory or prefix."""

    path: str
    is_committed: bool  # it holds metadata
    is_removed: bool  # it held a checkpoint that a manager has removed
    files: dict[str, int]  # bytes by name
    kept: dict[str, int]  # of ranks whose metadata a repair could make anew

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def find_leftovers(path: Location) -> Leftovers:
    """Returns what is a leftover now, without a lock: of a save under way as well.

    Raises: NotCommittedError: no directory; CorruptionError: its metadata cannot be read, so nobody
    knows its files; StorageError, also where they may be hidden.
    """
    with open_checkpoint(path) as place:
        refuse_hidden(place, () if place.is_object else seen_whole(place, place.look()).names)
        return _found(place)


def remove_leftovers(path: Location, grace_s: float | None = None) -> Leftovers:
    """Removes leftovers, and returns them: of a directory under the lock of a save.

    Args:
        grace_s: of a store: younger objects stay. Default None: a day.

    Raises as `find_leftovers`, and:
        ConcurrentSaveError: a save is under way there.
        UnsupportedError: a save on another machine may be under way, where locks do not reach, or
            the file system has no locks; nothing was removed.
        OptionError: `grace_s` of a directory.
    """
    with open_checkpoint(path) as place:
        if isinstance(place, ObjectPlace):
            return _remove_old(place, GRACE_S if grace_s is None else grace_s)
        if grace_s is not None:
            raise must_be("grace", grace_s, "left out: a directory has locks of saves")
        return _remove_locked(place)


def _remove_locked(directory: PosixPlace) -> Leftovers:
    names = seen_whole(directory, directory.look()).names
    refuse_hidden(directory, names)  # before the lock is taken, which notes this process
    locks, has_ended_well = SaveLocks(), False
    try:
        elsewhere = saves_elsewhere(directory, LOCK_NAME)
        if not elsewhere:  # else taking the lock would add this machine to them
            locks.take(directory, RunningSave(directory))
        if elsewhere or locks.leftovers_of() == "nobody":
            why = "there are no locks; remove the files by hand while nobody saves there"
            if elsewhere:
                why = f"a save of another machine ({elsewhere[0]}) did not end, or is under way; "
                why += "run `dcpx gc` on that machine, or remove the files by hand"
            raise UnsupportedError(f"remove leftovers in '{directory.path}': {why}")
        found = _found(directory)
        if commits_among(names) and not found.is_committed:
            text = f"remove leftovers in '{directory.path}': its metadata has gone meanwhile"
            raise StorageError(text, errno=errno.ENOENT, path=str(directory.path))
        if found.is_committed:  # a killed save may have renamed it without an fsync
            directory.sync()
        directory.unlink_all(found.files)
        has_ended_well = True
    finally:
        locks.release(has_ended_well=has_ended_well)
    return found


def _remove_old(place: ObjectPlace, grace_s: float) -> Leftovers:
    now_s, entries = place.bucket.now_s(place.path.key), place.entries()
    found = _found(place)  # behind the entries: what was named meanwhile is no leftover
    removed = entries.get(TOMBSTONE_NAME)  # its readers go on for the grace
    since_s = 0.0 if removed is None else removed.modified_s
    old = {
        name: nbytes
        for name, nbytes in found.files.items()
        if name in entries and now_s - max(since_s, entries[name].modified_s) >= grace_s
    }
    marks = {name for name in old if name in _MARKS}
    place.unlink_all(sorted(old.keys() - marks))
    place.unlink_all(sorted(marks))  # last: they say what the data are
    return found._replace(files=old)


def _found(place: Place) -> Leftovers:
    commits = list(filter(is_metadata_name, () if place.is_object else place.names()))
    named = {name: referenced_files(place, name) for name in commits}
    # A later listing may leave out what an earlier one has named.
    known = {name: files for name, files in named.items() if files is not None}
    names = unnamed_files(place, published=known)
    if names is None or (names and len(known) < len(named)):
        for name in commits:
            place.read_small(name)  # raises what the storage says
        raise CorruptionError(
            f"look for leftovers in '{place.path}': its metadata cannot be read, so any file "
            f"may belong to it; try `dcpx repair {place.path}`",
            path=str(place.path / METADATA_NAME),
        )
    if isinstance(place, PosixPlace):
        there: Collection[str] = place.names()
        sizes = {
            name: os.stat(name, dir_fd=place.fd, follow_symlinks=False).st_size
            for name in sorted(names)
            if place.is_regular(name)
        }
    else:
        there = entries = place.entries()
        names |= {name for name in entries if name in _MARKS or is_probe_name(name)}
        sizes = {name: entries[name].nbytes for name in sorted(names) if name in entries}
    is_committed, is_removed = bool(commits or commits_among(there)), TOMBSTONE_NAME in there
    kept = {name: sizes.pop(name) for name in _usable(place, there) if name in sizes}
    return Leftovers(str(place.path), is_committed, is_removed, sizes, kept)


def _usable(place: Place, names: Collection[str]) -> Iterator[str]:
    """Yields the files of ranks that lack metadata, and of which each has a whole footer; all where
    the metadata may be hidden.
    """
    of_rank: dict[str, list[str]] = {}
    alone = ranks_without_metadata(list(names))
    if or_hidden(place.path):
        yield from alone
        return
    for name in alone:
        of_rank.setdefault(name.split("_")[2], []).append(name)
    job = place.verify_job(ReadOptions()) if of_rank else None
    for files in of_rank.values():
        found = [look_at_file(job, name)[0] for name in files] if job else []
        if all(one is not None and one.tail is not None and one.rows is not None for one in found):
            yield from files
