"""The rules that keep checkpoints, and the thread that removes the others.

Only committed checkpoints count that this manager's run has saved and that lie in their place: what
a user has copied, renamed or brought here stays. A commit begins a removal, and the next one waits
for it: beside the checkpoints to keep there is at most the save in flight. A pinned checkpoint
stays, and one with readers until the next removal. Where readers go on, a WARNING names them.
"""

from __future__ import annotations

import errno
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Literal, NamedTuple

from torch_dcpx._answers import or_at_most
from torch_dcpx._integers import plain_int
from torch_dcpx._last_jobs import end_of_wait
from torch_dcpx._waiting import Deadline, Guard
from torch_dcpx.checkpoint import pending as pending_saves
from torch_dcpx.errors import (
    ConcurrentSaveError,
    DcpxError,
    StorageError,
    UnsupportedError,
    must_be,
)
from torch_dcpx.manager.pointer import checked_step, refuse_users_pointer
from torch_dcpx.manager.removal import suppress_and_log
from torch_dcpx.manager.root import ManagerRoot
from torch_dcpx.manager.stored import Stored
from torch_dcpx.storage import root_lock, save_lock

logger = logging.getLogger("torch_dcpx")

_MANY_DEFERRALS = 3  # in a row, of one checkpoint: a WARNING at each such number


class KeepRules(NamedTuple):
    """The rules, of which each keeps checkpoints. The last commit stays; without a rule all do."""

    last: int | None
    every: int | None
    best: tuple[str, Literal["min", "max"], int] | None

    @classmethod
    def of(cls, last: Any, every: Any, best: Any) -> KeepRules:
        """Returns the rules. Raises OptionError: a value that cannot work."""
        last = None if last is None else checked_step(last, "keep_last", 1)
        every = None if every is None else checked_step(every, "keep_every", 1)
        if best is not None:
            is_triple = isinstance(best, (tuple, list)) and len(best) == 3
            metric, mode, count = best if is_triple else (None, None, None)
            count = plain_int(count)
            is_named = type(metric) is str and type(mode) is str and mode in ("min", "max")
            if not is_named or type(count) is not int or count < 1:
                raise must_be("keep_best", best, '(metric, "min" or "max", how many)')
            best = metric, mode, count
        return cls(last, every, None if best is None else tuple(best))

    @property
    def keep_all(self) -> bool:
        return self.last is None and self.every is None and self.best is None

    def condemned(
        self, stored: Iterable[Stored], pinned: Callable[[str], bool], damaged: Collection[str]
    ) -> list[Stored]:
        """Returns the checkpoints that no rule keeps, the oldest commit first.

        What is not this run's own stays, uncounted. Damaged saves (ids) take no good one's place:
        the rules count with and without them.
        """
        own = sorted((s for s in stored if s.is_ours), key=lambda s: s.order)
        good = [s for s in own if s.save_id not in damaged]
        if self.keep_all or not good:
            return []
        kept = self._kept(own) | self._kept(good)
        return [s for s in own if s.tag not in kept and not pinned(s.tag)]

    def _kept(self, own: Sequence[Stored]) -> set[str]:
        """Returns the tags that a rule keeps of at least one commit, the oldest first."""
        kept = {s.tag for s in own[-(self.last or 1) :]}
        if self.every is not None:
            kept |= {s.tag for s in own if s.step is not None and s.step % self.every == 0}
        if self.best is not None:
            kept |= _best(own, *self.best)
        return kept


def _best(own: Sequence[Stored], metric: str, mode: str, count: int) -> set[str]:
    """Returns the tags of the best by a metric; of equal ones, the later commits."""
    sign = 1 if mode == "max" else -1
    scored = [
        (sign * s.record.metrics[metric], s.order, s.tag)
        for s in own
        if s.record is not None and metric in s.record.metrics
    ]
    scored.sort(key=lambda row: row[:2], reverse=True)
    return {tag for _, _, tag in scored[:count]}


