"""Replaces a folder by a new one, and keeps all that is the user's in it as it is.

1. What is the user's gets a second name in the new folder: a link to each file, a twin of each
   directory.
2. One rename exchanges both folders.
3. Directories of the user go back in place of their twins. Ours of the old folder goes, and second
   names. What came meanwhile, or could not be linked, moves to the new folder.

A kill leaves the one folder or the other, each with all of the user's; `settle` goes on from there.
What has no place stays in the old folder, and the log says so: nothing of the user's is removed.
"""

from __future__ import annotations

import errno
import logging
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from torch_dcpx._answered_os import answered_at, os
from torch_dcpx._replacing import exchange, rename_new
from torch_dcpx.errors import ConcurrentSaveError, UnsupportedError
from torch_dcpx.integrations._dcp_calls import parts_of
from torch_dcpx.integrations._folder_record import Record, ours_in, read_record
from torch_dcpx.storage.directory import fsync_path, storage_errors
from torch_dcpx.storage.names import FOLDER_NAME, METADATA_NAME, PIN_NAME, TRASH_PREFIX
from torch_dcpx.storage.reader_lock import being_deleted

logger = logging.getLogger("torch_dcpx")


def is_directory(path: Path) -> bool:
    """Returns whether a directory lies there, and no link to one."""
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    """Returns the mode of what lies there, a link too; 0: nothing does."""
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def refuse_pinned(folder: Path, parts: Iterable[str]) -> None:
    """Raises UnsupportedError where a folder is pinned, or one of the parts that a save makes."""
    for place in (folder, *(folder / part for part in parts)):
        if (place / PIN_NAME).exists():
            problem = f"'{place}' is pinned; remove its '{PIN_NAME}' first, or save elsewhere"
            raise UnsupportedError(f"save '{folder}': {problem}")


def check_room(old: Path, new: Path, parts: list[str]) -> None:
    """Raises UnsupportedError where the user has something else at a name that a new folder needs,
    or where no rename can carry what the user has.

    Args:
        parts: paths in the new folder of directories that are still to be made.
    """
    for place in [old, *old.iterdir()] if is_directory(old) else []:
        if os.path.ismount(place):
            problem = "a file system is mounted there, which no rename can replace"
            raise UnsupportedError(f"save '{old}': '{place}': {problem}; save to another folder")
    directories = {old / above for part in parts for above in (Path(part), *Path(part).parents)}
    files: set[Path] = set()
    for within, beneath, names in os.walk(new):
        at = old / Path(within).relative_to(new)
        directories.update(at / name for name in beneath)
        files.update(at / name for name in names)
    wrong = [path for path in directories if _mode(path) and not is_directory(path)]
    wrong += [path for path in files if _mode(path) and not stat.S_ISREG(_mode(path))]
    ours = ours_in(old, None) if wrong else set()
    for path in sorted(wrong):
        if not _are_all_in(ours, path, old):
            what = "file" if path in files else "directory"
            raise UnsupportedError(
                f"save '{old}': '{path}' is not ours and no {what}, and the save needs its name "
                f"for a {what}; move it, or save to another folder"
            )


def _are_all_in(ours: set[str], path: Path, folder: Path) -> bool:
    if not is_directory(path):
        return str(path.relative_to(folder)) in ours
    within = [*path.iterdir()]
    return bool(within) and all(_are_all_in(ours, each, folder) for each in within)


