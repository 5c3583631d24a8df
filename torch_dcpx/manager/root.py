"""The directory that a manager keeps its checkpoints in, as one rank (the coordinator) sees it.

Which checkpoint is the newest:
1. What the pointer names, if it is whole and still that save; of what was committing when the
   pointer was written, whatever is whole and was committed later.
2. Else all directories are looked at once: the last commit that is whole; of checkpoints that no
   manager saved, and only where there are no others, the one with the highest step.
Directories that are skipped on the way are logged with the reason. Not thread-safe but for
`note_*`.
"""

from __future__ import annotations

import errno
import logging
import stat
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_dcpx.errors import DcpxError, NotCommittedError, StorageError
from torch_dcpx.manager.pointer import Pointer, is_own_name, is_tag, read_pointer, write_pointer
from torch_dcpx.manager.stored import Skipped, Stored, examine, identity_of
from torch_dcpx.options import ReadOptions
from torch_dcpx.storage.directory import Directory, fsync_path
from torch_dcpx.storage.names import TRASH_PREFIX

logger = logging.getLogger("torch_dcpx")

_MAX_SHOWN = 8


class ManagerRoot:
    """A root directory. `note_committing` and `note_committed` may come from several threads."""

    def __init__(self, path: Path, options: ReadOptions | None, *, is_durable: bool) -> None:
        """Looks at nothing yet.

        Args:
            path: the root; need not exist.
            options: of readers.
            is_durable: whether what is written here is fsynced.
        """
        self.path = path
        self.is_durable = is_durable
        self._options = options
        self.commit_guard = threading.Lock()  # one commit at a time: the pointer follows each
        self._guard = threading.RLock()
        self._pointer: Pointer | None = None  # as this process has written or found it
        self._committing: list[str] = []
        self._next_order = 0
        self._known: dict[str, tuple[object, Stored]] = {}
        self._damaged: set[str] = set()  # saves, by their ids
        self._warned: dict[str, str] = {}  # why a tag was skipped, since the last `newest`

    # ---- Looking -------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Returns the names in the root, none where it does not exist. Raises: StorageError."""
        try:
            with Directory(self.path) as directory:
                return directory.names()
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return []
            raise

    def directories(self) -> list[str]:
        """Returns the names in the root that may be checkpoints' (no links)."""
        found: list[str] = []
        for name in filter(is_tag, self.names()):
            try:
                mode = (self.path / name).lstat().st_mode
            except OSError:
                continue  # removed meanwhile
            if stat.S_ISDIR(mode):
                found.append(name)
        return found

    def examined(self, tag: str) -> Stored:
        """Returns a checkpoint that is whole; one that has not changed keeps its record.

        Raises:
            DcpxError: it is not whole, and why.
        """
        path = self.path / tag
        identity = identity_of(path)
        with self._guard:
            known = self._known.get(tag)
        if known is not None and identity is not None and known[0] == identity:
            return known[1]
        stored = examine(path, self._options)
        with self._guard:
            if identity is not None:
                self._known[tag] = identity, stored
        return stored

    def note_damaged(self, tag: str) -> None:
        """Notes that bytes of a checkpoint are wrong, though its sizes are right."""
        with self._guard:
            known = self._known.get(tag)
            if known is not None:  # on the coordinator
                self._damaged.add(known[1].save_id)

    def tell_damaged(self) -> None:
        """Notes the damaged saves in the pointer for later jobs, unless they are there already.

        The pointer names the newest as before, and none where there was no pointer: this may be a
        job that only reads, beside one that saves. A failure is logged: later jobs see the damage
        themselves.
        """
        with self._guard:
            try:
                found = read_pointer(self.path) or Pointer(None, None, None, 0)
                damaged = tuple(sorted(self._damaged))
                if damaged != found.damaged:
                    pointer = found._replace(damaged=damaged)
                    write_pointer(self.path, pointer, is_durable=self.is_durable, is_alone=False)
            except DcpxError as error:
                logger.warning(
                    "later jobs are not told what is damaged beneath '%s': %s", self.path, error
                )

    @property
    def damaged(self) -> frozenset[str]:
        """Ids of the saves in which a resume has read wrong bytes, and which are still there."""
        with self._guard:
            return frozenset(self._damaged)

    def forget(self, tag: str) -> None:
        """Says that a checkpoint is gone, or may have changed."""
        with self._guard:
            self._known.pop(tag, None)

    def listed(self) -> tuple[list[Stored], list[tuple[str, str]]]:
        """Returns all whole checkpoints, the newest first, and why others are skipped."""
        stored: list[Stored] = []
        skipped: list[tuple[str, str]] = []
        for tag in self.directories():
            try:
                stored.append(self.examined(tag))
            except DcpxError as error:
                skipped.append((tag, _reason(error)))
        stored.sort(key=lambda found: found.rank_among, reverse=True)
        with self._guard:
            self._damaged &= {found.save_id for found in stored}
        return stored, skipped

    def newest(self) -> tuple[Stored | None, Skipped]:
        """Looks for the newest whole checkpoint, and goes on from there.

        Returns:
            The checkpoint, None where nothing is whole; and the directories passed on the way.

        Raises:
            StorageError: the root cannot be listed.
        """
        self._known.clear()
        skipped: list[tuple[str, str]] = []
        try:
            pointer = read_pointer(self.path)
        except DcpxError as error:
            if isinstance(error, StorageError) and error.errno == errno.ENOTDIR:
                raise
            logger.warning("the pointer to the newest checkpoint is of no use: %s", error)
            pointer = None
        if pointer is not None:
            with self._guard:
                self._damaged.update(pointer.damaged)
        stored = None if pointer is None else self._pointed(pointer, skipped)
        order = 0 if pointer is None else pointer.order
        if stored is None:
            found, skipped = self.listed()
            order = max([order, *(each.order for each in found)])
            stored = found[0] if found else None
        self._warned.clear()
        self._warn(skipped)
        with self._guard:
            order = max(order, 0 if stored is None else stored.order)
            self._next_order = max(self._next_order, order + 1)
            if self._pointer is None or order >= self._pointer.order:  # else one was committed now
                self._pointer = _pointer_to(stored, order)
        return stored, tuple(skipped)

    def newest_but(self, passed: Collection[str]) -> tuple[Stored | None, Skipped]:
        """As `newest`, of all directories but these tags; notes nothing of what it finds."""
        found, skipped = self.listed()
        self._warn(skipped)
        return next((each for each in found if each.tag not in passed), None), tuple(skipped)

    def _warn(self, skipped: Iterable[tuple[str, str]]) -> None:
        """Says why checkpoints are skipped, unless that was the last word on them."""
        for tag, reason in skipped:
            if self._warned.get(tag) != reason:
                self._warned[tag] = reason
                logger.warning("skipped checkpoint '%s' beneath '%s': %s", tag, self.path, reason)

    def _pointed(self, pointer: Pointer, skipped: list[tuple[str, str]]) -> Stored | None:
        """Returns the newest checkpoint that the pointer names; None where none is whole."""
        found: list[Stored] = []
        for tag in dict.fromkeys((*pointer.committing, pointer.tag)):
            if tag is None or tag in self._committing:  # by this process, at this moment
                continue
            try:
                stored = self.examined(tag)
            except DcpxError as error:
                skipped.append((tag, _reason(error)))
                continue
            is_same = tag == pointer.tag and stored.save_id == pointer.save_id
            if is_same or stored.order > pointer.order:
                found.append(stored)
        return max(found, key=lambda each: each.order, default=None)

    def check_fresh(self, skipped: Skipped) -> None:
        """Raises NotCommittedError where the root, of which nothing is whole, is not empty."""
        names = [name for name in self.names() if not is_own_name(name)]
        names = [name for name in names if not name.startswith(TRASH_PREFIX)]
        if not names:
            return
        reasons = dict(skipped)
        shown = [f"'{name}' ({reasons.get(name, 'no checkpoint')})" for name in names[:_MAX_SHOWN]]
        more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
        raise NotCommittedError(
            f"resume from '{self.path}': of {len(names)} entries none is a whole checkpoint: "
            f"{', '.join(shown)}{more}; allow_fresh=True starts anew all the same",
            errno=errno.ENOENT,
            path=str(self.path),
        )

    # ---- Commits -------------------------------------------------------------------------------

    def take_order(self) -> int:
        """Returns the next commit's number; looks for the newest checkpoint first, where the
        pointer is not as this process has left it: another job was here."""
        if self._pointer is None or not self._is_own_pointer():
            self.newest()
        with self._guard:
            order, self._next_order = self._next_order, self._next_order + 1
        return order

    def _is_own_pointer(self) -> bool:
        with self._guard:
            try:
                found = read_pointer(self.path)
            except DcpxError:
                return False
            own = self._pointer
            return own is not None and found is not None and found[:4] == own[:4]

    @property
    def newest_tag(self) -> str | None:
        """The tag of the newest checkpoint, as this process knows."""
        with self._guard:
            return None if self._pointer is None else self._pointer.tag

    @contextmanager
    def committing(self, tag: str) -> Iterator[None]:
        """Notes durably that a commit begins, and afterwards that its checkpoint is the newest.

        Raises:
            StorageError: the first could not be written: nothing is to be committed.
        """
        with self._guard:
            self._committing.append(tag)
            self.forget(tag)
            try:
                self._write()
            except BaseException:
                self._committing.remove(tag)
                raise
        try:
            yield
        finally:
            with self._guard:
                self._committing.remove(tag)

    def note_committed(self, tag: str, step: int, save_id: str, order: int) -> None:
        """Points to a checkpoint that is committed, unless a later one was.

        A failure is logged: the pointer before says where to look.
        """
        with self._guard:
            if self._pointer is None or order >= self._pointer.order:
                self._pointer = Pointer(tag, step, save_id, order)
            still = [other for other in self._committing if other != tag]
            self._write_or_warn("'%s' is committed; the pointer does not say so: %s", tag, still)

    def point_away(self, tag: str, stored: Stored) -> None:
        """Makes an older checkpoint the newest where the newest was just deleted.

        A failure is logged: a pointer to a checkpoint that is gone costs a listing.
        """
        with self._guard:
            if self._pointer is None or self._pointer.tag != tag:
                return  # another was committed meanwhile
            self._pointer = _pointer_to(stored, max(self._pointer.order, stored.order))
            self._write_or_warn("'%s' is deleted; the pointer still names it: %s", tag)

    def _write_or_warn(self, text: str, tag: str, committing: list[str] | None = None) -> None:
        try:
            self._write(committing)
        except StorageError as error:
            logger.warning(text, tag, error)

    def _write(self, committing: list[str] | None = None) -> None:
        tags = self._committing if committing is None else committing
        pointer = (self._pointer or Pointer(None, None, None, 0))._replace(
            committing=tuple(tags), damaged=tuple(sorted(self._damaged))
        )
        write_pointer(self.path, pointer, is_durable=self.is_durable)

    def sync(self) -> None:
        """Makes the root's entries durable. Raises: StorageError."""
        if self.is_durable:
            fsync_path(self.path)


def _pointer_to(stored: Stored | None, order: int) -> Pointer:
    if stored is None:
        return Pointer(None, None, None, order)
    return Pointer(stored.tag, stored.step, stored.save_id, order)


def _reason(error: DcpxError) -> str:
    return f"{type(error).__name__}: {error}"
