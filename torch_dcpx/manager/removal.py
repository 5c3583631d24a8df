"""Removes a checkpoint so that no process, killed or not, ever sees half of one.

A removal
1. takes the directory's lock and the readers' lock, of which a save or a reader there has one;
2. renames `.metadata` to `.dcpx.deleted` and fsyncs the directory: no checkpoint any more;
3. removes the data files that it names, and leftovers of failed saves;
4. renames a directory that holds only our small files to a name of the root's own. A directory that
   holds anything else stays, without our files;
5. gives the locks back, closes their files, empties the renamed directory and removes it. NFS and
   FUSE keep an open file under another name, so that its directory could not go before.

A job that is killed in between leaves a file or a name as a sign; `resume_removals` goes on, unless
a user has copied or renamed the directory: the record in its lock file names another one.
"""

from __future__ import annotations

import errno
import logging
import stat
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torch_dcpx import _mounts
from torch_dcpx._answered_os import os
from torch_dcpx.errors import (
    ConcurrentSaveError,
    CorruptionError,
    DcpxError,
    StorageError,
    UnsupportedError,
)
from torch_dcpx.manager.pointer import step_of_name
from torch_dcpx.manager.stored import OwnDirectory, examine
from torch_dcpx.storage.directory import Directory, fsync_path, rename_path, storage_error
from torch_dcpx.storage.names import (
    LOCK_NAME,
    METADATA_NAME,
    PIN_NAME,
    READERS_NAME,
    TOMBSTONE_NAME,
    TRASH_PREFIX,
    is_data_file_name,
    is_name_of_open_file,
    is_temporary_name,
)
from torch_dcpx.storage.place import PosixPlace
from torch_dcpx.storage.reader_lock import being_deleted
from torch_dcpx.storage.running_save import RunningSave, driven
from torch_dcpx.storage.save_lock import SaveLock, managed, noted_names
from torch_dcpx.storage.visibility import hidden
from torch_dcpx.writer.commit import referenced_files, remove_replaced

if TYPE_CHECKING:
    from torch_dcpx.manager.directory_root import DirectoryRoot

logger = logging.getLogger("torch_dcpx")

_OWN_NAMES = frozenset((LOCK_NAME, READERS_NAME, PIN_NAME, TOMBSTONE_NAME))


@contextmanager
def _locked(directory: Directory) -> Iterator[SaveLock]:
    """Keeps saves and readers out. Raises: ConcurrentSaveError, StorageError."""
    with driven():
        save = RunningSave(directory)
    path = str(directory.path)
    managed.append(path)
    try:
        lock = SaveLock(directory, LOCK_NAME, save)
    finally:
        managed.remove(path)
    try:
        with being_deleted(directory.path, dir_fd=directory.fd):
            yield lock
    finally:
        save.end()
        # A removal that was unfinished is finished, or noted in the directory itself.
        lock.release(has_ended_well=lock.left_by != "another machine")


def remove_checkpoint(root: DirectoryRoot, tag: str) -> None:
    """Removes a checkpoint, or goes on with a removal that did not end.

    Raises:
        ConcurrentSaveError: a save or a reader is there; nothing was removed.
        UnsupportedError: it is pinned, or a link; nothing was removed.
        CorruptionError: its `.metadata` cannot be read, so the names of its files are unknown.
        StorageError: the root cannot be written to; nothing was removed. Or a system call failed;
            the next attempt removes the rest.
    """
    with OwnDirectory(root.path / tag, "delete") as directory, _locked(directory):
        names = directory.names()
        if METADATA_NAME in names:
            # Under the readers' lock, as `pin` makes it.
            if PIN_NAME in names or _has_hidden_pin(directory):
                raise UnsupportedError(f"delete '{directory.path}': it is pinned; unpin it first")
            if referenced_files(directory, METADATA_NAME) is None:
                directory.read_small(METADATA_NAME)  # raises what the storage says
                if referenced_files(directory, METADATA_NAME) is None:  # no failure of one read
                    raise CorruptionError(
                        f"delete '{directory.path}': its '{METADATA_NAME}' cannot be read, so "
                        "nobody knows which files are its own; remove the directory by hand",
                        path=str(directory.path / METADATA_NAME),
                    )
            _check_writable(root.path, directory.path)
            directory.rename(METADATA_NAME, TOMBSTONE_NAME)
            if root.is_durable:
                directory.sync()
        trash = _empty(root, directory)
    if trash is not None:
        _remove_trash(trash)


def _has_hidden_pin(directory: PosixPlace) -> bool:
    """Returns whether a mark of `pin` is there that no listing shows. Raises StorageError: the part
    of the file system that would have it is down, by which no name can be made there.
    """
    if _mounts.HAS_SHARED and _mounts.shared_mount(str(directory.path)):
        try:
            directory.create(PIN_NAME, [], is_durable=False)
        except StorageError as error:
            if error.errno == errno.EEXIST:
                return True
            raise
        with suppress(StorageError):  # else it goes with the rest, and is no mark until then
            directory.unlink(PIN_NAME)
    return False


def _check_writable(root: Path, path: Path) -> None:
    """Raises StorageError where the root keeps its entry, before anything in it goes."""
    if not os.access(root, os.W_OK | os.X_OK, effective_ids=True):
        raise StorageError(
            f"delete '{path}': this process may not write to '{root}', which names it; nothing was "
            "removed: give it the right (chmod u+w), or run it as the owner",
            errno=errno.EACCES,
            path=str(root),
        )


