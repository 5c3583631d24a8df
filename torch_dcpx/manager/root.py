"""The root of a manager's checkpoints, as one rank (the coordinator) sees it.

The newest checkpoint is
1. the one that the pointer names, if it is whole and still that save; or, of the commits that had
   begun when the pointer was written, a later whole one;
2. else, of all directories, the newest one that is whole, as `newest.py` ranks them.
The log names each directory that is skipped on the way, with the reason.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from torch_dcpx._waiting import Guard
from torch_dcpx.errors import DcpxError, OutcomeUnknownError, StorageError
from torch_dcpx.manager.directory_root import DirectoryRoot
from torch_dcpx.manager.newest import Runs, doubts, new_run, ranked, to_ask
from torch_dcpx.manager.pointer import Pointer, refuse_users_pointer
from torch_dcpx.manager.store_root import StoreRoot
from torch_dcpx.manager.stored import DataFiles, Skipped, Stored, examine
from torch_dcpx.options import ReadOptions
from torch_dcpx.storage.names import METADATA_NAME, POINTER_NAME
from torch_dcpx.storage.root_record import identity_of
from torch_dcpx.storage.visibility import or_hidden

logger = logging.getLogger("torch_dcpx")

_PATIENCE_S = 600.0
OF_TIMEOUT = 0.8  # of an operation: the other ranks hear of a root that is held before they give up


class ManagerRoot:
    """A root. Not thread-safe but for `committing` and `note_*`."""

    def __init__(
        self,
        files: DirectoryRoot | StoreRoot,
        options: ReadOptions | None,
        given: str = "",
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """Reads nothing yet.

        Args:
            options: of readers.
            given: the path in the user's words, for logs. Default: that of `files`.
            patience_s: seconds that a thread waits for another one's commit or removal.
        """
        self.files = files
        self.path = files.path
        self.given = given or str(files.path)
        self._options = options
        self.patience_s = patience_s
        self.allow_older = False  # whether a known commit that is not found is passed over
        self.known = Pointer()  # the last commit that this process has made, or read of
        self.has_pointer, self.unread = False, ""  # as the last look saw; why it was of no use
        self.silent: dict[str, StorageError] = {}  # by tag: what did not answer the last look
        self._commits = Guard()  # one at a time: the pointer follows each
        # Of the pointer and its order alone: a removal must not wait for a thread whose signal's
        # handler waits for it. All else that is noted changes in one step of the interpreter.
        self._guard = Guard()
        self._writes = 0  # of the pointer
        self._pointer: Pointer | None = None  # as this process has written or read it
        self._runs: Runs | None = None  # None: not read yet
        self.being_committed: list[str] = []
        self._next_order = 0
        self._known: dict[str, tuple[object, Stored, DataFiles]] = {}
        self._damaged: set[str] = set()  # saves, by their ids
        self._noted: set[str] = set()  # all that were damaged, as far as this process has seen
        self._warned: dict[str, str] = {}  # why a tag was skipped: told once while looks go on
        self.is_busy: Callable[[str], bool] = lambda _: False  # whether this job saves to a tag

    def examined(self, tag: str, *, looks_at_data: bool = True) -> Stored:
        """Returns `examine` of a tag, from memory where `.metadata` has not changed.

        Raises: as `examine`; NotCommittedError: there is no such directory.
        """
        with self.files.open(tag) as place:
            identity = place.identity(METADATA_NAME)
            known = self._known.get(tag)
            if known is not None and known[0] == identity:
                if looks_at_data:
                    known[2].check(place)
                return known[1]
            stored, files = examine(place, self._options)
        if identity is not None:
            self._known[tag] = identity, stored, files
        return stored

    def note_damaged(self, tag: str) -> None:
        """Notes that bytes of a checkpoint are wrong: of a copy, none that lies in its place."""
        known = self._known.get(tag)
        with suppress(StorageError):  # else nobody knows whether it lies in its place
            if known is not None and not self._has_original(known[1]):  # on the coordinator
                self._damaged.add(known[1].save_id)
                self._noted.add(known[1].save_id)

    def _has_original(self, stored: Stored) -> bool:
        """Returns whether another file of metadata lies where a copy was made; no link is one."""
        if stored.record is None or stored.is_in_place:
            return False
        own = self.files.identity(stored.tag)
        return self.files.identity(stored.record.tag) not in (None, own)

    def tell_damaged(self) -> None:
        """Notes the damaged saves in the pointer for later jobs, unless they are there already.

        It changes nothing else there: this job may only read, beside one that saves. It logs a
        failure, as where another job holds the root: later jobs see the damage themselves.
        """
        damaged = tuple(sorted(self._damaged))
        try:
            if damaged != (self.files.read() or Pointer()).damaged:
                with nullcontext() if self.files.is_conditional else self.held(0.0), self._own():
                    found = self.files.read() or Pointer()
                    refuse_users_pointer(self.path)
                    self.files.write(found._replace(damaged=damaged))
        except DcpxError as error:
            text = "later jobs are not told what is damaged beneath '%s': %s"
            logger.warning(text, self.path, error)

    @property
    def damaged(self) -> frozenset[str]:
        """Ids of the saves that are still there and in which a resume has read wrong bytes."""
        return frozenset(self._damaged)

    def forget(self, tag: str) -> None:
        """Notes that a checkpoint is gone, or may have changed."""
        self._known.pop(tag, None)

    def listed(self) -> tuple[list[Stored], Skipped]:
        """Returns all whole checkpoints, the newest first; and the others. Raises: StorageError."""
        stored, skipped = self._whole(self.files.directories())
        self._damaged &= {found.save_id for found in stored}
        return stored, skipped

    def remembered(self) -> tuple[list[Stored], frozenset[str]]:
        """Returns all that is or was whole, the newest first, and ids of damaged and lost saves."""
        stored, skipped = self.listed()
        whole, _ = self._whole((tag for tag, _ in skipped), looks_at_data=False)
        lost = [each for each in whole if each.is_ours]  # of a copy the original may be whole
        together = ranked([*stored, *lost], self.runs)
        return together, self.damaged | {found.save_id for found in lost}

    def remove(self, tag: str) -> None:
        """Removes a checkpoint. Raises: as `remove` of the root's files."""
        self.forget(tag)
        self.files.remove(tag)

    def newest(self) -> tuple[Stored | None, Skipped]:
        """Returns and notes the newest whole checkpoint; and the others. Raises: StorageError."""
        self._known.clear()
        self.silent.clear()
        pointer = self._read()
        self._damaged.update(pointer.damaged)
        self._noted.update(pointer.damaged)
        found, skipped = self._pointed(pointer)
        # Who saved the others moves no pointer.
        if not (found and found[0].is_ours) or self._is_put_back(pointer, found[0]):
            found, skipped = self.listed()
        self._warned = {tag: why for tag, why in skipped if self._warned.get(tag) == why}
        self.warn(skipped)
        stored = found[0] if found else None
        order = max([pointer.order, *(each.order for each in found)])
        with self._own():
            self._next_order = max(self._next_order, order + 1)
            if self._pointer is None or order >= self._pointer.order:  # else one was committed now
                is_other = stored is None or stored.save_id != pointer.save_id
                is_lost = is_other and pointer is self.known and not self.has_seen(pointer.save_id)
                is_hidden = is_lost and or_hidden(self.path)  # no save may write that it is gone
                self._pointer = pointer if is_hidden else _pointer_to(stored, order)
        return stored, skipped

    def _read(self) -> Pointer:
        """Returns the pointer, an empty one where it is missing or of no use; and notes the run.

        Without a pointer nobody knows whose the checkpoints are: retention leaves them alone.
        """
        try:
            pointer, self.unread = self.files.read(), ""
        except DcpxError as error:
            is_no_root = isinstance(error, StorageError) and error.errno == errno.ENOTDIR
            if is_no_root or (self.files.is_unanswered(error) and not self.allow_older):
                raise
            logger.warning("the pointer to the newest checkpoint is of no use: %s", error)
            pointer, self.unread = None, str(error)
        self.has_pointer = pointer is not None
        pointer = pointer or Pointer()
        root = identity_of(self.path)
        if pointer.tag is not None and pointer.root in ("", root):  # else it came with a copy
            self._note_known(pointer)
        run = new_run(f"{self.path} {root}")
        self._runs = Runs(pointer.run or run, root, pointer.earlier)
        if pointer.root not in ("", root):  # the run may go on where this was copied from
            begun = [s for s in self._whole(pointer.committing)[0] if s.run == pointer.run]
            last = max([pointer.order, *(s.order for s in begun)])
            self._runs = Runs(run, root, {**pointer.earlier, pointer.run: last})
        return pointer

    def _note_known(self, pointer: Pointer) -> None:
        if pointer.order >= self.known.order:
            self.known = pointer

    @property
    def runs(self) -> Runs:
        """The run that saves here, and those whose checkpoints are the root's own, too."""
        if self._runs is None:
            self._read()
        return self._runs  # type: ignore[return-value]

    def _bound_runs(self, runs: Runs) -> None:
        """Forgets the runs of which no checkpoint is left: the list is no longer than theirs."""
        found = {each.run for each in self.remembered()[0]}
        earlier = {run: last for run, last in runs.earlier.items() if run in found}
        self._runs = runs._replace(earlier=earlier)

    def doubts(self, chosen: Stored, passed: Collection[str]) -> Skipped:
        """Returns, and logs, whole checkpoints that may be newer than what was just chosen."""
        others = [s for s in self._seen() if s.tag != chosen.tag and s.tag not in passed]
        found = doubts(others, chosen, self.runs)
        self.warn(found)
        return found

    def _seen(self) -> list[Stored]:
        """Returns what `newest` has examined, the newest first."""
        return ranked((row[1] for row in list(self._known.values())), self.runs)

    def has_seen(self, save_id: str | None) -> bool:
        """Returns whether `newest` has found a save whole, under whatever name."""
        return any(stored.save_id == save_id for stored in self._seen())

    def _is_put_back(self, pointer: Pointer, chosen: Stored) -> bool:
        """Returns, and logs, whether the pointer is older than a later commit of the root's own.

        It examines only what is not older than the chosen one by its name, or later by its date.
        """
        names = [n for n in self.files.directories() if n not in self._known]
        for name in to_ask(names, chosen, self.files.committed_ns):
            if name not in self.being_committed:
                with suppress(DcpxError):  # not whole: a save may be under way
                    self.examined(name)
        newer = [s for s in self._seen() if s.is_ours and s.order > pointer.order]
        if newer:
            text = "'%s' names '%s', but '%s' is a later commit: put back, or a job commits now"
            logger.warning(text, self.path / POINTER_NAME, chosen.tag, newer[0].tag)
        return bool(newer)

    def newest_but(self, passed: Collection[str]) -> tuple[Stored | None, Skipped]:
        """Returns the newest of all directories but these tags, as `newest`; notes nothing."""
        self.silent.clear()
        found, skipped = self.listed()
        self.warn(skipped)
        return next((each for each in found if each.tag not in passed), None), skipped

    def warn(self, skipped: Iterable[tuple[str, str]]) -> None:
        """Logs why checkpoints are skipped, unless the last reason was the same."""
        for tag, reason in skipped:
            if self._warned.get(tag) != reason:
                self._warned[tag] = reason
                logger.warning("skipped checkpoint '%s' beneath '%s': %s", tag, self.path, reason)

    def _pointed(self, pointer: Pointer) -> tuple[list[Stored], Skipped]:
        """Returns `_whole` of the checkpoints that the pointer names."""
        tags = [tag for tag in dict.fromkeys((*pointer.committing, pointer.tag)) if tag is not None]
        # This process commits some of them at this moment.
        found, skipped = self._whole(tag for tag in tags if tag not in self.being_committed)
        own = (pointer.tag, pointer.save_id)
        return [s for s in found if (s.tag, s.save_id) == own or s.order > pointer.order], skipped

    def _whole(
        self, tags: Iterable[str], *, looks_at_data: bool = True
    ) -> tuple[list[Stored], Skipped]:
        """Returns the whole checkpoints among these, the newest first; and the others.

        Raises StorageError: a store does not answer, so nobody knows.
        """
        stored: list[Stored] = []
        skipped: list[tuple[str, str]] = []
        for tag in tags:
            self.silent.pop(tag, None)
            try:
                stored.append(self.examined(tag, looks_at_data=looks_at_data))
            except DcpxError as error:
                if isinstance(error, StorageError) and self.files.is_unanswered(error):
                    if not (self.files.answers_in_parts or self.allow_older):
                        raise
                    self.silent[tag] = error
                if not self.files.is_foreign(tag) and not self.is_busy(tag):
                    skipped.append((tag, f"{type(error).__name__}: {error}"))
        return ranked(stored, self.runs), tuple(skipped)

    def take_order(self) -> int:
        """Returns the next commit's number; looks for the newest first if another job was here."""
        own, found = self._pointer, None
        with suppress(DcpxError):
            found = own and self.files.read()
        if found is not None:  # what another job has noted; own notes go with checkpoints
            self._damaged.update(set(found.damaged) - self._noted)
            self._noted.update(found.damaged)
        if own is None or found is None or found[:4] != own[:4]:
            self.newest()
        if self.runs.earlier and (found is None or found.root != self.runs.root):
            self._bound_runs(self.runs)
        with self._own():
            order, self._next_order = self._next_order, self._next_order + 1
        return order

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """Keeps other jobs from the pointer in the block, as a save does until the manager is
        closed. Raises: as `hold` of the root's files.
        """
        was_held = self.files.lock.is_held
        self.files.hold(OF_TIMEOUT * timeout_s)
        try:
            yield
        finally:
            if not was_held:
                self.files.lock.give_back()

    @property
    def newest_tag(self) -> str | None:
        """The tag of the newest checkpoint, as far as this process knows."""
        pointer = self._pointer
        return None if pointer is None else pointer.tag

    def one_commit(self, doing: str) -> AbstractContextManager[None]:
        """Keeps other threads from committing in the block. A signal's handler within it may, too.

        Raises ConcurrentSaveError: another thread's commit does not end.
        """
        return self._commits.held(self.patience_s, doing, f"a commit beneath '{self.path}'")

    def _own(self) -> AbstractContextManager[None]:
        """Keeps other threads from what this one notes. Raises: as `one_commit`."""
        return self._guard.held(self.patience_s, f"use '{self.path}'", "a note of the newest one")

    @contextmanager
    def committing(self, tag: str) -> Iterator[None]:
        """Notes durably that the block is about to commit. Raises StorageError: it cannot."""
        self.being_committed.append(tag)
        self.forget(tag)
        try:
            with self._own():
                try:
                    self._write()
                except OutcomeUnknownError as error:  # of the pointer: nothing is committed yet
                    path = str(self.path / POINTER_NAME)
                    raise StorageError(str(error), errno=errno.EIO, path=path) from error
            yield
        finally:
            self.being_committed.remove(tag)

    def note_committed(self, tag: str, step: int, save_id: str, order: int) -> None:
        """Points to a committed checkpoint, unless a later one was.

        It logs a failure: the pointer before still leads to the checkpoint.
        """
        with self._own():
            if self._pointer is None or order >= self._pointer.order:
                self._pointer = Pointer(tag, step, save_id, order)
                self._note_known(self._pointer)
            self._write_or_warn("'%s' is committed; the pointer does not say so: %s", tag)

    def point_away(self, tag: str, stored: Stored) -> None:
        """Makes another checkpoint the newest, where this one is about to be deleted.

        It logs a failure: the next resume asks for what the pointer names.
        """
        with self._own():
            if self._pointer is None or self._pointer.tag != tag:
                return  # another was committed meanwhile
            self._pointer = _pointer_to(stored, max(self._pointer.order, stored.order))
            self.known = self._pointer
            self._write_or_warn("'%s' is to be deleted; the pointer still names it: %s", tag)

    def _write_or_warn(self, text: str, tag: str) -> None:
        try:
            self._write(ended=tag)
        except DcpxError as error:  # a store may not say whether it is done
            logger.warning(text, tag, error)

    def _write(self, ended: str = "") -> None:
        number = None
        refuse_users_pointer(self.path)
        while number != self._writes:  # a signal's handler may have written a later one meanwhile
            number = self._writes = self._writes + 1
            committing = tuple(tag for tag in self.being_committed if tag != ended)
            damaged = tuple(sorted(self._damaged))
            pointer = (self._pointer or Pointer())._replace(committing=committing, damaged=damaged)
            self.files.write(pointer._replace(**self.runs._asdict()))


def _pointer_to(stored: Stored | None, order: int) -> Pointer:
    if stored is None:
        return Pointer(order=order)
    return Pointer(stored.tag, stored.step, stored.save_id, order)
