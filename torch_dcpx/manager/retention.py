"""Which checkpoints are kept, and the thread that removes the others.

Only committed checkpoints count, and only those that a manager has saved are ever removed. A run
begins behind a commit, in a thread of its own. The next commit waits for it, so that beyond the
checkpoints to keep there is at most the save in flight. A checkpoint that is pinned or being read
stays, and the next run tries again.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from torch_dcpx._waiting import Deadline
from torch_dcpx.checkpoint import pending as pending_saves
from torch_dcpx.errors import DcpxError, OptionError
from torch_dcpx.manager.pointer import check_step
from torch_dcpx.manager.removal import (
    remove_checkpoint,
    resume_removals,
    suppress_and_log,
)
from torch_dcpx.manager.root import ManagerRoot
from torch_dcpx.manager.stored import Stored, lies_there
from torch_dcpx.storage.names import PIN_NAME

logger = logging.getLogger("torch_dcpx")

_LAST_WAIT_S = 5.0  # of the interpreter, for one removal to end


class KeepRules(NamedTuple):
    """What is kept: the union of the rules, and always the last commit. No rule keeps all."""

    last: int | None
    every: int | None
    best: tuple[str, Literal["min", "max"], int] | None

    @classmethod
    def of(cls, last: Any, every: Any, best: Any) -> KeepRules:
        """Returns the rules. Raises OptionError: a value that cannot work."""
        for name, value in (("keep_last", last), ("keep_every", every)):
            if value is not None:
                check_step(value, name)
                if value == 0:
                    _refuse(name, value, "at least 1, or None")
        if best is not None:
            is_right = (
                isinstance(best, (tuple, list))
                and len(best) == 3
                and type(best[0]) is str
                and best[1] in ("min", "max")
                and type(best[2]) is int
                and best[2] >= 1
            )
            if not is_right:
                _refuse("keep_best", best, '(metric, "min" or "max", how many)')
            best = (best[0], best[1], best[2])
        return cls(last, every, best)

    @property
    def keep_all(self) -> bool:
        return self.last is None and self.every is None and self.best is None

    def condemned(
        self,
        stored: Iterable[Stored],
        pinned: Callable[[str], bool],
        damaged: Collection[str] = (),
    ) -> list[Stored]:
        """Returns what no rule keeps, the oldest commit first.

        Args:
            stored: whole checkpoints; those without a manager's record are kept.
            pinned: whether a tag is.
            damaged: ids of saves that are known to be. The rules are also applied as if these were
                not there, so that they take no good one's place. Default (): none.
        """
        own = sorted((s for s in stored if s.record is not None), key=lambda s: s.order)
        good = [s for s in own if s.save_id not in damaged]
        if self.keep_all or not good:
            return []
        kept = self._kept(own) | self._kept(good)
        return [s for s in own if s.tag not in kept and not pinned(s.tag)]

    def _kept(self, own: Sequence[Stored]) -> set[str]:
        """Returns the tags that a rule keeps of at least one commit, the oldest first."""
        kept = {s.tag for s in own[-(self.last or 1) :]}
        if self.every is not None:
            every = self.every
            kept |= {s.tag for s in own if s.step is not None and s.step % every == 0}
        if self.best is not None:
            kept |= {s.tag for s in _best(own, *self.best)}
        return kept


def _best(own: Sequence[Stored], metric: str, mode: str, count: int) -> list[Stored]:
    """Returns the best by a metric; of equal ones, the later commits."""
    sign = 1 if mode == "max" else -1
    scored = [
        (sign * s.record.metrics[metric], s.order, s)
        for s in own
        if s.record is not None and not math.isnan(s.record.metrics.get(metric, math.nan))
    ]
    scored.sort(key=lambda row: row[:2], reverse=True)
    return [s for _, _, s in scored[:count]]


def _refuse(name: str, value: Any, wanted: str) -> None:
    raise OptionError(f"{name} must be {wanted}, got {value!r:.80}", option=name, value=value)


class Retention:
    """Removes what is not kept, in the background. Thread-safe; lives on the coordinator."""

    def __init__(self, root: ManagerRoot, rules: KeepRules) -> None:
        self._root = root
        self._rules = rules
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_run = False
        self._is_ending = False
        _all.add(self)
        self._run_guard = threading.Lock()  # held by the run that is under way
        self._saves: Counter[str] = Counter()  # under way, by tag

    @property
    def busy(self) -> frozenset[str]:
        """Tags that are being saved to."""
        with self._guard:
            return frozenset(self._saves)

    def reserve(self, tag: str) -> None:
        """Keeps a tag from removal until `free`, as a save to it begins: once each.

        Where something lies there, a run that may be removing it is waited for.

        Raises:
            UnsupportedError: a link lies there; nothing is reserved.
        """
        with self._guard:
            self._saves[tag] += 1
        try:
            if lies_there(self._root.path / tag, "save"):
                with self._run_guard:
                    pass
        except BaseException:
            self.free(tag)
            raise

    def free(self, tag: str) -> None:
        """Says that a save to a tag has ended, whichever way."""
        with self._guard:
            self._saves[tag] -= 1
            if self._saves[tag] <= 0:  # this rank may have reserved none
                del self._saves[tag]

    def start(self) -> None:
        """Begins a run, behind one that is under way."""
        self.wait()
        thread = threading.Thread(target=self.run, name="dcpx-retention", daemon=True)
        with self._guard:
            self._thread = thread
        try:
            thread.start()
        except RuntimeError as error:
            with self._guard:
                self._thread = None
            logger.warning("no thread to remove old checkpoints: %s", error)

    def wait(self) -> None:
        """Waits for the run that is under way."""
        with self._guard:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def end(self, deadline: Deadline) -> None:
        """Waits for the run under way as the interpreter ends; late, it stops at the next one."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(deadline.remaining_s)
            self._is_ending = thread.is_alive()
            thread.join(_LAST_WAIT_S)
            if thread.is_alive():
                logger.error(
                    "the process ends while it removes old checkpoints beneath '%s': the next "
                    "commit goes on with it",
                    self._root.path,
                )

    def catch_up(self) -> None:
        """Waits, and before this process' first commit does what an earlier job left undone."""
        self.wait()
        if not self._has_run:
            self.run()

    def run(self) -> None:
        """Removes what no rule keeps. A failure is logged, and the next run tries again."""
        self._has_run = True
        root = self._root
        try:
            with self._run_guard, suppress_and_log(f"remove old checkpoints beneath '{root.path}'"):
                resume_removals(root, lambda: self.busy, leftovers=not self._rules.keep_all)
                if not self._rules.keep_all:
                    self._remove_condemned()
        except Exception:
            logger.exception("old checkpoints beneath '%s' stay", root.path)

    def _remove_condemned(self) -> None:
        root = self._root
        stored, _ = root.listed()
        condemned = self._rules.condemned(stored, self.is_pinned, root.damaged)
        condemned = [each for each in condemned if each.tag != root.newest_tag]
        if not condemned:
            return
        gone = {each.tag for each in condemned}
        newest = max((s for s in stored if s.tag not in gone), key=lambda s: s.order, default=None)
        try:
            if newest is None:
                return
            root.forget(newest.tag)
            root.examined(newest.tag)  # nothing goes while what stays is not whole
        except DcpxError as error:
            logger.warning("old checkpoints stay: the newest one is not whole: %s", error)
            return
        for each in condemned:
            if each.tag not in self.busy and not self._is_ending:
                with suppress_and_log(f"remove '{each.path}'"):
                    remove_checkpoint(root, each.tag)
                    logger.info("removed checkpoint '%s'", each.path)

    def is_pinned(self, tag: str) -> bool:
        """Whether a checkpoint carries the mark that keeps it."""
        return (self._root.path / tag / PIN_NAME).exists()


_all: weakref.WeakSet[Retention] = weakref.WeakSet()


def _end_all(deadline: Deadline) -> None:
    # A thread that is in C++ as the interpreter goes away ends the process by an abort.
    for retention in list(_all):
        retention.end(deadline)


pending_saves.call_behind(_end_all)
