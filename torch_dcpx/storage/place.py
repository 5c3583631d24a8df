"""Opens the place of a checkpoint, for whoever does not care if it is a directory or a store.

`PosixPlace` and `ObjectPlace` have the same methods.
"""

from __future__ import annotations

import errno
import resource
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from torch_dcpx import _mounts
from torch_dcpx._answered_os import answered_at, os
from torch_dcpx._native import _C
from torch_dcpx.errors import DcpxError, StorageError
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.storage.answered_job import answered_job
from torch_dcpx.storage.directory import (
    Buffer,
    Directory,
    SmallFile,
    is_size,
    make_directory,
    remove_leftover,
    storage_error,
    storage_errors,
    wrong_size,
)
from torch_dcpx.storage.lock_reach import lock_of, warn_of_one_node
from torch_dcpx.storage.names import (
    LOCK_NAME,
    METADATA_NAME,
    Look,
    is_metadata_name,
    rank_lock_name,
)
from torch_dcpx.storage.object_claim import SmallObject
from torch_dcpx.storage.object_place import ObjectPlace, summed_slot_bytes
from torch_dcpx.storage.object_url import Location, ObjectUrl
from torch_dcpx.storage.publish import publish
from torch_dcpx.storage.save_lock import SaveLock
from torch_dcpx.storage.system_calls import SILENT, uninterrupted

if TYPE_CHECKING:
    from torch_dcpx.storage.running_save import RunningSave
    from torch_dcpx.timelines import Timeline

_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")

# Differs once a name means another file or object, or was written to.
FileState: TypeAlias = tuple[int | str, ...]