def _empty(root: DirectoryRoot, directory: PosixPlace) -> Path | None:
    """Removes our data files of a directory without `.metadata`, under its locks; then renames it.

    Returns the new path, for `_remove_trash` without the locks; None if the directory stays.
    """
    has_tombstone = directory.is_regular(TOMBSTONE_NAME)
    named = referenced_files(directory, TOMBSTONE_NAME) if has_tombstone else None
    remove_replaced(directory, named or set(), "everybody")
    rest = [name for name in directory.names() if name not in _OWN_NAMES]
    if rest:
        if not any(is_data_file_name(name) or is_name_of_open_file(name) for name in rest):
            for name in (TOMBSTONE_NAME, PIN_NAME, READERS_NAME):  # which is a commit's mark
                directory.unlink(name)
        # The user's own, or open: that goes when its last reader closes it.
        logger.info("'%s' stays, for it holds %s besides", directory.path, ", ".join(rest[:5]))
        return None
    if root.is_durable:
        directory.sync()  # the data are gone before the name is
    trash = root.path / f"{TRASH_PREFIX}{uuid.uuid4().hex[:12]}"
    rename_path(directory.path, trash)
    if _is_other(trash, directory):  # it had taken the directory's place, and goes back
        rename_path(trash, directory.path)
        path = str(directory.path)
        problem = f"remove '{path}': something else has taken its place meanwhile; it stays"
        raise StorageError(problem, errno=errno.ESTALE, path=path)
    if root.is_durable:
        fsync_path(root.path)
    return trash


def _is_other(path: Path, directory: Directory) -> bool:
    """Returns whether anything but `directory` lies at `path`. Raises: StorageError."""
    try:
        return not os.path.samestat(os.lstat(path), os.fstat(directory.fd))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise storage_error("stat", path, error) from error


def _remove_trash(path: Path) -> None:
    """Removes a renamed directory, without its locks. Logs a failure: the next run tries again."""
    rest: list[str] = []
    with suppress_and_log(f"remove '{path}'"):
        try:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                logger.warning("'%s' stays: it is no directory of ours", path)
                return
            with OwnDirectory(path, "remove") as directory:
                for name in directory.names():  # a part of the file system may have hidden data
                    if name in _OWN_NAMES or is_data_file_name(name) or is_temporary_name(name):
                        directory.unlink(name)
                rest = directory.names()
                for name in filter(is_name_of_open_file, rest):  # a server may have forgotten it
                    directory.unlink(name)
                os.rmdir(path)
        except OSError as error:
            if rest and all(map(is_name_of_open_file, rest)):
                logger.info("remove '%s': later: a file of it is open: %s", path, error)
                return
            raise storage_error("remove", path, error) from error


def resume_removals(
    root: DirectoryRoot, busy: Callable[[], Collection[str]], *, leftovers: bool
) -> None:
    """Ends unfinished removals but of `busy` tags; logs failures.

    With `leftovers` it also removes directories with nothing but a killed save of this machine.
    """
    for name in root.names():
        if name.startswith(TRASH_PREFIX):
            _remove_trash(root.path / name)
    for tag in root.directories():
        if tag not in busy():
            with suppress_and_log(f"tidy '{root.path / tag}'"):
                _tidy(root, tag, leftovers=leftovers)


def _tidy(root: DirectoryRoot, tag: str, *, leftovers: bool) -> None:
    """Ends the removal of a directory, or removes that of a killed save."""
    trash = None
    with OwnDirectory(root.path / tag, "tidy") as directory:
        names = directory.names()
        is_tombstone, is_whole = TOMBSTONE_NAME in names, METADATA_NAME in names
        is_left = leftovers and not is_whole and _is_ours_alone(names)
        if not (is_tombstone or is_left) or not _is_in_place(directory, is_whole=is_whole):
            return
        if not is_whole and hidden(directory, names):
            return
        with _locked(directory) as lock:
            if is_whole:  # saved to again: the old one's files go, and the note
                named = referenced_files(directory, TOMBSTONE_NAME) or set()
                own = referenced_files(directory, METADATA_NAME)  # it may be hidden by now
                if own is not None:
                    remove_replaced(directory, named - own, "nobody")
                    directory.unlink(TOMBSTONE_NAME)
                return
            is_ended = lock.is_held and lock.left_by == "this machine"
            # Else a save has committed meanwhile.
            if (is_tombstone or is_ended) and METADATA_NAME not in directory.names():
                trash = _empty(root, directory)
    if trash is not None:
        _remove_trash(trash)


def _is_in_place(directory: PosixPlace, *, is_whole: bool) -> bool:
    """Returns whether a manager has saved or removed the directory under its present name.

    Where no record says so, as of earlier versions, the name must be that of a step.
    """
    if is_whole:
        return examine(directory)[0].is_in_place
    name = directory.path.name
    noted = noted_names(directory, LOCK_NAME)
    return noted == {name} if noted else step_of_name(name) is not None


def _is_ours_alone(names: list[str]) -> bool:
    """Returns whether these are only the files of a save of all ranks, and its lock."""
    return LOCK_NAME in names and all(
        name in _OWN_NAMES or is_data_file_name(name) or is_temporary_name(name) for name in names
    )


@contextmanager
def suppress_and_log(doing: str) -> Iterator[None]:
    """Logs a DcpxError of the block: the next run tries again."""
    try:
        yield
    except ConcurrentSaveError as error:
        logger.info("%s: later: %s", doing, error)
    except DcpxError as error:
        is_gone = getattr(error, "errno", None) == errno.ENOENT  # another process has removed it
        logger.log(logging.DEBUG if is_gone else logging.WARNING, "%s: %s", doing, error)