class Retention:
    """Removes checkpoints that no rule keeps. Thread-safe; lives on the coordinator."""

    def __init__(self, root: ManagerRoot, rules: KeepRules) -> None:
        self._root = root
        self._rules = rules
        self._thread: threading.Thread | None = None
        self._has_run = False
        self._has_warned = False  # of a metric that a save lacks
        self._is_ending = False
        _all.add(self)
        self._run_guard = Guard()  # held by the run that is under way
        self._going: frozenset[str] = frozenset()  # tags that it removes
        # Tags of saves under way. No lock: a signal's handler may save at any line, and each change
        # is one step of the interpreter.
        self._saves: list[str] = []
        root.is_busy = self._saves.__contains__  # no cycle: a dropped manager gives its root back
        self._deferrals: dict[str, int] = {}  # removals in a row, by save; the run's own

    @property
    def busy(self) -> frozenset[str]:
        """Tags that are being saved to."""
        return frozenset(self._saves)

    def reserve(self, tag: str) -> None:
        """Keeps a tag from removal until `free`, once for each save that begins there.

        It waits for a run that may be removing the checkpoint there.

        Raises, and reserves nothing:
            UnsupportedError: a link or a pinned checkpoint lies there, or the user's own under the
                name of the pointer.
            ConcurrentSaveError: the run does not end, or this is a signal's handler within it.
        """
        self._saves.append(tag)
        save_lock.managed.append(str(self._root.path / tag))
        try:
            refuse_users_pointer(self._root.path)
            if self._root.files.is_there(tag, "save"):
                doing = f"save '{self._root.path / tag}'"
                # A run sees the reserved tag before each removal.
                with nullcontext() if save_lock.is_at_locks() else self._one_run(doing):
                    self._refuse_going(tag)
                self.refuse_pinned(tag, "save")
        except BaseException:
            self.free(tag)
            raise

    def look_at_metrics(self, tag: str, metrics: Mapping[str, float]) -> None:
        """Warns once if a save lacks the metric by which the best are kept."""
        best = self._rules.best
        if best is not None and best[0] not in metrics and not self._has_warned:
            self._has_warned = True
            given = ", ".join(map(repr, metrics)) or "none"
            logger.warning(
                "keep_best: the save of '%s' has no number as metric '%s' (metrics that it has: "
                "%s), so it is never among the best; give save(metrics={'%s': value})",
                tag,
                best[0],
                given,
                best[0],
            )

    def free(self, tag: str) -> None:
        """Ends one `reserve` of a tag: its save has ended, well or not."""
        with suppress(ValueError):  # this rank may have reserved none
            self._saves.remove(tag)
            save_lock.managed.remove(str(self._root.path / tag))

    def _refuse_going(self, tag: str) -> None:
        """Raises ConcurrentSaveError in a signal's handler that has interrupted a removal there."""
        if tag in self._going:
            path = self._root.path / tag
            raise ConcurrentSaveError(
                f"save '{path}': the call that this signal's handler has interrupted removes what "
                "lies there: save under another name, or when that call has returned",
                errno=errno.EBUSY,
                path=str(path),
            )

    def _one_run(self, doing: str) -> AbstractContextManager[None]:
        """Keeps other threads from a run in the block. Raises ConcurrentSaveError: one does not
        end.
        """
        behind = f"a removal of old checkpoints beneath '{self._root.path}'"
        return self._run_guard.held(self._root.patience_s, doing, behind)

    def start(self) -> None:
        """Begins a run when the one under way has ended."""
        thread = threading.Thread(target=self.run, name="dcpx-retention", daemon=True)
        try:
            self.wait(self._root.patience_s)
            thread.start()
            self._thread = thread  # once it has started: `wait` joins it
        except (RuntimeError, TimeoutError) as error:
            logger.warning("no thread to remove old checkpoints: %s", error)

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the run that is under way, but for one that this thread itself is in, or that
        waits for this thread.

        Raises TimeoutError: it has not ended after `timeout_s`; None: as long as for a commit.
        """
        seconds = self._root.patience_s if timeout_s is None else timeout_s
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        if self._run_guard.is_own or save_lock.is_at_locks():
            return
        thread.join(min(seconds, threading.TIMEOUT_MAX))
        if thread.is_alive():
            problem = f"old checkpoints beneath '{self._root.path}' are still being removed"
            raise TimeoutError(f"after {seconds:g} s {problem}")

    def wait_for_run(self, doing: str) -> None:
        """Waits for the run that is under way. Raises ConcurrentSaveError: it does not end."""
        try:
            self.wait(self._root.patience_s)
        except TimeoutError as error:
            text = f"{doing}: {error}; wait for that, and try again"
            raise ConcurrentSaveError(text, errno=errno.ETIMEDOUT) from error

    def end(self, deadline: Deadline) -> None:
        """Waits, as the interpreter ends, for the run; at the deadline the run stops early."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(deadline.remaining_s)
            self._is_ending = thread.is_alive()
            if self._is_ending:
                thread.join(end_of_wait().remaining_s)
            if thread.is_alive():
                logger.error(
                    "the process ends while it removes old checkpoints beneath '%s': the next "
                    "commit goes on with it",
                    self._root.path,
                )

    def catch_up(self) -> None:
        """Waits; before this process' first commit, it also runs: an earlier job may not have.

        Raises: as `wait_for_run`.
        """
        self.wait_for_run(f"save beneath '{self._root.path}'")
        if not self._has_run:
            self.run()

    def run(self) -> None:
        """Removes the checkpoints that no rule keeps. Logs a failure: the next run tries again."""
        self._has_run = True
        root = self._root
        try:
            doing = f"remove old checkpoints beneath '{root.path}'"
            bound = or_at_most(root.patience_s, "save_timeout_s")  # before a commit, the save's
            with suppress_and_log(doing), self._one_run(doing), bound:
                root.files.tidy(lambda: self.busy, leftovers=not self._rules.keep_all)
                if not self._rules.keep_all:
                    self._remove_condemned()
        except Exception:
            logger.exception("old checkpoints beneath '%s' stay", root.path)

    def _remove_condemned(self) -> None:
        root = self._root
        newest = root.newest_tag
        stored, damaged = root.remembered()
        unkept = self._rules.condemned(stored, self._may_be_pinned, damaged)
        condemned = [each for each in unkept if each.tag != root.newest_tag]
        kept = [each for each in stored if each not in condemned]
        saves = {each.save_id for each in condemned}
        self._deferrals = {key: n for key, n in self._deferrals.items() if key in saves}
        if not condemned or not kept:
            return
        try:
            root.forget(kept[0].tag)
            root.examined(kept[0].tag)  # nothing goes while the newest is not whole
        except DcpxError as error:
            logger.warning("old checkpoints stay: the newest one is not whole: %s", error)
            return
        self._going = frozenset(saved.tag for saved in condemned)
        try:
            # A signal's handler may have saved to one of them since: its own run looks anew.
            for each in condemned if root.newest_tag == newest else ():
                if each.tag not in self.busy and not self._is_ending:
                    with suppress_and_log(f"remove '{each.path}'"):
                        self._remove(each)
        finally:
            self._going = frozenset()

    def _remove(self, stored: Stored) -> None:
        """Removes a checkpoint. Raises: as `remove_checkpoint`. Many deferrals are a WARNING."""
        try:
            self._root.remove(stored.tag)
        except ConcurrentSaveError as error:
            count = self._deferrals[stored.save_id] = self._deferrals.get(stored.save_id, 0) + 1
            if count % _MANY_DEFERRALS == 0:
                text = "'%s' stays: its removal was deferred %d times in a row: %s"
                logger.warning(text, stored.path, count, error)
            raise
        self._deferrals.pop(stored.save_id, None)
        logger.info("removed checkpoint '%s'", stored.path)

    def _may_be_pinned(self, tag: str) -> bool:
        try:
            return self._root.files.is_pinned(tag)
        except StorageError as error:
            logger.warning("'%s' stays, for it may be pinned: %s", self._root.path / tag, error)
            return True

    def refuse_pinned(self, tag: str, doing: str) -> None:
        """Raises UnsupportedError if a checkpoint is pinned. `doing` is the verb of the message."""
        if self._root.files.is_pinned(tag):
            way_out = ", or save under another name" if doing == "save" else ""
            raise UnsupportedError(
                f"{doing} '{self._root.path / tag}': it is pinned; unpin it first{way_out}"
            )


_all: weakref.WeakSet[Retention] = weakref.WeakSet()


def _end_all(deadline: Deadline) -> None:
    # A thread that is in C++ as the interpreter goes away ends the process by an abort.
    for retention in list(_all):
        retention.end(deadline)
    # A save that goes on at its deadline still holds its root.
    root_lock.end_all(deadline, gives_back=not pending_saves.count())


pending_saves.call_behind(_end_all)
