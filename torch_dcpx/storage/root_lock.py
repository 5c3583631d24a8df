"""One job at a time saves beneath a manager's root: it holds the root from its first save on.

Whether a holder lives is proved where that can be: by its pid, or by its flock, on this machine.
Anywhere else it must renew its record: who waits sees that by its own clock, and takes the root
from one that has not renewed it for `_GONE_S`. One that was stopped for so long, and goes on, finds
the record of another before it commits.

The managers of one process share the root. Each root that the process holds has a thread that
renews its record: a store that does not answer keeps no other root from its renewal.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from torch_dcpx._answers import BOUND, StorageTimeout, wait_at_most
from torch_dcpx._waiting import Deadline, Guard
from torch_dcpx.errors import ConcurrentSaveError, StorageError
from torch_dcpx.storage.holder import Holder, now_text
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.root_record import RootRecord, Seen

logger = logging.getLogger("torch_dcpx")

_RENEW_S = 10.0
_GONE_S = 45.0  # without a renewal: several are late where an interpreter is held up
_ENDING_S = 10.0  # for one that lives, but may be about to end
_LIMIT_S = 60.0  # of all waiting
_JOIN_S = 5.0

_guard = Guard()  # of what follows; never held while a file or a store is asked
_held: dict[object, _Held] = {}  # by the roots' keys
_over: list[_Held] = []  # given back, and not told so yet: their threads do it
_tokens: set[str] = set()  # of this process: held, or about to be
_taking: set[tuple[object, int]] = set()  # roots, and the threads that wait for them
_watches: dict[object, _Watch] = {}  # the last ones that ended in vain


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # runs while the machine sleeps, too


class _Held:
    """A root that this process holds."""

    def __init__(self, record: RootRecord, holder: Holder, began_s: float) -> None:
        self.record, self.holder = record, holder
        self.shares: set[int] = set()
        self.is_lost = False
        self._renewed_s = began_s
        self._stop: SimpleQueue[None] = SimpleQueue()  # an Event's lock: not at any line
        self._thread = threading.Thread(target=self._keep, name="dcpx-root", daemon=True)

    def begin_to_renew(self) -> None:
        """Starts the thread. Not under `_guard`: the new one may collect a manager at once."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the interpreter ends
            logger.warning("no thread to renew the lock of '%s': %s", self.path, error)

    def _keep(self) -> None:
        has_warned = False
        while self._waits():
            BOUND.set(StorageTimeout(_GONE_S, "renewal_s"))  # of each: one had no answer, perhaps
            if _is_taken_out(self):
                self.end()
                return
            try:
                if not self.renew():
                    logger.error("another job has taken '%s': saves here are refused", self.path)
                    return
            except StorageError as error:
                if not has_warned:
                    text = "'%s': the record of its holder is not renewed: %s"
                    logger.warning(text, self.path, error)
                has_warned = True

    def _waits(self) -> bool:
        """Waits until the next renewal. Returns False where the thread is to end."""
        with suppress(Empty):
            self._stop.get(timeout=_RENEW_S)
            return False
        return True

    def stop(self, deadline: Deadline | None = None) -> None:
        """Ends the thread, and waits for that until the deadline, if there is one."""
        self._stop.put(None)
        if deadline is not None and self._thread.is_alive():
            self._thread.join(deadline.sooner(_JOIN_S).remaining_s)

    def renew(self) -> bool:
        """Writes the record anew, or its end. Returns whether it was still this process'."""
        while not self.is_lost:
            began_s, holder = _now_s(), self.holder
            text = holder.renewed if holder.is_over else now_text()
            is_ours = self.record.put(holder._replace(renewed=text))
            if not is_ours and (holder.is_over or not self._again()):
                self.is_lost = True
                break
            self._renewed_s = began_s
            if self.holder is holder:  # else another thread, or a handler, has ended it meanwhile
                break
        return not self.is_lost

    def _again(self) -> bool:
        """Takes a root again whose record is gone: somebody has removed it, and made no other. Or
        finds it, where a look has missed it.
        """
        seen = self.record.look()
        if seen.holder is not None and seen.holder.token == self.holder.token:
            return True
        return seen.version is None and self.record.take(seen, self.holder) is not None

    def is_ours(self) -> bool:
        """Returns whether this process still holds the root. Raises: StorageError."""
        if self.is_lost or (self.record.is_dear and _now_s() - self._renewed_s < _GONE_S / 2):
            return not self.is_lost  # nobody takes a root that was renewed just now
        return self.renew()

    def end(self) -> None:
        """Gives the root back; logs a failure: the next holder has to wait."""
        self.holder = self.holder._replace(is_over=True)
        try:
            self.renew()
        except StorageError as error:
            logger.warning("'%s' still names this process as its holder: %s", self.path, error)
        self.drop()

    def drop(self) -> None:
        """Gives up what proves that this process holds it."""
        self.stop()
        self.record.close()
        _tokens.discard(self.holder.token)

    @property
    def path(self) -> str:
        return str(self.record.path)


