"""The root of a manager as a directory: its pointer, pins, locks of readers, and removals.

`StoreRoot` has the same methods.
"""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from torch_dcpx import _mounts
from torch_dcpx._answered_os import os
from torch_dcpx._mounts import is_shared
from torch_dcpx.errors import (
    ConcurrentSaveError,
    CorruptionError,
    DcpxError,
    ShortReadError,
    StorageError,
)
from torch_dcpx.integrity.contents import open_checkpoint
from torch_dcpx.manager.pointer import (
    Pointer,
    encoded_pointer,
    is_tag,
    read_pointer,
    step_of_name,
)
from torch_dcpx.manager.removal import remove_checkpoint, resume_removals
from torch_dcpx.manager.stored import OwnDirectory, lies_there
from torch_dcpx.storage.directory import Directory, make_directory, storage_error
from torch_dcpx.storage.names import (
    METADATA_NAME,
    PIN_NAME,
    POINTER_NAME,
    is_of_checkpoint,
    is_pointer_temporary,
)
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import Place, PosixPlace
from torch_dcpx.storage.publish import publish
from torch_dcpx.storage.reader_lock import being_read, make_readers_file
from torch_dcpx.storage.root_lock import RootLock
from torch_dcpx.storage.root_record import FileRecord
from torch_dcpx.storage.system_calls import SILENT, refuse_lost_link
from torch_dcpx.storage.visibility import UNKNOWN_S, look_until_seen

logger = logging.getLogger("torch_dcpx")

_LOST_AND_FOUND = "lost+found"


class _UnseenPointerError(StorageError):
    """No pointer is seen, where there are checkpoints."""


class _Devices:
    """Notes on which file system a manager has committed."""

    def __init__(self) -> None:
        self.seen = self.saved_to = 0  # none

    def check(self, path: Path, device: int) -> None:
        """Raises StorageError where another file system lies there than this manager has committed
        on, and nobody has: what the mount was made over, or another disk of that name.
        """
        self.seen = device
        if self.saved_to not in (0, device):
            with Directory(path) as directory:
                if POINTER_NAME in directory.names():  # it was mounted again
                    return
            raise StorageError(
                f"save beneath '{path}': it is on another file system than the checkpoints that "
                f"this manager has saved there, and there is no '{POINTER_NAME}': mount theirs "
                "again, or make a new manager",
                errno=errno.ESTALE,
                path=str(path),
            )


