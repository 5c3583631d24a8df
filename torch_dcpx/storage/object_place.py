"""The objects of a checkpoint beneath a prefix: what `PosixPlace` is for the files of a directory.

There are no directories, no locks, no renames. An object is there whole or not at all, as soon as
the request that put it was answered. One conditional PUT of the metadata commits.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from torch_dcpx._answers import StorageTimeout, current_timeout
from torch_dcpx._native import _C
from torch_dcpx.errors import CorruptionError, DcpxError, OutcomeUnknownError, StorageError
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.storage.directory import MAX_METADATA_BYTES, Buffer, is_size, wrong_size
from torch_dcpx.storage.names import METADATA_NAME, Look, metadata_name
from torch_dcpx.storage.object_claim import ObjectClaim, SmallObject, concurrent
from torch_dcpx.storage.object_errors import ANSWERS, REFUSED
from torch_dcpx.storage.object_listing import ListedObject
from torch_dcpx.storage.object_reads import ObjectReads
from torch_dcpx.storage.object_store import bucket_of
from torch_dcpx.storage.object_uploads import Uploads, part_bytes_for, upload_slot_bytes
from torch_dcpx.storage.object_url import ObjectUrl

if TYPE_CHECKING:
    from torch_dcpx.storage.running_save import RunningSave
    from torch_dcpx.timelines import Timeline

logger = logging.getLogger("torch_dcpx")

_MAX_READERS = 32  # requests of one load under way
_BEGIN_BYTES = 256 << 10  # of an object, looked at first
_MIN_SUMMED_BYTES = 256 << 10  # csrc/engine/verify_job.cpp
_MAX_COMMITS = 4  # attempts, each with obstore's own
_COMMIT_PAUSE_S = 1.0
_MAX_LOOKS = 3


class ObjectPlace:
    """The objects beneath a URL. A context manager that holds nothing."""

    is_object = True

    def __init__(self, path: ObjectUrl) -> None:
        """Raises: as `bucket_of`."""
        self.path = path
        self.bucket = bucket_of(path)

    def __enter__(self) -> ObjectPlace:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def key(self, name: str) -> str:
        return (self.path / name).key

    def names(self) -> list[str]:
        """Returns the names of all objects, without those beneath a further slash."""
        return sorted(self.entries())

    def entries(self) -> dict[str, ListedObject]:
        """Returns all objects by name, without those beneath a further slash; one listing."""
        return self.bucket.listing(self.path.key).objects

    def prefixes(self) -> list[str]:
        """Returns the names beneath which there are objects."""
        return sorted(self.bucket.listing(self.path.key).prefixes)

    def look(self) -> Look:
        """Returns what is there, by one listing. Raises: StorageError."""
        found = self.bucket.listing(self.path.key)

        def size(name: str) -> int | None:
            one = found.objects.get(name)
            if one is not None or "/" not in name:
                return None if one is None else one.nbytes
            if {"", ".", ".."}.intersection(name.split("/")):
                return None
            beneath = self.bucket.head(self.key(name))
            return None if beneath is None else beneath[0]

        def modified_s(name: str) -> float | None:
            one = found.objects.get(name)
            return None if one is None else one.modified_s

        return Look(sorted(found.objects), size, lambda: sorted(found.prefixes), modified_s)

    def state(self, name: str) -> tuple[str]:
        """Returns the tag of an object; "" if there is none."""
        found = self.bucket.head(self.key(name))
        return ("" if found is None else found[1],)

    def identity(self, name: str) -> tuple[str] | None:
        """Returns the tag of an object, None of a missing one."""
        found = self.state(name)
        return found if found[0] else None

    def states(self) -> dict[str, tuple[int | str, ...]]:
        """Returns the tags of all objects, by name."""
        return {name: (one.tag,) for name, one in self.entries().items()}

    def is_regular(self, name: str) -> bool:
        """Returns whether there is an object of this name."""
        return self.bucket.head(self.key(name)) is not None

    def missing(self, _names: Sequence[str]) -> list[str]:
        """Returns no name: what a save has put is there, as the store has answered."""
        return []

    def check_sizes(self, sizes: Mapping[str, int], *, is_exact: bool) -> None:
        """Raises unless each name is an object of so many bytes, or of at least so many.

        StorageError: one is missing, or unknown. ShortReadError: it has another size.
        """
        found = self.entries() if sizes else {}
        for name, nbytes in sizes.items():
            path = str(self.path / name)
            if name not in found:
                raise StorageError(
                    f"list '{path}', which '{METADATA_NAME}' names: {os.strerror(errno.ENOENT)}",
                    errno=errno.ENOENT,
                    path=path,
                )
            if not is_size(found[name].nbytes, nbytes, is_exact=is_exact):
                raise wrong_size(path, nbytes, found[name].nbytes, is_exact=is_exact)

    def is_replacing(self, name: str, lock: ObjectClaim | None) -> bool:
        """Returns whether a commit under `name` would replace something, as `lock` has found."""
        return self.is_regular(name) if lock is None else lock.tag is not None

    @contextmanager
    def open_small(self, name: str) -> Iterator[SmallObject]:
        """Gets an object of metadata. Raises: StorageError; CorruptionError: it is too large."""
        key = self.key(name)
        found = SmallObject(self.bucket, key, self.path / name, self.bucket.get(key))
        if found.nbytes > MAX_METADATA_BYTES:
            raise CorruptionError(
                f"'{found.path}' has more than {MAX_METADATA_BYTES} B",
                path=str(found.path),
                nbytes=found.nbytes,
            )
        yield found

    def read_small(self, name: str) -> bytes:
        """Returns a whole object of metadata. Raises: as `open_small`."""
        with self.open_small(name) as found:
            return found.part(0, found.nbytes)

    @contextmanager
    def open_regular(self, name: str) -> Iterator[SmallObject]:
        """Looks at an object of any size, and gets its begin. Raises: StorageError."""
        key = self.key(name)
        begin = self.bucket.get_begin(key, _BEGIN_BYTES)
        yield SmallObject(self.bucket, key, self.path / name, begin)

    def read_at(self, name: str, offsets: Sequence[int], nbytes: int) -> list[bytes]:
        """Returns up to `nbytes` at each offset of an object, neighbours by one request."""
        found: list[bytes] = []
        with self.open_regular(name) as file:
            begin, window = 0, b""
            for offset in offsets:
                end = min(offset + nbytes, file.nbytes)
                if not begin <= offset <= end <= begin + len(window):
                    begin = offset
                    window = file.part(offset, min(_BEGIN_BYTES, max(file.nbytes - offset, 0)))
                found.append(window[offset - begin : end - begin])
        return found

    def create(self, name: str, pieces: Iterable[Buffer], *, is_durable: bool) -> None:
        """Puts a new object. Raises: StorageError, EEXIST if there is one."""
        self.bucket.put_if(self.key(name), list(pieces), None)

    def unlink(self, name: str) -> None:
        """Removes an object, if it is there."""
        self.bucket.delete([self.key(name)])

    def unlink_all(self, names: Iterable[str]) -> None:
        """Removes objects, those that are there."""
        self.bucket.delete([self.key(name) for name in names])

    def remove_leftovers(self, names: Iterable[str]) -> None:
        """Removes objects of a save whose own error is on its way: its errors are only logged."""
        try:
            self.unlink_all(names)
        except StorageError as error:
            logger.warning("leftovers of a failed save stay: %s", str(error))

    def sync(self) -> None:
        """Does nothing: what a store has answered is durable."""

    def sync_parent(self) -> None:
        """Does nothing: a prefix has no entry."""

    def is_fresh(self) -> bool:
        """False: a name that was used before is never used again."""
        return False

    def locks(
        self, save: RunningSave, rank: int | None, *, is_conditional: bool
    ) -> Iterator[ObjectClaim]:
        """Yields what the save of all ranks, or of one, means to replace."""
        yield self._claim(metadata_name(rank), save, is_conditional=is_conditional)

    def _claim(self, name: str, save: RunningSave | None, *, is_conditional: bool) -> ObjectClaim:
        if is_conditional:
            self.bucket.check_conditional(self.path.key)
        found = self.bucket.head(self.key(name))
        tag = None if found is None else found[1]
        return ObjectClaim(tag, save, is_conditional=is_conditional)

    def claims(self) -> Callable[[str], ObjectClaim]:
        """Returns what a commit of each name replaces, as one listing has found it."""
        found = self.entries()

        def claim(name: str) -> ObjectClaim:
            tag = found[name].tag if name in found else None
            return ObjectClaim(tag, None, is_conditional=True)

        return claim

    def publish(
        self,
        name: str,
        pieces: Sequence[Buffer],
        *,
        is_durable: bool,
        lock: Any,
        is_own: Callable[[SmallObject], bool],
    ) -> None:
        """Commits, in place of what `lock` has found.

        Args:
            lock: of `locks`; None: what is there now.
            is_own: whether an object of metadata is of this save.

        Raises:
            ConcurrentSaveError: something else is there by now.
            StorageError: the store has refused it.
            OutcomeUnknownError: whether it was done or not, the store does not say.
        """
        claim = lock or self._claim(name, None, is_conditional=True)
        has_answers = True  # to all attempts
        for tries_left in reversed(range(_MAX_COMMITS)):
            claim.set_unsure(True)
            error = self._attempt(name, pieces, claim)
            if error is None:
                break
            has_answers &= error.errno in ANSWERS
            found = self._look(name, claim, is_own)
            if found == "own":
                break
            if found == "other" and claim.is_conditional:
                claim.set_unsure(False)
                raise concurrent(self.path, f"'{name}' is another one") from error
            is_last = error.errno in REFUSED or not tries_left
            if found == "same" and has_answers and is_last:
                claim.set_unsure(False)
                raise error
            if error.errno == errno.ETIMEDOUT:  # the bound of the operation
                raise self._unknown(name, error) from error
            time.sleep(_COMMIT_PAUSE_S)
        else:
            raise self._unknown(name, error) from error
        claim.set_unsure(False)

    def _unknown(self, name: str, error: StorageError | None) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"commit '{self.path / name}': its outcome is unknown: {error}. What is there is the "
            "previous checkpoint or this one, whole"
        )

    def _attempt(
        self, name: str, pieces: Sequence[Buffer], claim: ObjectClaim
    ) -> StorageError | None:
        """Puts metadata in place of what the claim has found; returns the error."""
        try:
            if claim.is_conditional:
                self.bucket.put_if(self.key(name), pieces, claim.tag)
            else:
                self.bucket.put(self.key(name), pieces)
        except StorageError as error:
            return error
        return None

    def _look(
        self, name: str, claim: ObjectClaim, is_own: Callable[[SmallObject], bool]
    ) -> Literal["own", "same", "other", "unknown"]:
        """Returns whose metadata is there: of this save, what the claim has found, another's."""
        for _ in range(_MAX_LOOKS):
            try:
                with self.open_small(name) as found:
                    if found.tag == claim.tag:
                        return "same"
                    return "own" if is_own(found) else "other"
            except DcpxError as error:  # a damaged answer is one, too
                if isinstance(error, StorageError) and error.errno == errno.ENOENT:
                    return "same" if claim.tag is None else "other"
                logger.debug("read again what is committed: %s", error)
            time.sleep(_COMMIT_PAUSE_S)
        return "unknown"

    def write_job(self, options: WriteOptions) -> _C.WriteJob:
        """Returns a job whose files `writing` uploads."""
        memory_bytes = options.resolved_upload_bytes()
        return _C.WriteJob(
            dir_fd=-1,
            dir_path=os.fsencode(self.path),
            workers=options.resolved_workers(),
            segment_bytes=upload_slot_bytes(options.slot_bytes, memory_bytes),
            use_direct=False,
            is_durable=False,
            in_place=options.in_place,
            memory_bytes=memory_bytes,
        )

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
        """Uploads what `job` is given in the block, and has all of it in the store at its end.

        Yields counters to add to the job's. Raises: OptionError, before anything; StorageError: all
        uploads have ended, and what is there of them is the caller's to remove.
        """
        memory_bytes = options.resolved_upload_bytes()
        slot_bytes = upload_slot_bytes(options.slot_bytes, memory_bytes)
        part_bytes = part_bytes_for(
            max(planned_bytes, default=0),
            memory_bytes,
            slot_bytes,
            is_slow=self.bucket.link.sending.is_slow,
        )
        counters: dict[str, int] = {}
        timeout = current_timeout(StorageTimeout(options.save_timeout_s, "save_timeout_s"))
        uploads = Uploads(self.bucket, self.path.key, job, names, part_bytes, timeline, timeout)
        try:
            yield counters
            counters["engine_ns"] = uploads.wait(poll)
            done = job.report()  # what workers did not copy, they waited for the store
            engine_ns = done["engine_ns"] + counters["engine_ns"]
            waited_ns = engine_ns * options.resolved_workers() - done["copy_ns"]
            counters["write_ns"] = max(waited_ns, 0)
        except BaseException as error:
            first = uploads.error
            if not isinstance(error, Exception):  # Ctrl-C, in a wait that notes nothing itself
                timeout.note_interrupt()
            uploads.cancel()
            is_told = isinstance(error, StorageError) and error.errno == errno.ECANCELED
            if is_told and first is not None:
                raise first from None
            raise

    def read_job(self, options: ReadOptions) -> _C.ReadJob:
        """Returns a job for a load of these objects. Answers are its slots; where what is in them
        goes on to devices, it has others as well, of half the memory.
        """
        answers = options.host_memory_bytes // options.slot_bytes
        return _C.ReadJob(
            objects=self._reads(options),
            dir_path=os.fsencode(self.path),
            workers=min(options.workers or _MAX_READERS, answers),
            slot_bytes=options.slot_bytes,
            verify=options.verify == "blocks",
            max_slots=max(answers // 2, 1),
        )

    def _reads(self, options: ReadOptions) -> ObjectReads:
        timeout = current_timeout(StorageTimeout(options.load_timeout_s, "load_timeout_s"))
        return ObjectReads(self.bucket, self.path, timeout)

    def verify_job(self, options: ReadOptions) -> _C.VerifyJob:
        """Returns a job that verifies these objects. Answers are its slots."""
        slot_bytes = summed_slot_bytes(options)
        answers = max(1, options.host_memory_bytes // slot_bytes)
        return _C.VerifyJob(
            objects=self._reads(options),
            dir_path=os.fsencode(self.path),
            workers=min(options.workers or _MAX_READERS, answers),
            slot_bytes=slot_bytes,
        )


def summed_slot_bytes(options: ReadOptions) -> int:
    """Returns the slots of a job that verifies: a power of two, from 256 KiB on."""
    return max(_MIN_SUMMED_BYTES, 1 << (options.slot_bytes.bit_length() - 1))
