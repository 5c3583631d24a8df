"""`dcpx gc`: data files that no metadata names, left by saves that did not end or were replaced.

Our next save there removes them as well. A file is a leftover only by the exact form of name that a
save gives. Where a directory holds no metadata, every data file is one, also of a checkpoint whose
`.metadata` was lost: the caller must have named that directory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from torch_dcpx.errors import CorruptionError, UnsupportedError
from torch_dcpx.integrity.contents import commits_among, open_checkpoint
from torch_dcpx.storage.names import LOCK_NAME, METADATA_NAME
from torch_dcpx.storage.place import PosixPlace
from torch_dcpx.storage.running_save import RunningSave
from torch_dcpx.storage.save_lock import saves_elsewhere
from torch_dcpx.writer.commit import unnamed_files
from torch_dcpx.writer.locks import SaveLocks


class Leftovers(NamedTuple):
    """The leftovers of one directory."""

    path: str
    is_committed: bool  # the directory holds metadata
    files: dict[str, int]  # bytes by name

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def find_leftovers(path: Path) -> Leftovers:
    """Returns what is a leftover now, without a lock: of a save under way as well.

    Raises: NotCommittedError: no directory; CorruptionError: its metadata cannot be read, so nobody
    knows its files; StorageError.
    """
    with open_checkpoint(path) as directory:
        return _found(directory)


def remove_leftovers(path: Path) -> Leftovers:
    """Removes the leftovers of a directory, under the lock of a save, and returns them.

    Raises as `find_leftovers`, and:
        ConcurrentSaveError: a save is under way there.
        UnsupportedError: a save on another machine may be under way, where locks do not reach, or
            the file system has no locks; nothing was removed.
    """
    with open_checkpoint(path) as directory:
        locks, has_ended_well = SaveLocks(), False
        try:
            elsewhere = saves_elsewhere(directory, LOCK_NAME)
            if not elsewhere:  # else taking the lock would add this machine to them
                locks.take(directory, RunningSave(directory))
            if elsewhere or locks.leftovers_of() == "nobody":
                who = f"a save of another machine ({elsewhere[0]}) did not end, or is under way"
                raise UnsupportedError(
                    f"remove leftovers in '{path}': {who if elsewhere else 'there are no locks'}; "
                    "run `dcpx gc` on that machine, or remove the files by hand"
                )
            found = _found(directory)
            if found.is_committed:  # a killed save may have renamed it without an fsync
                directory.sync()
            for name in found.files:
                directory.unlink(name)
            has_ended_well = True
        finally:
            locks.release(has_ended_well=has_ended_well)
        return found


def _found(directory: PosixPlace) -> Leftovers:
    names = unnamed_files(directory)
    if names is None:
        raise CorruptionError(
            f"look for leftovers in '{directory.path}': its metadata cannot be read, so any file "
            f"may belong to it; try `dcpx repair {directory.path}`",
            path=str(directory.path / METADATA_NAME),
        )
    sizes = {
        name: os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_size
        for name in sorted(names)
        if directory.is_regular(name)
    }
    return Leftovers(str(directory.path), bool(commits_among(directory.names())), sizes)