class Replacement:
    """One folder in place of another. Not thread-safe."""

    def __init__(self, folder: Path, beside: Path, record: Record, *, is_durable: bool) -> None:
        """Changes nothing yet.

        Args:
            folder: its place.
            beside: the new one before `exchange`, the old one behind it.
            record: of the new one.
        """
        self._folder, self._beside, self._is_durable = folder, beside, is_durable
        self._record = record
        self._ours: set[str] = set()
        self._above: set[str] = set()  # directories with something of ours
        self._twins: list[str] = []  # directories of the user
        self._left: list[str] = []

    def carry(self) -> None:
        """Gives what is the user's a second name. Raises: StorageError."""
        self._know(self._folder)
        with storage_errors("carry what is yours from", self._folder):
            self._carry("")
            like(self._folder, self._beside)
        if self._is_durable:
            for path, _, _ in os.walk(self._beside):
                fsync_path(Path(path))

    def exchange(self) -> None:
        """Puts the new folder in its place. Raises: OSError."""
        exchange(self._beside, self._folder)
        if self._is_durable:
            fsync_path(self._folder.parent)
            fsync_path(self._beside.parent)

    def settle(self) -> None:
        """Gives back what is the user's, and removes the old folder. Never fails: it logs."""
        with self._noted(self._folder.name):
            self._give_back()
        if self._left:
            logger.warning(
                "'%s' keeps %s, which is not ours and has no place in '%s': look at it, and remove "
                "what you do not need",
                self._beside,
                ", ".join(self._left[:5]),
                self._folder,
            )

    def _give_back(self) -> None:
        if not self._ours:
            self._know(self._beside)
        for rel in self._twins:
            try:
                exchange(self._beside / rel, self._folder / rel)
            except OSError as error:  # as where there is no twin: it is moved, or its twin stays
                logger.debug("'%s' of '%s': %s", rel, self._beside, error)
        if self._is_durable:
            for parent in {(self._folder / rel).parent for rel in self._twins}:
                fsync_path(parent)
        self._empty("")
        if not self._left:
            self._beside.rmdir()

    def _know(self, old: Path) -> None:
        self._ours = ours_in(old, self._record)
        self._above = {str(above) for rel in self._ours for above in Path(rel).parents}

    @contextmanager
    def _noted(self, rel: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.debug("'%s' of '%s': %s", rel, self._beside, error)
            self._left.append(rel)

    def _carry(self, at: str) -> None:
        for mine in sorted((self._folder / at).iterdir()):
            rel = str(mine.relative_to(self._folder))
            new = self._beside / rel
            if is_directory(mine) and (rel in self._above or is_directory(new)):
                if is_directory(new):
                    like(mine, new)
                self._carry(rel)
            elif rel not in self._ours and not os.path.lexists(new):
                self._make_parents(self._folder, self._beside, rel)
                if is_directory(mine):
                    self._twins.append(rel)
                _second_name(mine, new)

    def _make_parents(self, old: Path, new: Path, rel: str) -> None:
        for above in reversed(Path(rel).parents):
            if not is_directory(new / above):
                (new / above).mkdir()
                like(old / above, new / above)

    def _empty(self, at: str) -> None:
        """Removes what is ours of the old folder, and second names; moves the rest."""
        # Last what tells which of the others are ours: a kill may come.
        last = (METADATA_NAME, FOLDER_NAME)
        for mine in sorted((self._beside / at).iterdir(), key=lambda path: path.name in last):
            rel = str(mine.relative_to(self._beside))
            place = self._folder / rel
            with self._noted(rel):
                is_free = not os.path.lexists(place)
                if is_directory(mine) and (rel in self._above if is_free else is_directory(place)):
                    self._empty(rel)
                    if not any(mine.iterdir()):
                        mine.rmdir()
                elif rel in self._ours or (not is_free and _are_same(mine, place)):
                    mine.unlink()  # raises for a directory
                elif is_free:
                    self._make_parents(self._beside, self._folder, rel)
                    rename_new(mine, place)
                else:
                    self._left.append(rel)


def _are_same(one: Path, other: Path) -> bool:
    return os.path.samestat(one.lstat(), other.lstat())


def _second_name(mine: Path, new: Path) -> None:
    """Links a file, or all of a directory. What cannot be linked is moved later."""
    try:
        if not is_directory(mine):
            os.link(mine, new, follow_symlinks=False)
            return
        new.mkdir()
        for each in mine.iterdir():
            _second_name(each, new / each.name)
        answered_at(new, "copystat to", partial(shutil.copystat, mine, new, follow_symlinks=False))
    except OSError as error:
        logger.debug("no second name for '%s': %s", mine, error)


def like(old: Path, new: Path) -> None:
    """Gives a directory the owner, mode and attributes of another one. Raises: OSError."""
    status = old.stat()
    if (status.st_uid, status.st_gid) != (new.stat().st_uid, new.stat().st_gid):
        try:
            os.chown(new, status.st_uid, status.st_gid)
        except PermissionError as error:
            logger.warning("'%s' does not get the owner of '%s': %s", new, old, error)
    times = new.stat()
    answered_at(new, "copystat to", partial(shutil.copystat, old, new))
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))


def remove_folder(folder: Path) -> None:
    """Removes what is ours of a folder: all at once for those who look, if nothing else is in it.

    Raises:
        UnsupportedError: no record says that it is ours.
        ConcurrentSaveError: somebody reads a part, or it is pinned; nothing was removed.
        StorageError: it cannot be renamed, or what is left cannot be removed.
    """
    record = read_record(folder)
    if record is None:
        problem = f"no '{FOLDER_NAME}' says that it is ours; remove it yourself"
        raise UnsupportedError(f"remove '{folder}': {problem}")
    if any((path / PIN_NAME).exists() for path in (folder, *parts_of(folder))):
        raise ConcurrentSaveError(
            f"remove '{folder}': it is pinned", errno=errno.EBUSY, path=str(folder)
        )
    ours = ours_in(folder, None)
    trash = folder.parent / f"{TRASH_PREFIX}{uuid.uuid4().hex[:12]}"
    with ExitStack() as stack:
        for part in filter(is_directory, (folder / part for part in record.parts)):
            stack.enter_context(being_deleted(part))
        with storage_errors("remove", folder):
            if _are_all_in(ours, folder, folder):
                folder.rename(trash)
            else:
                trash.mkdir()
                whole = [path for path in folder.iterdir() if _are_all_in(ours, path, folder)]
                for path in sorted(whole, key=lambda path: path.name == FOLDER_NAME):
                    path.rename(trash / path.name)
                _remove(folder, ours)
    with storage_errors("remove", trash):
        _remove(trash, ours)
        for path in trash.iterdir() if trash.exists() else []:  # it came meanwhile
            logger.warning("'%s' is not ours: look at it, and remove it", path)
    logger.info("removed checkpoint '%s'%s", folder, "; what is not ours stays" * folder.exists())


def _remove(folder: Path, ours: set[str]) -> None:
    """Removes files of a folder, and directories that are empty then."""
    for rel in sorted(ours, key=lambda rel: (rel == FOLDER_NAME, Path(rel).name == METADATA_NAME)):
        if is_directory((folder / rel).parent):
            (folder / rel).unlink(missing_ok=True)
    above = {above for rel in ours for above in Path(rel).parents}
    for each in sorted(above, key=lambda each: -len(each.parts)):
        if is_directory(folder / each) and not any((folder / each).iterdir()):
            (folder / each).rmdir()
