"""The root of a manager as a prefix of a store: what `DirectoryRoot` is for a directory.

A store has no locks and no renames. So
- the pointer is replaced by a conditional PUT, on what was read right before;
- a removal puts `.dcpx.deleted` and deletes `.metadata`: no checkpoint any more. The data stay for
  a grace, in which those who have opened it read on, and go behind a later commit;
- a save puts `.dcpx.lock` until its commit, which notes the checkpoint that it replaces. Where that
  is none, and it is older than the grace, the save was killed, and its objects go. Data without
  metadata and without such a mark stay: somebody may have lost the metadata;
- a pin is put before `.dcpx.deleted` is looked for, and the other way round: of a `pin` and a
  removal at one time at least one sees the other.
All ages are differences of the store's own dates.
"""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

from torch_dcpx._json import parsed_json
from torch_dcpx.errors import (
    ConcurrentSaveError,
    CorruptionError,
    DcpxError,
    NotCommittedError,
    OutcomeUnknownError,
    ShortReadError,
    StorageError,
    UnsupportedError,
)
from torch_dcpx.manager.pointer import (
    Pointer,
    decoded_pointer,
    encoded_pointer,
    is_tag,
    read_pointer,
)
from torch_dcpx.manager.removal import suppress_and_log
from torch_dcpx.storage.listed_place import ListedPlace
from torch_dcpx.storage.names import (
    LOCK_NAME,
    METADATA_NAME,
    PIN_NAME,
    POINTER_NAME,
    TOMBSTONE_NAME,
    is_data_file_name,
    is_metadata_name,
    is_of_checkpoint,
    is_probe_name,
)
from torch_dcpx.storage.object_errors import ANSWERS, REFUSED
from torch_dcpx.storage.object_listing import ListedObject
from torch_dcpx.storage.object_place import ObjectPlace
from torch_dcpx.storage.object_url import Location, ObjectUrl, check_url
from torch_dcpx.storage.root_lock import RootLock
from torch_dcpx.storage.root_record import ObjectRecord
from torch_dcpx.writer.commit import referenced_files, unnamed_files

logger = logging.getLogger("torch_dcpx")

_TRIES = 8  # of the pointer, while others replace it or nobody answers
_PAUSE_S = 0.5


