"""The files of an export, from names that nobody reads to their own: the coordinator's part.

1. Every file is made under a temporary name, at its full size, before a byte is written.
2. All ranks have written and synced. Heads are written, files synced, their sizes checked.
3. Shards get their names, which are new; then **the last rename** (the single file, or the index)
   makes the artifact, and the directory is synced.
4. What the replaced artifact named, and nothing else, is removed.
Temporary files of an export that was killed go before the first step of the next one to the same
names, on the same machine: it has the lock that the dead one would hold.
Whatever fails before the last rename leaves what was there, and removes what was made.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_dcpx._native import _C
from torch_dcpx.artifacts.layout import Layout
from torch_dcpx.errors import ConcurrentSaveError, DcpxError, StorageError
from torch_dcpx.options import WriteOptions
from torch_dcpx.storage.directory import Directory, make_directory
from torch_dcpx.storage.save_lock import UNKNOWN_BOOT, boot_id

logger = logging.getLogger("torch_dcpx")

_SLOT_UNIT = 64 << 10
_LEAST_SLOT_BYTES = 2 * _SLOT_UNIT  # a RangeJob's


_ID_DIGITS = 12
_TAIL = re.compile(rf"[0-9a-f]{{{_ID_DIGITS}}}\.tmp")


def _machine() -> str:
    """Returns what tells this machine, since it was started, from others."""
    return hashlib.blake2b(boot_id().encode(), digest_size=4).hexdigest()


def temporary_name(name: str, export_id: str) -> str:
    """Returns under which name a file is written until all are."""
    return f".{name}.{export_id}.tmp"


def open_job(
    directory: Directory, options: WriteOptions, memory_bytes: int | None = None
) -> _C.RangeJob:
    """Returns a job that writes to files of a directory.

    Args:
        memory_bytes: most that its slots may take. Default None: the budget of `options`.

    Raises:
        StorageError: the directory cannot be held.
    """
    workers, slot_bytes = options.resolved_workers(), options.slot_bytes
    if memory_bytes is not None:
        slot_bytes = max(
            _LEAST_SLOT_BYTES, min(slot_bytes, memory_bytes // _SLOT_UNIT * _SLOT_UNIT)
        )
        workers = max(1, min(workers, memory_bytes // slot_bytes))
    return _C.RangeJob(
        dir_fd=directory.fd,
        dir_path=os.fsencode(directory.path),
        workers=workers,
        slot_bytes=slot_bytes,
        is_durable=options.durability == "full",
        use_direct=options.direct_io,
    )


def _lock(directory: Directory) -> bool:
    """Locks a directory against other exports; file systems without such locks do without.

    Returns:
        Whether it is locked.

    Raises:
        ConcurrentSaveError: another export has it.
    """
    try:
        fcntl.flock(directory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ConcurrentSaveError(
                f"export to '{directory.path}': another export writes there; try again when it has "
                "ended",
                errno=errno.EBUSY,
                path=str(directory.path),
            ) from error
        logger.debug("export to '%s' without a lock: %s", directory.path, error)
        return False


class ArtifactFiles:
    """The files of one export, from being made to being seen. Not thread-safe."""

    def __init__(self, path: Path, stem: str, suffix: str, options: WriteOptions) -> None:
        """Makes the directory, durably, and locks it against other exports.

        Raises:
            ConcurrentSaveError: another export writes to it.
            StorageError: it cannot be made or opened.
        """
        self._is_durable = options.durability == "full"
        make_directory(path, is_durable=self._is_durable)
        self.directory = Directory(path)
        self._made: list[str] = []  # temporary names
        self._shards: list[str] = []  # that have got their own names, or are about to
        self._last_temporary: str | None = None  # of an index, once it may have been renamed
        try:
            self._set_up(stem, suffix, options)
        except BaseException:
            self.directory.close()
            raise

    def _set_up(self, stem: str, suffix: str, options: WriteOptions) -> None:
        is_locked = _lock(self.directory)
        self._short_id = uuid.uuid4().hex[:_ID_DIGITS]
        self.export_id = f"{_machine()}-{self._short_id}"
        self._has_shards = bool(suffix)  # a torch archive is one file, and replaces one
        self._index_name = f"{stem}{suffix}.index.json"
        self._single_name = f"{stem}{suffix}"
        self._shard = re.compile(
            re.escape(stem) + r"(-[0-9a-f]{12})?-\d{5,9}-of-\d{5,9}" + re.escape(suffix)
        )
        if is_locked:
            self._remove_left_behind()
        self._job = open_job(self.directory, options)
        self._replaced = self._old_shards()
        self._names: tuple[str, ...] = ()

    def shard_stem(self, stem: str) -> str:
        """Returns what names of shards begin with, so that none exists."""
        taken = [name for name in self.directory.names() if self._shard.fullmatch(name)]
        return f"{stem}-{self._short_id}" if taken else stem

    def make(self, layout: Layout) -> None:
        """Makes every file under its temporary name, at its full size. Raises: StorageError."""
        for file in layout.files:
            name = temporary_name(file.name, self.export_id)
            self._made.append(name)
            self._job.add_file(name, file.nbytes, is_new=True)
        self._names = tuple(file.name for file in layout.files)

    def publish(self, patches: Sequence[tuple[int, int, bytes]], index: bytes | None) -> None:
        """Writes what only now is known, and makes the artifact.

        Args:
            patches: (file, offset, bytes), heads among them.
            index: of several files; None: there is one.

        Raises:
            StorageError: the artifact is not there; it may be where a sync after the last rename
                failed, or the single file that it replaces could not be removed.
        """
        rows = [
            (file, offset, len(data), (), (), (), data, len(data), -1, offset + len(data))
            for file, offset, data in patches
            if data
        ]
        self._job.write(rows)
        self._job.finish(is_whole=True)
        directory = self.directory
        last = self._index_name if index is not None else self._names[0]
        if index is not None:
            temporary = temporary_name(last, self.export_id)
            self._made.append(temporary)
            directory.create(temporary, [index], is_durable=self._is_durable)
            for name in self._names:
                self._shards.append(name)  # before: an interrupt may come right behind the rename
                directory.rename(temporary_name(name, self.export_id), name)
        self._sync()
        self._last_temporary = temporary_name(last, self.export_id)
        directory.rename(self._last_temporary, last)
        self._forget()
        self._sync()
        self._remove_replaced(index is not None)

    def close(self) -> None:
        """Removes what was made and is no artifact, and closes the directory. Never raises."""
        self._job.abandon()
        last = self._last_temporary
        if self._made and not (last is not None and self._is_renamed(last, if_unknown=True)):
            shards = [
                name
                for name in self._shards
                if self._is_renamed(temporary_name(name, self.export_id), if_unknown=False)
            ]
            for name in (*self._made, *shards):
                self._remove(name)
        self._forget()
        try:  # closing is not enough: a process that was forked meanwhile shares the lock
            fcntl.flock(self.directory.fd, fcntl.LOCK_UN)
        except OSError as error:
            logger.debug("the lock of an export ends with its descriptor: %s", error)
        self.directory.close()

    def _is_renamed(self, temporary: str, *, if_unknown: bool) -> bool:
        """Returns whether a rename was made, though an error or a signal came of it.

        Where nobody can say, `if_unknown`: what was made stays, as of a process that is killed.
        """
        try:
            return not self.directory.is_regular(temporary)
        except StorageError:
            return if_unknown

    def _forget(self) -> None:
        self._made.clear()
        self._shards.clear()

    def _sync(self) -> None:
        if self._is_durable:
            self.directory.sync()

    def _old_shards(self) -> frozenset[str]:
        """Returns the shards that the index names which is here now."""
        if not self._has_shards or not self.directory.is_regular(self._index_name):
            return frozenset()
        try:
            index: Any = json.loads(self.directory.read_small(self._index_name))
            names = set(index["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, DcpxError) as error:
            logger.warning(
                "'%s' is no index that can be read (%s); the files that it names stay",
                self.directory.path / self._index_name,
                str(error)[:200],
            )
            return frozenset()
        return frozenset(n for n in names if isinstance(n, str) and self._shard.fullmatch(n))

    def _remove_replaced(self, has_index: bool) -> None:
        """Removes the artifact that was replaced; first the name by which it is found.

        A single file goes before an index for those who load: that it stays is an error, and that
        it is gone is made durable.
        """
        if not self._has_shards:
            return
        directory = self.directory
        if has_index and self._is_file_or_link(self._single_name):
            directory.unlink(self._single_name)
            self._sync()
        old = [] if has_index else [self._index_name]
        for name in (*old, *sorted(self._replaced.difference(self._names))):
            if directory.is_regular(name):
                self._remove(name)

    def _remove_left_behind(self) -> None:
        """Removes temporary files of exports to these names that were killed. Never raises.

        REQUIRES: the lock, which they would hold. It may not reach other machines, or those before
        a reboot that this one knows nothing of: what they made stays.
        """
        if boot_id() == UNKNOWN_BOOT:
            return
        begin, end = ".", f".{_machine()}-"
        try:
            for name in self.directory.names():
                own, _, tail = name.removeprefix(begin).rpartition(end)
                is_own = own in (self._single_name, self._index_name)
                is_own = is_own or self._shard.fullmatch(own) is not None
                is_ours = is_own and name.startswith(begin) and _TAIL.fullmatch(tail)
                if is_ours and self.directory.is_regular(name):
                    self._remove(name)
        except StorageError as error:
            logger.warning("what killed exports left behind is not all removed: %s", error)

    def _is_file_or_link(self, name: str) -> bool:
        return (self.directory.path / name).is_symlink() or self.directory.is_regular(name)

    def _remove(self, name: str) -> None:
        try:
            self.directory.unlink(name)
        except StorageError as error:
            logger.warning("an export left '%s' behind: %s", name, error)