class RootLock:
    """The share of one manager in its root. Given back by `give_back`, by garbage collection and by
    the end of the process; a forked child has none.
    """

    def __init__(self, path: Location, opened: Callable[[], RootRecord]) -> None:
        """Takes nothing yet. `opened` makes the root if it must, and returns its record."""
        self.path = path
        self._opened = opened
        self._held: _Held | None = None
        weakref.finalize(self, _give_back, id(self), is_collected=True).atexit = False

    @property
    def is_held(self) -> bool:
        """Whether this manager has a share, as far as it knows."""
        return self._held is not None and id(self) in self._held.shares

    def take(self, timeout_s: float) -> bool:
        """Takes the root, or a share in it; does nothing where it has one. Returns whether the
        process had none before.

        It waits up to a minute, and no longer than `timeout_s`.

        Raises:
            ConcurrentSaveError: another process holds it; `owner` names it. Nothing was written.
            StorageError: the root or the record cannot be made, read or written.
        """
        record = self._opened()
        _end_collected()
        if self.is_held and self._held is not None and self._held.record.key != record.key:
            self.give_back()  # the directory was removed, and made anew
        if self._shares(record.key):
            return False
        taker = record.key, threading.get_ident()
        if taker in _taking:
            raise ConcurrentSaveError(
                f"save beneath '{self.path}': the call that this signal's handler has interrupted "
                "waits for the root: save when that call has returned",
                errno=errno.EBUSY,
                path=str(self.path),
            )
        _taking.add(taker)
        try:
            watch = _Watch(record, Deadline(min(timeout_s, _LIMIT_S)))
            while not self._shares(record.key):
                _watches[record.key] = watch
                seen = watch.free()
                if seen is not None:
                    self._take(record, seen)
        except BaseException:
            _give_back(id(self), taken=self._held)
            raise
        finally:
            _taking.discard(taker)
        return True

    def _shares(self, key: object) -> bool:
        """Takes a share in what this process holds. Returns False where it holds nothing."""
        held = _held.get(key)
        if held is None:
            return False
        is_ours = held.is_ours()
        with _guard.held():
            if is_ours and _held.get(key) is held:
                held.shares.add(id(self))
                self._held = held
                return True
            _forget(key, held)
        held.drop()
        return False

    def _take(self, record: RootRecord, seen: Seen) -> None:
        holder, began_s = Holder.own(record.identity), _now_s()
        _tokens.add(holder.token)
        taken = None
        try:
            taken = record.take(seen, holder)
        finally:
            if taken is None:
                _tokens.discard(holder.token)
        if taken is not None:
            _watches.pop(record.key, None)
            held = _Held(record, taken, began_s)
            with _guard.held():
                _held[record.key] = self._held = held
            held.begin_to_renew()

    def check(self) -> None:
        """Looks whether the root is still this process', as a save is about to commit.

        Raises:
            ConcurrentSaveError: another has taken it, or it was given back.
            StorageError: that is not known.
        """
        held = self._held
        if held is None or not self.is_held:
            why, owner = "the manager was closed meanwhile", None
        elif not held.is_ours():
            found = held.record.look().holder
            owner = "unknown" if found is None else str(found)
            why = f"another job's manager has taken the root ({owner}) from this silent process"
        else:
            return
        raise ConcurrentSaveError(
            f"save beneath '{self.path}': {why}; nothing is committed: end one of the jobs, or "
            "give each a root of its own",
            errno=errno.ESTALE,
            path=str(self.path),
            owner=owner,
        )

    def give_back(self) -> None:
        """Gives the share back; the last one of the process gives the root back. Safe to call
        twice.
        """
        _give_back(id(self))
        self._held = None


def _give_back(share: int, *, is_collected: bool = False, taken: _Held | None = None) -> None:
    # What was just taken has no share yet.
    for key, held in [(k, h) for k, h in list(_held.items()) if share in h.shares or h is taken]:
        with _guard.held():
            held.shares.discard(share)
            if held.shares or _held.get(key) is not held:
                continue
            is_later = is_collected and held.record.is_dear  # no request at any line
            if is_later:
                _over.append(held)
            _forget(key, held)
        if not is_later:
            held.end()


