"""The locks of one save, and whose leftovers they allow it to remove.

The coordinator of all ranks holds the directory's lock. Without collectives every rank shares that
lock and holds one of its own. Followers hold none.
"""

from __future__ import annotations

from torch_dcpx.options import WriteOptions
from torch_dcpx.storage.object_claim import ObjectClaim
from torch_dcpx.storage.place import Place
from torch_dcpx.storage.running_save import RunningSave
from torch_dcpx.storage.save_lock import SaveLock
from torch_dcpx.writer.commit import Leftovers, referenced_files, remove_replaced


class SaveLocks:
    """None to begin with; taken once a save, released in the end. Not thread-safe."""

    def __init__(self) -> None:
        self._locks: list[SaveLock | ObjectClaim] = []
        self._rank: int | None = None  # whose lock of its own is among them

    def take(
        self,
        place: Place,
        save: RunningSave,
        rank: int | None = None,
        options: WriteOptions | None = None,
    ) -> None:
        """Takes the place's lock, or with `rank` both of that rank. Raises as its `locks`."""
        self._rank = rank
        is_conditional = options is None or options.conditional_commit
        for lock in place.locks(save, rank, is_conditional=is_conditional):
            self._locks.append(lock)

    @property
    def last(self) -> SaveLock | ObjectClaim | None:
        """The lock that a commit needs."""
        return self._locks[-1] if self._locks else None

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

    def tidy(self, place: Place, name: str, *, is_durable: bool) -> None:
        """Removes leftovers of a save that did not end well: this one may need the room.

        Args:
            place: of this save; it was there before.
            is_durable: make the directory of a new checkpoint durable.

        Raises StorageError: the directory cannot be read or synced; nothing was removed.
        """
        if not self._locks or place.is_object:
            return
        if name in place.names():
            if any(lock.left_by == "this machine" for lock in self._locks):
                # A killed save may have renamed the metadata without an fsync: the files that it
                # replaced must not go while a power cut could bring the old metadata back.
                if is_durable:
                    place.sync()
                own = referenced_files(place, name)  # a later listing may leave the name out
                if own is not None:
                    remove_replaced(place, set(), self.leftovers_of(), {name: own})
        elif is_durable:
            place.sync_parent()  # of a new checkpoint, in a directory that somebody else made
