"""The directory of a manager's checkpoints, as one rank (the coordinator) sees it.

The newest checkpoint is
1. the one that the pointer names, if it is whole and still that save; or, of the commits that had
   begun when the pointer was written, a later whole one;
2. else, of all directories, the last commit that is whole. Checkpoints that no manager saved count
   only where there are no others: the highest step.
The log names each directory that is skipped on the way, with the reason.
"""

from __future__ import annotations

import errno
import logging
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch_dcpx._text import counted
from torch_dcpx.errors import DcpxError, NotCommittedError, StorageError
from torch_dcpx.integrity.contents import open_checkpoint
from torch_dcpx.manager.pointer import (
    Pointer,
    is_tag,
    read_pointer,
    step_of_name,
    write_pointer,
)
from torch_dcpx.manager.stored import DataFiles, Skipped, Stored, examine, identity_of
from torch_dcpx.options import ReadOptions
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.names import (
    METADATA_NAME,
    POINTER_NAME,
    TRASH_PREFIX,
    is_of_checkpoint,
    is_pointer_temporary,
)

logger = logging.getLogger("torch_dcpx")

_MAX_SHOWN = 8
_LOST_AND_FOUND = "lost+found"


class ManagerRoot:
    """A root directory. Not thread-safe but for `committing` and `note_*`."""

    def __init__(
        self, path: Path, options: ReadOptions | None, *, is_durable: bool, given: str = ""
    ) -> None:
        """Reads nothing yet.

        Args:
            path: absolute.
            options: of readers.
            is_durable: whether to fsync the pointer and entries.
            given: the path in the user's words, for logs. Default: `path`.
        """
        self.path = path
        self.given = given or str(path)
        self.is_durable = is_durable
        self._options = options
        self.commit_guard = threading.Lock()  # one commit at a time: the pointer follows each
        self._guard = threading.RLock()
        self._pointer: Pointer | None = None  # as this process has written or read it
        self._committing: list[str] = []
        self._next_order = 0
        self._known: dict[str, tuple[object, Stored, DataFiles]] = {}
        self._damaged: set[str] = set()  # saves, by their ids
        self._warned: dict[str, str] = {}  # why a tag was skipped, since the last `newest`
        self.is_busy: Callable[[str], bool] = lambda _: False  # whether this job saves to a tag

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
            with suppress(OSError):  # removed meanwhile
                if stat.S_ISDIR((self.path / name).lstat().st_mode):
                    found.append(name)
        return found

    def examined(self, tag: str, *, looks_at_data: bool = True) -> Stored:
        """Returns `examine` of a tag, from memory where `.metadata` has not changed."""
        path = self.path / tag
        identity = identity_of(path)
        with self._guard:
            known = self._known.get(tag)
        if known is not None and known[0] == identity:
            if looks_at_data:
                with open_checkpoint(path) as directory:
                    known[2].check(directory)
            return known[1]
        stored, files = examine(path, self._options)
        if identity is not None:
            with self._guard:
                self._known[tag] = identity, stored, files
        return stored

    def note_damaged(self, tag: str) -> None:
        """Notes that bytes of a checkpoint are wrong."""
        with self._guard:
            known = self._known.get(tag)
            if known is not None:  # on the coordinator
                self._damaged.add(known[1].save_id)

    def tell_damaged(self) -> None:
        """Notes the damaged saves in the pointer for later jobs, unless they are there already.

        It changes nothing else there: this job may only read, beside one that saves. It logs a
        failure: later jobs see the damage themselves.
        """
        with self._guard:
            try:
                found = read_pointer(self.path) or Pointer()
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
        """Ids of the saves that are still there and in which a resume has read wrong bytes."""
        with self._guard:
            return frozenset(self._damaged)

    def forget(self, tag: str) -> None:
        """Notes that a checkpoint is gone, or may have changed."""
        with self._guard:
            self._known.pop(tag, None)

    def listed(self) -> tuple[list[Stored], Skipped]:
        """Returns all whole checkpoints, the newest first; and the others."""
        stored, skipped = self._whole(self.directories())
        with self._guard:
            self._damaged &= {found.save_id for found in stored}
        return stored, skipped

    def remembered(self) -> tuple[list[Stored], frozenset[str]]:
        """Returns all that is or was whole, the newest first, and ids of damaged and lost saves."""
        whole = {found.save_id for found in self.listed()[0]}
        stored, _ = self._whole(self.directories(), looks_at_data=False)
        lost = {found.save_id for found in stored} - whole
        return stored, self.damaged | lost

    def newest(self) -> tuple[Stored | None, Skipped]:
        """Returns and notes the newest whole checkpoint; and the others. Raises: StorageError."""
        self._known.clear()
        try:
            pointer = read_pointer(self.path) or Pointer()
        except DcpxError as error:
            if isinstance(error, StorageError) and error.errno == errno.ENOTDIR:
                raise
            logger.warning("the pointer to the newest checkpoint is of no use: %s", error)
            pointer = Pointer()
        with self._guard:
            self._damaged.update(pointer.damaged)
        found, skipped = self._pointed(pointer)
        if not found:
            found, skipped = self.listed()
        self._warned.clear()
        self._warn(skipped)
        stored = found[0] if found else None
        order = max([pointer.order, *(each.order for each in found)])
        with self._guard:
            self._next_order = max(self._next_order, order + 1)
            if self._pointer is None or order >= self._pointer.order:  # else one was committed now
                self._pointer = _pointer_to(stored, order)
        return stored, skipped

    def newest_but(self, passed: Collection[str]) -> tuple[Stored | None, Skipped]:
        """Returns the newest of all directories but these tags, as `newest`; notes nothing."""
        found, skipped = self.listed()
        self._warn(skipped)
        return next((each for each in found if each.tag not in passed), None), skipped

    def _warn(self, skipped: Skipped) -> None:
        """Logs why checkpoints are skipped, unless the last reason was the same."""
        for tag, reason in skipped:
            if self._warned.get(tag) != reason:
                self._warned[tag] = reason
                logger.warning("skipped checkpoint '%s' beneath '%s': %s", tag, self.path, reason)

    def _pointed(self, pointer: Pointer) -> tuple[list[Stored], Skipped]:
        """Returns `_whole` of the checkpoints that the pointer names."""
        tags = [tag for tag in dict.fromkeys((*pointer.committing, pointer.tag)) if tag is not None]
        # This process commits some of them at this moment.
        found, skipped = self._whole(tag for tag in tags if tag not in self._committing)
        own = (pointer.tag, pointer.save_id)
        return [s for s in found if (s.tag, s.save_id) == own or s.order > pointer.order], skipped

    def _whole(
        self, tags: Iterable[str], *, looks_at_data: bool = True
    ) -> tuple[list[Stored], Skipped]:
        """Returns the whole checkpoints among these, the newest first; and the others."""
        stored: list[Stored] = []
        skipped: list[tuple[str, str]] = []
        for tag in tags:
            try:
                stored.append(self.examined(tag, looks_at_data=looks_at_data))
            except DcpxError as error:
                if not self._is_foreign(tag) and not self.is_busy(tag):
                    skipped.append((tag, f"{type(error).__name__}: {error}"))
        stored.sort(key=lambda each: each.rank_among, reverse=True)
        return stored, tuple(skipped)

    def _is_foreign(self, name: str) -> bool:
        """Returns whether an entry of the root is neither a manager's nor perhaps a checkpoint."""
        path = self.path / name
        if name == _LOST_AND_FOUND:
            return True  # of the file system; only root may read it
        try:
            if not stat.S_ISDIR(path.stat().st_mode):
                return not is_of_checkpoint(name)
            with Directory(path) as directory:
                within = directory.names()
        except (OSError, DcpxError):
            return False  # a link that leads nowhere at the moment, or nobody may look
        if not within:  # where a save was killed before its first file
            return step_of_name(name) is None
        return not any(map(is_of_checkpoint, within))

    def check_fresh(self, skipped: Skipped) -> None:
        """Raises NotCommittedError where a root without a whole checkpoint may hold parts of one.

        Files and directories that no save has made do not count.
        """
        names = [n for n in self.names() if n != POINTER_NAME and not n.startswith(TRASH_PREFIX)]
        names = [n for n in names if not is_pointer_temporary(n) and not self._is_foreign(n)]
        if METADATA_NAME in names:
            raise NotCommittedError(
                f"resume from '{self.path}': it is a checkpoint itself; the root of a manager is "
                f"the directory above, here '{self.path.parent}'",
                errno=errno.ENOENT,
                path=str(self.path),
            )
        if names:
            reasons = dict(skipped)
            shown = [f"'{n}' ({reasons.get(n, 'no checkpoint')})" for n in names[:_MAX_SHOWN]]
            more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
            entries = counted(len(names), "entry", "entries")
            raise NotCommittedError(
                f"resume from '{self.path}': none of {entries} is a whole checkpoint: "
                f"{', '.join(shown)}{more}; CheckpointManager(..., allow_fresh=True) starts anew "
                "all the same",
                errno=errno.ENOENT,
                path=str(self.path),
            )

    def take_order(self) -> int:
        """Returns the next commit's number; looks for the newest first if another job was here."""
        with self._guard:
            own, found = self._pointer, None
            with suppress(DcpxError):
                found = own and read_pointer(self.path)
        if own is None or found is None or found[:4] != own[:4]:
            self.newest()
        with self._guard:
            order, self._next_order = self._next_order, self._next_order + 1
        return order

    @property
    def newest_tag(self) -> str | None:
        """The tag of the newest checkpoint, as far as this process knows."""
        with self._guard:
            return None if self._pointer is None else self._pointer.tag

    @contextmanager
    def committing(self, tag: str) -> Iterator[None]:
        """Notes durably that the block is about to commit. Raises StorageError: it cannot."""
        with self._guard:
            self._committing.append(tag)
            self.forget(tag)
        try:
            with self._guard:
                self._write()
            yield
        finally:
            with self._guard:
                self._committing.remove(tag)

    def note_committed(self, tag: str, step: int, save_id: str, order: int) -> None:
        """Points to a committed checkpoint, unless a later one was.

        It logs a failure: the pointer before still leads to the checkpoint.
        """
        with self._guard:
            if self._pointer is None or order >= self._pointer.order:
                self._pointer = Pointer(tag, step, save_id, order)
            self._write_or_warn("'%s' is committed; the pointer does not say so: %s", tag)

    def point_away(self, tag: str, stored: Stored) -> None:
        """Makes an older checkpoint the newest after the deletion of the newest.

        It logs a failure: a pointer to a checkpoint that is gone costs a listing.
        """
        with self._guard:
            if self._pointer is None or self._pointer.tag != tag:
                return  # another was committed meanwhile
            self._pointer = _pointer_to(stored, max(self._pointer.order, stored.order))
            self._write_or_warn("'%s' is deleted; the pointer still names it: %s", tag)

    def _write_or_warn(self, text: str, tag: str) -> None:
        try:
            self._write(ended=tag)
        except StorageError as error:
            logger.warning(text, tag, error)

    def _write(self, ended: str = "") -> None:
        committing = tuple(tag for tag in self._committing if tag != ended)
        damaged = tuple(sorted(self._damaged))
        pointer = (self._pointer or Pointer())._replace(committing=committing, damaged=damaged)
        write_pointer(self.path, pointer, is_durable=self.is_durable)


def _pointer_to(stored: Stored | None, order: int) -> Pointer:
    if stored is None:
        return Pointer(order=order)
    return Pointer(stored.tag, stored.step, stored.save_id, order)