def _forget(key: object, held: _Held) -> None:
    """Drops a root from the table. REQUIRES: _guard."""
    if _held.get(key) is held:
        del _held[key]


class _Watch:
    """Watches the holder of a root until it is gone, and goes on where the watch before ended."""

    _state, _silent_s = object(), 0.0  # of a first watch

    def __init__(self, record: RootRecord, deadline: Deadline) -> None:
        self._record, self._deadline = record, deadline
        before = _watches.get(record.key, self)
        self._state, self._silent_s = before._state, before._silent_s  # as far as it was watched
        self._looked = deadline.anew()
        self._renewals = -1 if before is self else 0
        self._has_logged = False

    def free(self) -> Seen | None:
        """Returns what may be replaced now, or waits a little and returns None.

        Raises ConcurrentSaveError: the holder lives, or has not been gone for long enough.
        """
        seen = self._record.look()
        holder = seen.holder
        if seen.version is None or (holder is not None and holder.is_over):
            return seen
        if seen.state != self._state:
            self._state, self._silent_s = seen.state, 0.0
            self._renewals += 1
        elif self._looked.waited_s > max(_RENEW_S, 2 * self._record.pause_s):
            self._silent_s = 0.0  # stopped itself, it has missed renewals
        else:
            self._silent_s += self._looked.waited_s
        self._looked = self._deadline.anew()
        fate = "unknown" if holder is None else _fate(holder, seen.is_locked, self._record)
        if fate == "gone":
            return seen
        owner = "unknown" if holder is None else str(holder)
        if fate == "unknown" and self._silent_s >= _GONE_S:
            text = "save beneath '%s': taken from %s, which gave no sign for %.0f s"
            logger.warning(text, self._record.path, owner, self._silent_s)
            return seen
        is_own = holder is not None and holder.is_this_process  # a thread has just taken it
        is_alive = not is_own and (fate == "alive" or self._renewals > 1)
        if self._deadline.has_passed or (is_alive and self._deadline.waited_s >= _ENDING_S):
            raise self._refused(owner)
        if not self._has_logged and not is_own:
            self._has_logged = True
            text = "save beneath '%s': %s holds it; waiting up to %.0f s for its end"
            logger.warning(text, self._record.path, owner, self._deadline.timeout_s)
        self._deadline.sleep(self._record.pause_s)
        return None

    def _refused(self, owner: str) -> ConcurrentSaveError:
        path, timeout_s = str(self._record.path), self._deadline.timeout_s
        more = ""
        if _ENDING_S < timeout_s < _GONE_S + 2 * self._record.pause_s:
            more = f"; one that gives no sign is taken for gone after {_GONE_S:.0f} s, and "
            more += f"save_timeout_s lets this save wait for {timeout_s:.0f} s; the next goes on"
        return ConcurrentSaveError(
            f"save beneath '{path}': another job's manager saves there ({owner}); after "
            f"{self._deadline.waited_s:.0f} s it has not ended: end that job, or close its "
            f"manager, or give this job a root of its own{more}",
            errno=errno.EWOULDBLOCK,
            path=path,
            owner=owner,
        )


def _fate(holder: Holder, is_locked: bool | None, record: RootRecord) -> str:
    if holder.is_of(record.identity) and holder.is_this_process:
        return "alive" if holder.token in _tokens else "gone"  # about to enter it in the table
    return holder.fate(is_locked, record.identity)


def _is_taken_out(held: _Held) -> bool:
    """Takes a root that was given back from those to be told so; False where another did."""
    with suppress(ValueError):
        _over.remove(held)
        return True
    return False


def _end_collected() -> None:
    """Gives back the roots in stores whose managers were collected."""
    while _over:
        with suppress(IndexError):  # another thread was faster
            _over.pop().end()


def end_all(deadline: Deadline, *, gives_back: bool) -> None:
    """Ends the threads as the interpreter ends; gives the roots back if nothing saves there."""
    for held in [*_held.values(), *_over]:
        held.stop(deadline)
    with wait_at_most(StorageTimeout(max(deadline.remaining_s, 1.0), "DCPX_EXIT_TIMEOUT_S")):
        _end_collected()
        for held in list(_held.values()) if gives_back else ():
            with _guard.held():
                _forget(held.record.key, held)
            held.end()


def _forget_parents_locks() -> None:
    """In a forked child: the roots are its parent's."""
    global _guard
    _guard = Guard()
    for held in _held.values():
        held.shares.clear()
        held.record.close()  # closing alone leaves the flock to the parent
    _held.clear()
    _over.clear()
    _taking.clear()
    _tokens.clear()


os.register_at_fork(after_in_child=_forget_parents_locks)
