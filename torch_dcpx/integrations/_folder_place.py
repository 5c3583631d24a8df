"""An adapter makes its next folder as `.dcpx.saving.NAME/ID/NAME`, beside its place.

One save of a folder at a time, by the lock in `.dcpx.saving.NAME`. A new ID for each save: so that
two saves do not meet where the file system has no locks, and a save that was killed can be told.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch_dcpx._answered_os import answered_at, os
from torch_dcpx.errors import ConcurrentSaveError, StorageError, UnsupportedError
from torch_dcpx.integrations._folder_contents import Replacement, is_directory, like
from torch_dcpx.integrations._folder_record import Record, read_record, write_record
from torch_dcpx.manager.removal import suppress_and_log
from torch_dcpx.storage.directory import make_directory, rename_path, storage_errors
from torch_dcpx.storage.names import LOCK_NAME, SAVING_PREFIX, TRASH_PREFIX
from torch_dcpx.storage.place import PosixPlace
from torch_dcpx.storage.running_save import RunningSave, driven
from torch_dcpx.storage.save_lock import SaveLock

logger = logging.getLogger("torch_dcpx")

_ID = re.compile(r"[0-9a-f]{12}")


class FolderPlace:
    """The place of one save, on the coordinator. Holds the lock until `close`."""

    def __init__(self, folder: Path, *, is_durable: bool) -> None:
        """Takes the lock, and ends saves of this folder that were killed.

        Raises:
            ConcurrentSaveError: another job saves there.
            UnsupportedError: a link lies in the way.
            StorageError: this process may not write there.
        """
        self._folder, self._is_durable = folder, is_durable
        self._made: Path | None = None
        self._outer = folder.parent / f"{SAVING_PREFIX}{folder.name}"
        if self._outer.is_symlink():
            raise UnsupportedError(f"save '{folder}': '{self._outer}' is a link; remove it")
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            problem = f"save '{folder}': this process may not write there"
            raise StorageError(problem, errno=errno.EACCES, path=str(folder))
        is_of_ours = (self._outer / LOCK_NAME).exists()
        while not self._take():  # it went, and its holder with it
            pass
        if self._lock.is_held and self._lock.left_by != "another machine":
            with suppress_and_log(f"tidy '{self._outer}'"), storage_errors("list", self._outer):
                _tidy(self._outer, folder, is_of_ours=is_of_ours)

    def _take(self) -> bool:
        """Takes the lock. Returns False where its file was removed before it was taken."""
        make_directory(self._outer, is_durable=self._is_durable)
        self._directory = PosixPlace(self._outer)
        with driven():
            self._save = RunningSave(self._directory)
        try:
            self._lock = SaveLock(self._directory, LOCK_NAME, self._save)
        except ConcurrentSaveError as error:
            self._directory.close()
            raise ConcurrentSaveError(
                f"save to '{self._folder}': another job saves there ({error.owner}); wait for it, "
                "or save to another folder",
                errno=errno.EBUSY,
                path=str(self._folder),
                owner=error.owner,
            ) from error
        if not self._lock.is_there():
            self.close()
            return False
        return True

    def make(self) -> Path:
        """Returns the empty folder, made like the one that is there. Raises: StorageError."""
        folder = self._folder
        self._made = self._outer / uuid.uuid4().hex[:12]
        target = self._made / folder.name
        with storage_errors("mkdir", target):
            self._made.mkdir(0o700)  # nobody else reads what is still to get its mode
            target.mkdir()
            if folder.exists():
                like(folder, target)
        write_record(target, Record(folder.name, self._made.name), is_durable=self._is_durable)
        return target

    def close(self, *, is_published: bool = False) -> None:
        """Gives the lock back; safe to call twice. Behind a publication it leaves nothing."""
        with suppress_and_log(f"remove '{self._outer}'"):
            if is_published:
                self._leave()
        self._save.end()
        self._lock.release(has_ended_well=is_published)
        self._directory.close()

    def _leave(self) -> None:
        """Removes the directory of the lock where it holds nothing else. REQUIRES: the lock."""
        with storage_errors("remove", self._outer):
            if self._made is not None and not any(self._made.iterdir()):
                self._made.rmdir()
            if [path.name for path in self._outer.iterdir()] == [LOCK_NAME]:
                self._directory.unlink(LOCK_NAME)  # who has opened it looks whether it is there
                self._outer.rmdir()


def _tidy(outer: Path, folder: Path, *, is_of_ours: bool) -> None:
    """Ends saves of a folder that were killed. Logs a failure: the next one tries again.

    REQUIRES: the lock, which a save that runs would hold.
    """
    for path in sorted(outer.iterdir()):
        with suppress_and_log(f"remove what a killed save has left in '{path}'"):
            if not is_directory(path):
                continue
            if path.name.startswith(TRASH_PREFIX):
                with storage_errors("remove", path):
                    answered_at(path, "remove", partial(shutil.rmtree, path))
            elif _ID.fullmatch(path.name):
                _end(path, folder)
            elif path.name == folder.name and is_of_ours:  # of an earlier version
                if not os.path.lexists(folder):
                    _remove_new(path)
                    continue
                logger.warning(
                    "'%s' was left by a killed save of an earlier version; it may hold what you "
                    "had in '%s': look at it, and remove it",
                    path,
                    folder,
                )


def _end(left: Path, folder: Path) -> None:
    """Ends one save that was killed: before its folder was published, or behind that."""
    inner = left / folder.name
    with suppress(OSError):
        inner.rmdir()  # killed before it had a record
    if not is_directory(inner):
        with storage_errors("remove", left):
            left.rmdir()
        return
    made = read_record(inner)
    if made is not None and made.save_id == left.name:
        _remove_new(left)
        return
    current = read_record(folder) if is_directory(folder) else None
    if current is None:
        logger.warning("'%s' stays: it may hold what is yours, and '%s' is gone", inner, folder)
        return
    Replacement(folder, inner, current, is_durable=True).settle()
    with storage_errors("remove", left):
        left.rmdir()


def _remove_new(path: Path) -> None:
    """Removes a folder that was never published, under a name that says so to the next save."""
    trash = path.with_name(f"{TRASH_PREFIX}{uuid.uuid4().hex[:12]}")
    rename_path(path, trash)
    with storage_errors("remove", trash):
        answered_at(trash, "remove", partial(shutil.rmtree, trash))