class StoreRoot:
    """The objects of a root. Thread-safe but for `read` and `write`."""

    has_locks = answers_in_parts = False

    def __init__(self, path: ObjectUrl, *, grace_s: float, is_conditional: bool) -> None:
        """Asks nothing yet.

        Args:
            grace_s: seconds for which the data of a removed checkpoint stay, and what a save that
                did not end has left.
            is_conditional: whether the pointer is replaced by conditional PUTs.
        """
        self.path = path
        self._grace_s = grace_s
        self.is_conditional = is_conditional
        # Without self: a root that is dropped goes at once.
        self.lock = RootLock(
            path, lambda: ObjectRecord(ObjectPlace(path), is_conditional=is_conditional)
        )
        self._seen: Pointer | None = None  # as this process has read or written it last
        self._named: dict[str, set[str]] = {}  # data files, by the tag of their `.metadata`

    @property
    def _place(self) -> ObjectPlace:
        return ObjectPlace(self.path)  # anew: by the credentials of now

    # ---- The root ------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Returns the names right beneath the root. Raises: StorageError."""
        found = self._place.bucket.listing(self._place.path.key)
        return sorted([*found.objects, *found.prefixes])

    def directories(self) -> list[str]:
        """Returns the names beneath which there may be a checkpoint."""
        return list(filter(is_tag, self._place.prefixes()))

    def is_foreign(self, name: str) -> bool:
        """Returns whether an entry is not ours, no checkpoint, removed, or a failed save's mark."""
        within = ObjectPlace(self.path / name).names()
        if not within:
            return not is_of_checkpoint(name)
        is_removed = TOMBSTONE_NAME in within and METADATA_NAME not in within
        rest = [one for one in within if one != LOCK_NAME]
        return is_removed or not any(map(is_of_checkpoint, rest))

    def is_unanswered(self, error: DcpxError) -> bool:
        """Returns whether the store, not what lies in it, is the reason for an error.

        A checkpoint may be whole all the same: no older one may take its place.
        """
        is_known = isinstance(error, (NotCommittedError, ShortReadError))
        return isinstance(error, StorageError) and not is_known and error.errno != errno.ENOENT

    def read(self) -> Pointer | None:
        """Returns the pointer, None of a missing one. Raises: CorruptionError, StorageError."""
        self._seen = read_pointer(self._place)
        return self._seen

    def hold(self, timeout_s: float) -> None:
        """Takes the lock of the root. Raises: as `RootLock.take`."""
        self.lock.take(timeout_s)

    def write(self, pointer: Pointer) -> None:
        """Replaces the pointer, but for a later commit and damaged saves that others have noted.

        Raises: StorageError: it is not replaced; OutcomeUnknownError: the store does not say.
        """
        error: StorageError | None = None
        has_answers = True  # to all tries
        for tries_left in reversed(range(_TRIES)):
            found, tag = self._found()
            wanted = pointer if found is None else _merged(pointer, found, self._seen)
            is_done = error is not None and found == wanted  # by a try that nobody answered
            error = None if is_done else self._attempt(wanted, tag)
            if error is None:
                self._seen = wanted
                return
            has_answers &= error.errno in ANSWERS
            if error.errno in REFUSED or (has_answers and not tries_left):
                raise error
            time.sleep(_PAUSE_S)
        raise OutcomeUnknownError(
            f"replace '{self.path / POINTER_NAME}': its outcome is unknown: {error}"
        ) from error

    def _found(self) -> tuple[Pointer | None, str | None]:
        """Returns the pointer that is there, None of a damaged one, and its tag."""
        try:
            with self._place.open_small(POINTER_NAME) as file:
                try:
                    return decoded_pointer(file), file.tag
                except CorruptionError as error:
                    logger.warning("a damaged pointer is replaced: %s", error)
                    return None, file.tag
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None, None
            raise

    def _attempt(self, pointer: Pointer, tag: str | None) -> StorageError | None:
        bucket, key = self._place.bucket, self._place.key(POINTER_NAME)
        try:
            if self.is_conditional:
                bucket.put_if(key, [encoded_pointer(pointer)], tag)
            else:
                bucket.put_again(key, encoded_pointer(pointer))
        except StorageError as error:
            return error
        return None

    # ---- One checkpoint ------------------------------------------------------------------------

    def check_tag(self, tag: str) -> None:
        """Raises OptionError, UnsupportedError: a tag that no URL takes."""
        check_url(str(self.path / tag), "tag")

    def open(self, tag: str) -> ListedPlace:
        """Opens a checkpoint to read it, and lists it once."""
        return ListedPlace(self.path / tag)

    def open_own(self, path: Location) -> ObjectPlace:
        """Opens the place of a save."""
        return ObjectPlace(path)  # type: ignore[arg-type]

    def identity(self, tag: str) -> tuple[str] | None:
        """Returns the tag of a `.metadata`, new with each save; None of a missing one."""
        return ObjectPlace(self.path / tag).identity(METADATA_NAME)

    def committed_ns(self, tag: str) -> int:
        """Returns 0: a date would cost a request."""
        return 0

    def is_there(self, tag: str, doing: str) -> bool:
        """Returns True: something may lie there, and nothing is a link."""
        return True

    def begin_save(self, tag: str) -> None:
        """Marks a save that is under way, and notes if it is to replace a checkpoint."""
        place = ObjectPlace(self.path / tag)
        found = place.identity(METADATA_NAME)
        place.bucket.put_again(place.key(LOCK_NAME), b"" if found is None else found[0].encode())

    def check_save(self, tag: str, sizes: Mapping[str, int], seconds: float) -> None:
        """Looks whether what a save has put is there, where another job may have taken the save for
        one that was killed.

        Args:
            sizes: bytes, by name.
            seconds: since before it began.

        Raises StorageError: an object is gone.
        """
        if seconds > self._grace_s / 2:
            self.begin_save(tag)  # anew, so that nobody removes anything from now on
            ObjectPlace(self.path / tag).check_sizes(sizes, is_exact=False)

    def end_save(self, tag: str) -> None:
        """Removes that mark; logs a failure: it goes after the grace."""
        with suppress_and_log(f"remove '{self.path / tag / LOCK_NAME}'"):
            ObjectPlace(self.path / tag).unlink(LOCK_NAME)

    @contextmanager
    def reading(self, tag: str) -> Iterator[None]:
        """Does nothing: the data of a removed checkpoint stay for the grace."""
        yield

    def is_pinned(self, tag: str) -> bool:
        """Returns whether a checkpoint has the mark of `pin`. Raises: StorageError."""
        return ObjectPlace(self.path / tag).is_regular(PIN_NAME)

    def pin(self, tag: str) -> None:
        """Marks a checkpoint. Raises ConcurrentSaveError: it is being deleted."""
        place = ObjectPlace(self.path / tag)
        if place.is_regular(PIN_NAME) and not self._is_going(place):
            return
        place.bucket.put_again(place.key(PIN_NAME), b"")
        if self._is_going(place):
            place.unlink(PIN_NAME)
            problem = f"pin '{place.path}': it is being deleted"
            raise ConcurrentSaveError(problem, errno=errno.EBUSY, path=str(place.path))

    def unpin(self, tag: str) -> None:
        """Removes the mark. Raises: StorageError."""
        ObjectPlace(self.path / tag).unlink(PIN_NAME)

    def _is_going(self, place: ObjectPlace) -> bool:
        """Whether a checkpoint is gone, or its removal has begun."""
        found = place.identity(METADATA_NAME)
        if found is None or not place.is_regular(TOMBSTONE_NAME):
            return found is None
        return self._noted(place)[0] == found[0]

    def _noted(self, place: ObjectPlace) -> tuple[str, set[str]]:
        """Returns the tag of the `.metadata` that `.dcpx.deleted` is about, and the files that it
        named; nothing of a damaged note.
        """
        try:
            with place.open_small(TOMBSTONE_NAME) as file:
                noted = parsed_json(file.part(0, file.nbytes))
            return str(noted["tag"]), {n for n in noted["files"] if is_data_file_name(n)}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("'%s' cannot be read: %s", place.path / TOMBSTONE_NAME, error)
            return "", set()

    # ---- Removals ------------------------------------------------------------------------------

    def remove(self, tag: str) -> None:
        """Ends a checkpoint; `tidy` removes its data after the grace.

        Raises:
            UnsupportedError: it is pinned.
            CorruptionError: its `.metadata` cannot be read, so the names of its files are unknown.
            StorageError: the next attempt goes on.
        """
        place = ObjectPlace(self.path / tag)
        found = place.identity(METADATA_NAME)
        if found is None:
            return
        named = self._named.get(found[0]) or referenced_files(place, METADATA_NAME)
        if named is None:
            raise CorruptionError(
                f"delete '{place.path}': its '{METADATA_NAME}' cannot be read, so nobody knows "
                "which objects are its own; remove them by hand",
                path=str(place.path / METADATA_NAME),
            )
        noted = {"tag": found[0], "files": sorted(named), "grace_s": self._grace_s}
        place.bucket.put_again(place.key(TOMBSTONE_NAME), json.dumps(noted).encode())
        try:
            if place.is_regular(PIN_NAME):
                raise UnsupportedError(f"delete '{place.path}': it is pinned; unpin it first")
            if place.identity(METADATA_NAME) != found:
                place.unlink(TOMBSTONE_NAME)  # another job has committed there meanwhile
                return
            place.unlink(METADATA_NAME)
            self._named.pop(found[0], None)
        except (StorageError, UnsupportedError) as error:
            # What nobody answered may be done later: nobody may pin it for the grace.
            if isinstance(error, UnsupportedError) or error.errno in REFUSED:
                with suppress_and_log(f"remove '{place.path / TOMBSTONE_NAME}'"):
                    if place.identity(METADATA_NAME) is not None:
                        place.unlink(TOMBSTONE_NAME)  # else nobody could pin it
            raise

    def tidy(self, busy: Callable[[], Collection[str]], *, leftovers: bool) -> None:
        """Removes data of removed checkpoints after the grace, but of `busy` tags; logs failures.

        With `leftovers` also objects that no metadata names, of saves that did not end.
        """
        place = self._place
        ages = _Ages(place, self._grace_s)
        found = place.bucket.listing(place.path.key)
        probes = [name for name in found.objects if is_probe_name(name)]
        with suppress_and_log(f"tidy '{self.path}'"):
            place.unlink_all(name for name in probes if ages.is_old(found.objects[name]))
        for tag in filter(is_tag, found.prefixes):
            if tag not in busy():
                with suppress_and_log(f"tidy '{self.path / tag}'"):
                    self._tidy(ListedPlace(self.path / tag), ages, leftovers=leftovers)

    def _tidy(self, place: ListedPlace, ages: _Ages, *, leftovers: bool) -> None:
        found = place.entries()
        tombstone = found.get(TOMBSTONE_NAME)
        is_whole = any(map(is_metadata_name, found))
        if tombstone is not None and not ages.is_old(tombstone):
            return  # those who read it go on
        going: set[str] = set()
        if is_whole:
            if leftovers or tombstone is not None:
                going = self._unnamed(place, found)
        elif tombstone is not None:
            noted, before_s = self._noted(place)[1], tombstone.modified_s
            unnamed = self._unnamed(place, found)  # of saves that were killed before it, too
            going = {n for n in unnamed if n in noted or found[n].modified_s < before_s}
        elif leftovers:
            going = self._of_killed(place, found, ages)
        gone = sorted(name for name in going if ages.is_old(found[name]))
        place.unlink_all(gone)
        marks = set(filter(is_probe_name, found))
        if is_whole or not set(filter(is_data_file_name, found)).difference(gone):
            marks |= {LOCK_NAME, TOMBSTONE_NAME, *(() if is_whole else (PIN_NAME,))}
        elif tombstone is not None:
            marks.add(TOMBSTONE_NAME)
        place.unlink_all(n for n in sorted(marks) if n in found and ages.is_old(found[n]))

    def _of_killed(
        self, place: ListedPlace, found: Mapping[str, ListedObject], ages: _Ages
    ) -> set[str]:
        """Returns the data of a save that was killed before there was a checkpoint."""
        mark = found.get(LOCK_NAME)
        if mark is None or mark.nbytes > 0 or not ages.is_old(mark):
            return set()  # data that may be of a checkpoint that lost its metadata
        return self._unnamed(place, found)

    def _unnamed(self, place: ListedPlace, found: Mapping[str, ListedObject]) -> set[str]:
        """Returns the data files that no metadata names; none where that is not known."""
        published = None
        if METADATA_NAME in found:
            tag = found[METADATA_NAME].tag
            named = self._named.get(tag) or referenced_files(place, METADATA_NAME)
            if named is None:
                return set()
            self._named[tag] = named
            published = {METADATA_NAME: named}
        return unnamed_files(place, published=published) or set()


class _Ages:
    """Tells by the store's clock what is older than a grace; asks it once, when it must."""

    def __init__(self, place: ObjectPlace, grace_s: float) -> None:
        self._place, self._grace_s = place, grace_s

    @cached_property
    def _now_s(self) -> float:
        return self._place.bucket.now_s(self._place.path.key)

    def is_old(self, found: ListedObject) -> bool:
        return self._now_s - found.modified_s >= self._grace_s


def _merged(own: Pointer, found: Pointer, seen: Pointer | None) -> Pointer:
    """Returns the pointer to write in place of `found`, which another job may have written."""
    if found == seen:
        return own
    later = own if own.order >= found.order else found
    committing = tuple(dict.fromkeys((*own.committing, *found.committing)))
    damaged = tuple(sorted({*own.damaged, *found.damaged}))
    return later._replace(committing=committing, damaged=damaged)
