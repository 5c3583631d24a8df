"""The locks of one save, and whose leftovers they allow it to remove.

The coordinator of all ranks holds the directory's lock. Without collectives every rank shares that
lock and holds one of its own. Followers hold none.
"""

from __future__ import annotations

from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.names import LOCK_NAME, rank_lock_name
from torch_dcpx.storage.running_save import RunningSave
from torch_dcpx.storage.save_lock import SaveLock
from torch_dcpx.writer.commit import Leftovers, remove_replaced


class SaveLocks:
    """None to begin with; taken once a save, released in the end. Not thread-safe."""

    def __init__(self) -> None:
        self._locks: list[SaveLock] = []
        self._rank: int | None = None  # whose lock of its own is among them

    def take(self, directory: Directory, save: RunningSave, rank: int | None = None) -> None:
        """Takes the directory's lock, or with `rank` both of that rank. Raises as `SaveLock`."""
        self._rank = rank
        self._locks.append(SaveLock(directory, LOCK_NAME, save, is_shared=rank is not None))
        if rank is not None:
            self._locks.append(SaveLock(directory, rank_lock_name(rank), save))

    def release(self, *, has_ended_well: bool) -> None:
        """Gives all back; safe to call twice."""
        while self._locks:
            self._locks.pop().release(has_ended_well=has_ended_well)

    @property
    def are_held(self) -> bool:
        """Whether they keep others out: some file systems have no locks."""
        return bool(self._locks) and all(lock.is_held for lock in self._locks)

    @property
    def found_unended(self) -> bool:
        """Whether a save of any machine took them before and did not end."""
        return any(lock.left_by != "nobody" for lock in self._locks)

    def leftovers_of(self) -> Leftovers:
        """Returns whose leftovers may go: nobody's while another save may be running."""
        if not self.are_held or any(lock.left_by == "another machine" for lock in self._locks):
            return "nobody"
        return "everybody" if self._rank is None else self._rank

    def tidy(self, directory: Directory, name: str, *, is_durable: bool) -> None:
        """Removes leftovers of a save that did not end well: this one may need the room.

        Args:
            directory: of this save; it was there before.
            is_durable: make the directory of a new checkpoint durable.

        Raises StorageError: the directory cannot be read or synced; nothing was removed.
        """
        if not self._locks:
            return
        if name in directory.names():
            if any(lock.left_by == "this machine" for lock in self._locks):
                # A killed save may have renamed the metadata without an fsync: the files that it
                # replaced must not go while a power cut could bring the old metadata back.
                if is_durable:
                    directory.sync()
                remove_replaced(directory, set(), self.leftovers_of())
        elif is_durable:
            directory.sync_parent()  # of a new checkpoint, in a directory that somebody else made