class PosixPlace(Directory):
    """A directory of a mounted file system."""

    is_object = False

    def missing(self, names: Sequence[str]) -> list[str]:
        """Returns those of the names that are no regular file. Raises StorageError if unknown."""
        return [name for name in names if not self.is_regular(name)]

    def look(self) -> Look:
        """Returns what is there. Raises: StorageError."""
        return Look(self.names(), self._size, self._beneath, self._modified_s)

    def _beneath(self) -> list[str]:
        """Returns the names of directories, and of links to such, by one listing."""
        found: list[str] = []
        with storage_errors("list", self.path, is_read=True), os.scandir(self.fd) as entries:
            for entry in entries:
                with suppress(OSError):  # of a link: to itself, or to where nobody may look
                    if entry.is_dir():
                        found.append(entry.name)
        return sorted(found)

    def _size(self, name: str) -> int | None:
        """Returns the size of a regular file beneath the directory, reached through no link; None:
        there is none. Raises StorageError: it does not answer.
        """
        parts = name.split("/")
        if "" in parts or "." in parts or ".." in parts:
            return None
        try:
            for depth in range(1, len(parts)):
                above = os.stat("/".join(parts[:depth]), dir_fd=self.fd, follow_symlinks=False)
                if not stat.S_ISDIR(above.st_mode):
                    return None
            status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except ValueError:  # NUL in a name
            return None
        except OSError as error:
            if error.errno in SILENT or isinstance(error, StorageError):
                raise storage_error("stat", self.path / name, error, is_read=True) from error
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def _modified_s(self, name: str) -> float | None:
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mtime
        except OSError:
            return None

    def state(self, name: str) -> FileState:
        """Returns the state of a file. Raises: StorageError."""
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except OSError as error:
            raise storage_error("stat", self.path / name, error, is_read=True) from error
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def identity(self, name: str) -> FileState | None:
        """Returns the state of a file, None of a missing one. Raises: StorageError."""
        try:
            return self.state(name)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def states(self) -> dict[str, FileState]:
        """Returns the states of all files, by name. Raises: StorageError."""
        found = {}
        for name in self.names():
            with suppress(FileNotFoundError):  # of a save that goes on
                found[name] = self.state(name)
        return found

    def check_sizes(self, sizes: Mapping[str, int], *, is_exact: bool) -> None:
        """Raises unless each name is a regular file of so many bytes, or of at least so many.

        StorageError: one is missing, or unknown. ShortReadError: it has another size.
        """
        for name, nbytes in sizes.items():
            path = str(self.path / name)
            try:
                status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            except (OSError, ValueError) as error:
                number = getattr(error, "errno", None)
                raise StorageError(
                    f"stat '{path}', which '{METADATA_NAME}' names: {error}",
                    errno=number,
                    path=path,
                ) from error
            found = status.st_size
            if not stat.S_ISREG(status.st_mode) or not is_size(found, nbytes, is_exact=is_exact):
                raise wrong_size(path, nbytes, found, is_exact=is_exact)

    def is_replacing(self, name: str, _lock: object) -> bool:
        """Returns whether a commit under `name` would replace something."""
        return self.is_regular(name)

    def unlink_all(self, names: Iterable[str]) -> None:
        """Removes regular files, those that are there. Raises: StorageError."""
        for name in names:
            if self.is_regular(name):
                self.unlink(name)

    def remove_leftovers(self, names: Iterable[str]) -> None:
        """Removes files of a save whose own error is on its way: errors in here are only logged."""
        for name in names:
            remove_leftover(self, name)

    def is_fresh(self) -> bool:
        """Whether no metadata is there, so that no reader knows the name of a data file."""
        return not any(map(is_metadata_name, self.names()))

    def locks(
        self, save: RunningSave, rank: int | None, *, is_conditional: bool
    ) -> Iterator[SaveLock]:
        """Takes and yields the directory's lock; with `rank` it is shared, and the rank's own
        follows. Raises as `SaveLock`.
        """
        yield lock_of(self, LOCK_NAME, save, is_shared=rank is not None)
        if _mounts.HAS_SHARED:
            warn_of_one_node(self.path)
        if rank is not None:
            yield lock_of(self, rank_lock_name(rank), save)

    def claims(self) -> Callable[[str], None]:
        """Returns nothing for each name: the directory's lock keeps all others out."""
        return lambda _name: None

    def publish(
        self,
        name: str,
        pieces: Sequence[Buffer],
        *,
        is_durable: bool,
        lock: Any,
        is_own: Callable[[Any], bool],
    ) -> None:
        """Commits. Raises: as `publish`."""
        publish(self, name, pieces, is_durable=is_durable)

    def write_job(self, options: WriteOptions) -> _C.WriteJob:
        """Returns a job that writes files here."""
        job = _C.WriteJob(
            dir_fd=self.fd,
            dir_path=os.fsencode(self.path),
            workers=options.resolved_workers(),
            segment_bytes=options.slot_bytes,
            use_direct=options.direct_io,
            is_durable=options.durability == "full",
            files_at_once=options.files_per_rank,
            in_place=options.in_place,
            memory_bytes=options.resolved_memory_bytes(),
        )
        may_be_silent = _mounts.HAS_SHARED and _mounts.shared_mount(str(self.path)) is not None
        return answered_job(job, self.path) if may_be_silent else job

    @contextmanager
    def writing(
        self,
        job: _C.WriteJob,
        names: Sequence[str],
        planned_bytes: Sequence[int],
        options: WriteOptions,
        poll: Callable[[], None],
        timeline: Timeline,
    ) -> Iterator[dict[str, int]]:
        """Makes the entries of what `job` has written in the block durable, if `options` say so.

        Yields counters to add to the job's: none.
        """
        yield {}
        if names and options.durability == "full":
            with timeline.phase("sync"):
                self.sync()

    def read_job(self, options: ReadOptions) -> _C.ReadJob:
        """Returns a job for a load of files here."""
        may_be_silent = _mounts.HAS_SHARED and _mounts.shared_mount(str(self.path)) is not None
        job = _C.ReadJob(
            dir_fd=self.fd,
            dir_path=os.fsencode(self.path),
            workers=fitting_workers(options.resolved_workers()),
            slot_bytes=options.slot_bytes,
            use_direct=options.direct_io,
            verify=options.verify == "blocks",
            max_open_files=_max_open_files(),
            max_slots=options.host_memory_bytes // options.slot_bytes,
            may_be_left=may_be_silent,
        )
        return answered_job(job, self.path) if may_be_silent else job

    def verify_job(self, options: ReadOptions) -> _C.VerifyJob:
        """Returns a job that verifies files here, whose slots stay within the options' memory."""
        slot_bytes = summed_slot_bytes(options)
        slots = max(1, options.host_memory_bytes // slot_bytes)
        job = _C.VerifyJob(
            dir_fd=self.fd,
            dir_path=os.fsencode(self.path),
            workers=min(fitting_workers(options.resolved_workers()), slots),
            slot_bytes=slot_bytes,
            use_direct=options.direct_io,
        )
        may_be_silent = _mounts.HAS_SHARED and _mounts.shared_mount(str(self.path)) is not None
        return answered_job(job, self.path) if may_be_silent else job


Place: TypeAlias = PosixPlace | ObjectPlace
SmallContent: TypeAlias = SmallFile | SmallObject


def open_place(location: Location) -> Place:
    """Opens the place of a checkpoint. Raises: StorageError, UnsupportedError: as the place."""
    if isinstance(location, ObjectUrl):
        return ObjectPlace(location)
    return PosixPlace(location)


def is_place(location: Location) -> bool:
    """Whether a path is a directory, or a URL beneath which there are objects.

    Raises: StorageError, UnsupportedError: the store does not say.
    """
    if isinstance(location, ObjectUrl):
        found = ObjectPlace(location).look()
        return bool(found.names or found.beneath())
    return os.path.isdir(location)


def look_into(path: os.PathLike[str], look: Callable[[_Asked], _Found], asked: _Asked) -> _Found:
    """Returns `look(asked)`, code of stock's; an OSError of it becomes a StorageError."""
    try:
        if _mounts.HAS_SHARED:
            return answered_at(path, "look into", lambda: uninterrupted(look, asked))
        return uninterrupted(look, asked)
    except OSError as error:
        if isinstance(error, DcpxError):
            raise
        raise storage_error("look into", path, error, is_read=True) from error


def make_place(location: Location, *, is_durable: bool) -> list[Any]:
    """Makes the directory of a place, as `make_directory` does; a prefix needs none."""
    if isinstance(location, ObjectUrl):
        return []
    return make_directory(location, is_durable=is_durable)


def _free_descriptors() -> int:
    """Returns how many more files the process may open."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return 1 << 30
    return max(0, soft_limit - len(os.listdir("/proc/self/fd")))


def _max_open_files() -> int:
    """Returns how many data files may stay open: half of what the process may open still."""
    return min(4096, _free_descriptors() // 2)


def fitting_workers(workers: int) -> int:
    """Returns how many workers a job may have: each may open a file twice, all together half of
    what the process may open. The other half is for data files that stay open.
    """
    return max(1, min(workers, _free_descriptors() // 4 - 1))