class DirectoryRoot:
    """A root directory. Holds nothing open but the lock of its saves."""

    has_locks: ClassVar[bool] = True  # of readers, which keep what they read from removal
    is_conditional: ClassVar[bool] = False  # whether `write` sees what another job has written
    answers_in_parts: ClassVar[bool] = True  # one checkpoint may be silent, and others not

    def __init__(self, path: Path, *, is_durable: bool) -> None:
        """Reads nothing yet. `is_durable`: whether to fsync the pointer and entries."""
        self.path = path
        self.is_durable = is_durable

        devices = self._devices = _Devices()

        def opened() -> FileRecord:  # without self: a root that is dropped goes at once
            make_directory(path, is_durable=is_durable)
            record = FileRecord(path)
            devices.check(path, record.key[0])
            return record

        self.lock = RootLock(path, opened)

    # ---- The root ------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Returns the names in the root, none where it does not exist.

        Raises StorageError: it cannot be read, or a link leads to where it does not exist.
        """
        try:
            with Directory(self.path) as directory:
                return directory.names()
        except StorageError as error:
            if error.errno == errno.ENOENT:
                refuse_lost_link(self.path)
                return []
            raise

    def directories(self) -> list[str]:
        """Returns the names in the root that may be checkpoints' (no links)."""
        found: list[str] = []
        for name in filter(is_tag, self.names()):
            try:
                if not stat.S_ISDIR(os.lstat(self.path / name).st_mode):
                    continue
            except OSError as error:
                if error.errno not in SILENT:  # removed meanwhile
                    continue
            found.append(name)
        return found

    def is_foreign(self, name: str) -> bool:
        """Returns whether an entry of the root is neither a manager's nor perhaps a checkpoint."""
        path = self.path / name
        if name == _LOST_AND_FOUND:
            return True  # of the file system; only root may read it
        try:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                return not is_of_checkpoint(name)
            with Directory(path) as directory:
                within = directory.names()
        except (OSError, DcpxError):
            return False  # a link that leads nowhere at the moment, or nobody may look
        if not within:  # where a save was killed before its first file
            return step_of_name(name) is None
        return not any(map(is_of_checkpoint, within))

    def is_unanswered(self, error: DcpxError) -> bool:
        """Returns whether a part of the file system, not what lies there, is the reason."""
        is_plain = isinstance(error, StorageError) and not isinstance(error, ShortReadError)
        return is_plain and error.errno in SILENT  # type: ignore[attr-defined]

    def read(self) -> Pointer | None:
        """Returns the pointer, None of a missing one. A node that has seen the one before may not
        find this one for a while, or reads a part of it: then it looks again. Raises:
        CorruptionError, StorageError.
        """
        try:
            return look_until_seen(self.path, UNKNOWN_S, self._read)
        except _UnseenPointerError:
            return None

    def _read(self) -> Pointer | None:
        try:
            directory = PosixPlace(self.path)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                refuse_lost_link(self.path)
                return None
            raise
        with directory:
            pointer = read_pointer(directory)
            if pointer is None and _mounts.HAS_SHARED and is_shared(self.path):
                steps = [name for name in directory.names() if step_of_name(name) is not None]
                if steps:
                    text = f"'{self.path / POINTER_NAME}' is not seen beside '{steps[-1]}'"
                    raise _UnseenPointerError(text, errno=errno.ENOENT)
            return pointer

    def hold(self, timeout_s: float) -> None:
        """Takes the lock of the root, and removes what killed jobs have left of their pointers.

        Raises: as `RootLock.take`.
        """
        # Looked for before: once the lock is taken, another manager of this process may be writing.
        was_held = self.lock.is_held
        left = [] if was_held else self._left_pointers()
        if self.lock.take(timeout_s) and left:
            with Directory(self.path) as directory:
                for name in filter(set(left).__contains__, directory.names()):
                    directory.unlink(name)
        if not was_held and is_shared(self.path):
            with suppress(CorruptionError):  # the next commit replaces it
                if self.read() is None:
                    self.write(Pointer())  # before all checkpoints: who misses it does not see all

    def _left_pointers(self) -> list[str]:
        """Returns what holders of the root are writing, or have left; [] where nobody may look."""
        with suppress(StorageError), Directory(self.path) as directory:
            return list(filter(is_pointer_temporary, directory.names()))
        return []

    def write(self, pointer: Pointer) -> None:
        """Replaces the pointer as a whole.

        It makes a missing root. Raises StorageError: the pointer before is still there.
        """
        make_directory(self.path, is_durable=self.is_durable)
        with Directory(self.path) as directory:
            content = [encoded_pointer(pointer)]
            publish(directory, POINTER_NAME, content, is_durable=self.is_durable)
        if pointer.tag is not None:
            self._devices.saved_to = self._devices.seen

    # ---- One checkpoint ------------------------------------------------------------------------

    def check_tag(self, tag: str) -> None:
        """Does nothing: every tag can be a directory's name."""

    def open(self, tag: str) -> Place:
        """Opens a checkpoint to read it, also through a link. Raises: as `open_checkpoint`."""
        return open_checkpoint(self.path / tag)

    def open_own(self, path: Location) -> Place:
        """Opens the directory of a save, itself no link. Raises: as `OwnDirectory`."""
        return OwnDirectory(Path(path))

    def identity(self, tag: str) -> tuple[int, int, int] | None:
        """Returns what is new in `.metadata` with each save; None of a missing one. Raises
        StorageError: nobody knows.
        """
        path = self.path / tag / METADATA_NAME
        try:
            status = os.lstat(path)
        except OSError as error:
            if error.errno in SILENT:
                raise storage_error("stat", path, error, is_read=True) from error
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def committed_ns(self, tag: str) -> int:
        """Returns when a `.metadata` was written, by some clock: a hint, no proof."""
        with suppress(StorageError):
            return (self.identity(tag) or (0, 0, 0))[2]
        return 0

    def is_there(self, tag: str, doing: str) -> bool:
        """Returns whether anything lies there. Raises: as `lies_there`."""
        return lies_there(self.path / tag, doing)

    def begin_save(self, tag: str) -> None:
        """Does nothing: a lock marks a save under way."""

    def check_save(self, tag: str, sizes: Mapping[str, int], seconds: float) -> None:
        """Does nothing: the lock of a save that is under way keeps other jobs away."""

    def end_save(self, tag: str) -> None:
        """Makes the lock file for the readers of a committed checkpoint; logs a failure."""
        path = self.path / tag
        try:
            make_readers_file(path)
        except StorageError as error:
            logger.warning("'%s': its readers have no lock: %s", path, error)

    @contextmanager
    def reading(self, tag: str) -> Iterator[None]:
        """Keeps a checkpoint from removal while the block runs, if that can be."""
        path = self.path / tag
        try:
            make_readers_file(path)
        except StorageError as error:
            logger.debug("%s: read without a lock", error)
        with being_read(path):
            yield

    def is_pinned(self, tag: str) -> bool:
        """Returns whether a checkpoint has the mark of `pin`. Raises StorageError: nobody knows."""
        path = self.path / tag / PIN_NAME
        try:
            os.stat(path)
        except OSError as error:
            if error.errno in SILENT:
                raise storage_error("stat", path, error, is_read=True) from error
            return False
        return True

    def pin(self, tag: str) -> None:
        """Marks a checkpoint. Raises ConcurrentSaveError: it is being deleted."""
        path = self.path / tag
        with OwnDirectory(path, "pin") as directory:
            try:
                make_readers_file(path, dir_fd=directory.fd)
            except StorageError as error:
                logger.debug("%s: pinned without a lock", error)
            with being_read(path) as is_left_alone:
                # A deletion looks for the mark under the same lock.
                if not is_left_alone or self.identity(tag) is None:
                    problem = f"pin '{path}': it is being deleted"
                    raise ConcurrentSaveError(problem, errno=errno.EBUSY, path=str(path))
                if not directory.is_regular(PIN_NAME):
                    directory.create(PIN_NAME, [], is_durable=self.is_durable)
                    directory.sync()

    def unpin(self, tag: str) -> None:
        """Removes the mark. Raises: StorageError."""
        with OwnDirectory(self.path / tag, "unpin") as directory:
            directory.unlink(PIN_NAME)
            directory.sync()

    # ---- Removals ------------------------------------------------------------------------------

    def remove(self, tag: str) -> None:
        """Removes a checkpoint. Raises: as `remove_checkpoint`."""
        remove_checkpoint(self, tag)

    def tidy(self, busy: Callable[[], Collection[str]], *, leftovers: bool) -> None:
        """Ends removals that did not end: as `resume_removals`."""
        resume_removals(self, busy, leftovers=leftovers)
