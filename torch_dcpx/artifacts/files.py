"""The files of an export, from temporary names to their own: the coordinator's part.

0. The coordinator removes temporary files of killed exports to these names on this machine: it has
   the lock that they would hold.
1. It makes each file under a temporary name, at its full size, before a rank writes a byte.
2. All ranks have written and synced. It writes heads, syncs files, checks their sizes.
3. It gives shards their names, which are new. Then **the last rename** (of the single file, or the
   index) makes the artifact, and it syncs the directory.
4. It removes the files that the replaced artifact named, and no others.
An error before the last rename leaves the old artifact, and removes the new files.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import re
import uuid
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_dcpx._answered_os import answered_at, may_be_silent, os
from torch_dcpx._json import parsed_json
from torch_dcpx._native import _C
from torch_dcpx._replacing import Replacing
from torch_dcpx.artifacts.layout import ExportTensor, Layout
from torch_dcpx.errors import (
    ConcurrentSaveError,
    DcpxError,
    NotCommittedError,
    OptionError,
    StorageError,
)
from torch_dcpx.options import WriteOptions
from torch_dcpx.reader.safetensors import file_among
from torch_dcpx.reader.safetensors_header import header_bytes
from torch_dcpx.storage import flock
from torch_dcpx.storage.answered_job import answered_job
from torch_dcpx.storage.directory import Directory, make_directory, storage_errors
from torch_dcpx.storage.names import TORCH_SUFFIXES, is_data_file_name, is_metadata_name
from torch_dcpx.storage.object_place import ObjectPlace
from torch_dcpx.storage.save_lock import UNKNOWN_BOOT, boot_id, machine

if TYPE_CHECKING:
    from torch_dcpx.artifacts.sources import Offer

logger = logging.getLogger("torch_dcpx")

_SLOT_UNIT = 64 << 10
_LEAST_SLOT_BYTES = 2 * _SLOT_UNIT  # a RangeJob's
_ID_DIGITS = 12
_MAX_INDEX_BYTES = 32 << 20  # that are looked at


def temporary_name(name: str, export_id: str) -> str:
    """Returns the name of a file before its rename."""
    return f".{name}.{export_id}.tmp"


def slots_within(options: WriteOptions, memory_bytes: int, least_bytes: int) -> tuple[int, int]:
    """Returns (workers, bytes of a slot) for a budget; a slot has `least_bytes` in any case."""
    most_bytes = memory_bytes // _SLOT_UNIT * _SLOT_UNIT
    slot_bytes = max(least_bytes, min(options.slot_bytes, most_bytes))
    return max(1, min(options.resolved_workers(), memory_bytes // slot_bytes)), slot_bytes


def open_job(directory: Directory, options: WriteOptions, memory_bytes: int | None = None) -> Any:
    """Returns a job that writes to files of a directory. Raises: StorageError.

    Args:
        memory_bytes: of all its slots. Default None: the budget of `options`.
    """
    if memory_bytes is None:
        memory_bytes = options.resolved_memory_bytes()
    workers, slot_bytes = slots_within(options, memory_bytes, _LEAST_SLOT_BYTES)
    job = _C.RangeJob(
        dir_fd=directory.fd,
        dir_path=os.fsencode(directory.path),
        workers=workers,
        slot_bytes=slot_bytes,
        is_durable=options.durability == "full",
        use_direct=options.direct_io,
    )
    return answered_job(job, directory.path) if may_be_silent(directory.path) else job


def _lock(directory: Directory) -> bool:
    """Locks a directory against other exports. Returns False where the file system has no locks.

    Raises: ConcurrentSaveError: another export has it.
    """
    try:
        missing = flock.take(directory.fd, fcntl.LOCK_EX, is_writable=False)
    except BlockingIOError as error:
        raise ConcurrentSaveError(
            f"export to '{directory.path}': another export writes there; try again when it has "
            "ended",
            errno=errno.EBUSY,
            path=str(directory.path),
        ) from error
    except OSError as error:
        missing = error
    if missing is not None:
        logger.debug("export to '%s' without a lock: %s", directory.path, missing)
    return missing is None


def check_destination(directory: Path, file_name: str | None, single_name: str) -> None:
    """Raises OptionError where an export would not be found, or cannot be made.

    Args:
        file_name: of the file that the path names; None: it names the directory.
        single_name: of the file, if the export makes one.
    """
    place = directory if file_name is None else directory / file_name
    wrong = ""
    if file_name is not None and os.path.isdir(place):
        wrong = "is a directory, where a file is to be written"
    elif not os.path.isdir(directory) and os.path.lexists(directory):
        place, wrong = directory, "is a file or a link to nothing, where a directory is to be made"
    elif file_name is None and os.path.isdir(directory):
        with Directory(directory) as held:
            names = held.names()
        if any(is_metadata_name(one) or is_data_file_name(one) for one in names):
            wrong = "holds a checkpoint, beside which loads would not find an export"
        else:
            wrong = _in_front(directory, names, single_name)
    if wrong:
        message = f"export to '{place}': it {wrong}; name another place"
        raise OptionError(message, option="path", value=str(place))


def _in_front(directory: Path, names: Sequence[str], single_name: str) -> str:
    """Returns why loads of a directory would not take this file of an export; "" if they would."""
    try:
        first = file_among(directory, [*names, single_name])
    except NotCommittedError:
        first = "several files of safetensors"
    if first == single_name:
        return ""
    return f"holds '{first}', which loads would take before '{single_name}'"


def old_shards(
    place: Directory | ObjectPlace,
    index_name: str,
    shard: re.Pattern[str],
    unreadable: type[DcpxError] = DcpxError,
) -> frozenset[str]:
    """Returns the shards that an index names; none of a damaged one, with a warning, and of one
    whose read raises `unreadable`.
    """
    try:
        with place.open_small(index_name) as file:
            index: Any = parsed_json(file.part(0, file.nbytes))
        names = set(index["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, unreadable) as error:
        logger.warning(
            "'%s' is no index that can be read (%s); the files that it names stay",
            place.path / index_name,
            str(error)[:200],
        )
        return frozenset()
    return frozenset(name for name in names if isinstance(name, str) and shard.fullmatch(name))


def is_artifact(path: Path) -> bool:
    """Returns whether a file is of the kind that its name says: of safetensors or torch.save, or an
    index. Raises StorageError: it cannot be read.
    """
    return answered_at(path, "look into", lambda: _is_artifact(path))


def _is_artifact(path: Path) -> bool:
    try:
        with storage_errors("read", path, is_read=True), path.open("rb") as file:
            if path.suffix in TORCH_SUFFIXES:
                file.peek(1)  # zipfile takes an error for a file of another kind
                with zipfile.ZipFile(file) as held:
                    return any(name.endswith("/data.pkl") for name in held.namelist())
            if path.suffix == ".json":
                index = parsed_json(file.read(_MAX_INDEX_BYTES))
                return isinstance(index["weight_map"], dict)
            nbytes = header_bytes(file.read(8), path.stat().st_size, str(path))
            return isinstance(parsed_json(file.read(nbytes)), dict)
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, RecursionError):
        return False  # a CorruptionError is a ValueError


class ArtifactFiles:
    """The files of one export. Not thread-safe."""

    def __init__(
        self, path: Path, stem: str, suffix: str, options: WriteOptions, may_replace: bool
    ) -> None:
        """Makes the directory, durably, and locks it.

        Raises: ConcurrentSaveError, StorageError; OptionError: a name of the artifact is taken.
        """
        self._is_durable = options.durability == "full"
        make_directory(path, is_durable=self._is_durable)
        self.directory = Directory(path)
        self._made: list[str] = []  # temporary names
        self._shards: list[str] = []  # that have got their own names, or are about to
        self._last_temporary: str | None = None  # of an index, once it may have been renamed
        self._rule = Replacing(may_replace, is_artifact, "export of this format")
        try:
            self._set_up(stem, suffix, options)
        except BaseException:
            self.directory.close()
            raise

    def _set_up(self, stem: str, suffix: str, options: WriteOptions) -> None:
        is_locked = _lock(self.directory)
        self._short_id = uuid.uuid4().hex[:_ID_DIGITS]
        self.export_id = f"{machine()}-{self._short_id}"
        self._has_shards = bool(suffix)  # a torch archive is one file, and replaces one
        self._index_name = f"{stem}{suffix}.index.json"
        self._single_name = f"{stem}{suffix}"
        self._shard = re.compile(
            re.escape(stem) + r"(-[0-9a-f]{12})?-\d{5,9}-of-\d{5,9}" + re.escape(suffix)
        )
        self._refuse_taken()
        if is_locked:
            self._remove_left_behind()
        self._job = open_job(self.directory, options)
        self._replaced = self._old_shards()
        self._names: tuple[str, ...] = ()

    @property
    def is_replacing(self) -> bool:
        """Whether an artifact of that name is there."""
        return any(map(self.directory.is_regular, (self._single_name, self._index_name)))

    def _refuse_taken(self) -> None:
        """Raises OptionError where the export would replace what it may not."""
        for name in (self._single_name, *([self._index_name] if self._has_shards else [])):
            self._rule.check(self.directory.path / name)

    def shard_stem(self, stem: str) -> str:
        """Returns the beginning of shards' names: with an id, if some of such names exist."""
        taken = [name for name in self.directory.names() if self._shard.fullmatch(name)]
        return f"{stem}-{self._short_id}" if taken else stem

    def make(self, layout: Layout) -> None:
        """Makes each file under its temporary name, at its full size. Raises: StorageError."""
        for file in layout.files:
            name = temporary_name(file.name, self.export_id)
            self._made.append(name)
            self._job.add_file(name, file.nbytes, is_new=True)
        self._names = tuple(file.name for file in layout.files)

    def publish(self, patches: Sequence[tuple[int, int, bytes]], index: bytes | None) -> None:
        """Writes the last bytes, and makes the artifact.

        Args:
            patches: (file, offset, bytes), heads among them.
            index: of several files; None: there is one.

        Raises:
            OptionError: something has its name by now.
            StorageError: the artifact is not there; it may be if the sync after the last rename
                failed, or the removal of the single file that it replaces.
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
                directory.rename(temporary_name(name, self.export_id), name, replaces=False)
        self._sync()
        self._refuse_taken()  # by now
        self._last_temporary = temporary_name(last, self.export_id)
        try:
            directory.rename(self._last_temporary, last, replaces=self._rule.is_asked)
        except StorageError as error:
            if error.errno == errno.EEXIST:
                self._refuse_taken()
            raise
        self._forget()
        self._sync()
        self._remove_replaced(index is not None)

    def close(self) -> None:
        """Removes files that are no artifact, and closes the directory. Never raises."""
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
        flock.give_back(self.directory.fd)
        self.directory.close()

    def _is_renamed(self, temporary: str, *, if_unknown: bool) -> bool:
        """Returns whether a rename was made, in spite of an error or a signal in it.

        Returns `if_unknown` where the system cannot say: files then stay, as after a kill.
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

    def assigned(
        self,
        layout: Layout,
        tensors: Sequence[ExportTensor],
        of_ranks: Sequence[Sequence[Offer]] | None,
        ranks: int,
    ) -> list[tuple[int, ...]]:
        """Returns no file for any rank: all write to all files."""
        return [()] * ranks

    def _old_shards(self) -> frozenset[str]:
        """Returns the shards that the old index names."""
        if not self._has_shards or not self.directory.is_regular(self._index_name):
            return frozenset()
        return old_shards(self.directory, self._index_name, self._shard)

    def _remove_replaced(self, has_index: bool) -> None:
        """Removes the replaced artifact, first the name by which loads find it.

        Loads prefer a single file to an index: so its removal must succeed and be durable.
        """
        if not self._has_shards:
            return
        directory, single = self.directory, self._single_name
        if has_index and ((directory.path / single).is_symlink() or directory.is_regular(single)):
            directory.unlink(single)
            self._sync()
        old = [] if has_index else [self._index_name]
        for name in (*old, *sorted(self._replaced.difference(self._names))):
            if directory.is_regular(name):
                self._remove(name)

    def _remove_left_behind(self) -> None:
        """Removes temporary files of killed exports to these names. Never raises.

        REQUIRES: the lock, which they would hold. It may not reach other machines, or this one
        before a reboot that it does not know of: files of these stay.
        """
        if boot_id() == UNKNOWN_BOOT:
            return
        tail = rf"\.{machine()}-[0-9a-f]{{{_ID_DIGITS}}}\.tmp"
        names = re.escape(self._single_name), re.escape(self._index_name), self._shard.pattern
        temporary = re.compile(rf"\.({'|'.join(names)}){tail}")
        try:
            for name in self.directory.names():
                if temporary.fullmatch(name) and self.directory.is_regular(name):
                    self._remove(name)
        except StorageError as error:
            logger.warning("not all files of killed exports are removed: %s", error)

    def _remove(self, name: str) -> None:
        try:
            self.directory.unlink(name)
        except StorageError as error:
            logger.warning("an export left '%s' behind: %s", name, error)
