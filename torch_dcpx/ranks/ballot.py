"""The vote that ends a save: whether it is committed, in the background and without a collective.

1. Each rank whose files are durable sets `v/RANK` and adds 1 to `n`; the last one sets `wake`.
2. The coordinator sees `wake`, reads the votes, and claims the decision `a`: "committing".
3. A rank that failed, was cancelled, or whose time is up claims `a`: "error". One claim stands, so
   after an error nothing is ever committed.
4. The coordinator commits (one rename) and sets `outcome`. The others wait for it. If the commit
   failed, the coordinator looks at its storage, and the outcome says whether the rename may have
   happened all the same: then all ranks keep their files, also those that cannot see this storage.

A rank that waits in vain for the outcome, or loses the store, looks at the storage: if this save is
there, it was committed; else its outcome is unknown. Keys lie beneath `dcpx/NUMBER/ballot/`.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import OutcomeUnknownError, StoreLostError
from torch_dcpx.ranks.exchange import BALLOT, Exchange
from torch_dcpx.ranks.failures import RankFailure, error_of, from_rank

R = TypeVar("R")

logger = logging.getLogger("torch_dcpx")

_COMMITTING, _ERROR = "committing", "error"
_VOTES, _COUNT = f"{BALLOT}/v", f"{BALLOT}/n"
_WAKE, _DECISION, _OUTCOME = f"{BALLOT}/wake", f"{BALLOT}/a", f"{BALLOT}/outcome"
# How an outcome begins; after an unsure failure the save may be in the storage.
_COMMITTED, _FAILED, _UNSURE = b"+", b"-", b"?"


class Ballot:
    """One rank's part in the vote of one operation.

    `vote`, `fail` and `settle` come from one thread; `cancel` and `check` from any.
    """

    def __init__(self, exchange: Exchange, deadline: Deadline) -> None:
        """Sends nothing yet.

        Args:
            exchange: the operation; to be closed when this is settled.
            deadline: until when all ranks must have voted. It begins anew when this rank votes or
                fails, so that the time of its writes does not count.
        """
        self._exchange = exchange
        self._keys = exchange.keys
        self._deadline = deadline
        self._payload: object = None
        self._own_error: BaseException | None = None
        self._own_failure: RankFailure | None = None
        self._has_voted = False
        # Whether a commit may publish this rank's files, also after an error or an interrupt.
        self.may_be_committed = False
        self._is_unsure = False  # whether the coordinator's failed commit may be in the storage
        self._has_ended = False
        # Of _has_ended: then the keys may be gone. A signal's handler may cancel within a cancel.
        self._guard = threading.RLock()

    def vote(self, payload: object) -> None:
        """Votes: this rank's files are durable.

        The coordinator's commit gets `payload`. Raises what its pickling raises; the caller then
        calls `fail`. A lost store is an error of `settle`.
        """
        exchange = self._exchange
        packed = b"" if exchange.is_coordinator else pickle.dumps(payload)
        self._payload = payload
        self._has_voted = self.may_be_committed = True
        self._deadline = self._deadline.anew()
        try:
            vote = exchange.seal + packed
            self._keys.set(f"{_VOTES}/{exchange.rank}", vote, self._deadline)
            if self._keys.add(_COUNT, 1, self._deadline) == exchange.world_size:
                self._keys.set(_WAKE, b"full", self._deadline)
        except StoreLostError as error:
            logger.debug("settle will tell: %s", error)

    def fail(self, error: BaseException, phase: str | None = None) -> None:
        """Tells the others that this rank failed: nothing is committed. `settle` raises `error`."""
        if self._has_ended:
            return  # the others know
        failure = self._exchange.failure_of(error, phase)
        self._own_error, self._own_failure = error, failure
        self._deadline = self._deadline.anew()
        try:
            self.may_be_committed &= not self._abort(failure).startswith(_ERROR)
        except StoreLostError as lost:
            logger.warning("%s; the other ranks are not told of: %s", lost, failure.text)

    def cancel(self) -> bool:
        """Ends the vote with an error unless the coordinator commits already.

        Returns whether it came in time: then `settle` raises, on every rank, a RankError whose
        cause is a concurrent.futures.CancelledError. False, too, if the store does not answer.
        """
        with self._guard:
            return self._cancel(f"cancelled by rank {self._exchange.rank}", self._deadline)

    def leave(self, deadline: Deadline) -> None:
        """Cancels as this process ends, unless its files are durable and another rank commits.

        Waits for the store until the deadline, and a bit longer.
        """
        exchange = self._exchange
        if self._has_voted and not exchange.is_coordinator:
            return
        if self._guard.acquire(timeout=deadline.remaining_s):  # held where the store is silent
            try:
                self._cancel(f"the process of rank {exchange.rank} ends", deadline)
            finally:
                self._guard.release()

    def _cancel(self, why: str, by: Deadline) -> bool:
        """Returns whether it came in time. REQUIRES: _guard."""
        if self._has_ended:
            return False
        try:
            failure = self._exchange.failure_of(CancelledError(why))
            return self._abort(failure, by).startswith(_ERROR)
        except StoreLostError as lost:
            logger.warning("%s; the save is not cancelled", lost)
            return False

    def check(self) -> None:
        """Raises, during a long write, the error that has ended the vote; none after `settle`."""
        with self._guard:
            standing = None if self._has_ended else self._exchange.standing(BALLOT, self._deadline)
            if standing is not None and standing.startswith(_ERROR):
                raise self._exchange.error_in(BALLOT, standing, self._own_error)

    def settle(
        self, commit: Callable[[list[Any]], R], was_committed: Callable[[], bool]
    ) -> R | None:
        """Waits for the decision; the coordinator commits.

        Args:
            commit: called on the coordinator alone, with the payloads by rank, once all ranks have
                voted. Its result can be pickled.
            was_committed: returns whether the storage holds this very save, committed; raises if it
                cannot tell. Called only if the commit failed or the answer did not come.

        Returns the result of `commit`; None on a rank that found the save in the storage.

        Raises:
            DcpxError, RankError, RankLostError: on all ranks. The error of the rank that failed
                first (RankError: also if cancelled), or ranks did not vote by the deadline.
            OutcomeUnknownError: the save is not in the storage. The coordinator has decided to
                commit and was silent for another deadline, or the store was lost.
            StoreLostError: on the coordinator, before it has decided.
        """
        try:
            if self._exchange.is_coordinator:
                return self._coordinate(commit, was_committed)
            result: R | None = self._follow(was_committed)
            # Not after an error: then the coordinator may yet come and read it.
            self._keys.post_delete([f"{_VOTES}/{self._exchange.rank}"])
            return result
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt: the others need not wait
                self.fail(error)
            elif not isinstance(error, OutcomeUnknownError):
                self.may_be_committed = self._is_unsure
            self._exchange.note_failure(error)
            raise
        finally:
            with self._guard:
                self._has_ended = True
                self._own_error = None  # its traceback holds what was to be written

    # ---- The coordinator -----------------------------------------------------------------------

    def _coordinate(self, commit: Callable[[list[Any]], R], was_committed: Callable[[], bool]) -> R:
        try:
            payloads = self._all_votes()
            standing = self._exchange.propose(BALLOT, _COMMITTING, [], self._deadline)
        except BaseException as lost:
            if isinstance(lost, Exception) and not isinstance(lost, StoreLostError):
                raise  # of the decision
            # The claim may still arrive: a rank that finds it must not wait for an outcome.
            self._keys.post(_OUTCOME, _FAILED + pickle.dumps([self._exchange.failure_of(lost)]))
            if not isinstance(lost, Exception):
                raise
            if self._own_failure is not None:
                raise error_of([self._own_failure], self._own_error) from lost
            raise
        if standing.startswith(_ERROR):
            raise self._exchange.error_in(BALLOT, standing, self._own_error)
        outcome = b""
        try:
            self._exchange.note_phase("committing")
            result = commit(payloads)
            outcome = _COMMITTED + self._packed(result)
            self._publish(outcome)
        except BaseException as error:
            if outcome:  # an interrupt: the others are told all the same
                self._keys.post(_OUTCOME, outcome)
                raise
            failure = self._exchange.failure_of(error)
            self._publish_failure(failure, was_committed)
            if self._exchange.world_size == 1 or not isinstance(error, Exception):
                raise
            raise error_of([failure], error) from error
        return result

    def _publish_failure(self, failure: RankFailure, was_committed: Callable[[], bool]) -> None:
        """Tells the others that the commit failed, and whether its rename may have happened.

        An fsync or an interrupt may have come after the rename: only the storage shows that.
        """
        self._is_unsure = True
        try:
            self._is_unsure = was_committed()
        except Exception as error:  # noqa: BLE001 - the commit's own error is on its way
            logger.warning("whether the save is in the storage cannot be said: %r", error)
        finally:
            how = _UNSURE if self._is_unsure else _FAILED
            self._publish(how + pickle.dumps([failure]))

    def _all_votes(self) -> list[Any]:
        """Returns the payloads by rank; raises the error that has ended the vote instead."""
        exchange, keys, deadline = self._exchange, self._keys, self._deadline
        if exchange.wait(_WAKE, deadline, "the vote", _VOTES) is None:
            missing = exchange.missing(_VOTES)
            if missing:  # else the last one has come after all
                self._abort(exchange.lost_error(missing, deadline.waited_s, "the vote"))
        standing = exchange.standing(BALLOT, deadline)
        if standing is not None:
            raise exchange.error_in(BALLOT, standing, self._own_error)
        votes = keys.multi_get([f"{_VOTES}/{r}" for r in range(1, exchange.world_size)], deadline)
        try:
            opened = (exchange.opened(rank, vote) for rank, vote in enumerate(votes, 1))
            return [self._payload, *map(from_rank, opened)]
        except Exception as error:
            self.fail(error)
            standing = exchange.standing(BALLOT, deadline) or ""
            raise exchange.error_in(BALLOT, standing, error) from error

    def _publish(self, outcome: bytes) -> None:
        """Tells the others the outcome. A store that is lost by now does not change it."""
        try:
            self._keys.set(_OUTCOME, outcome, self._deadline.anew(0))
        except StoreLostError as lost:
            self._keys.post(_OUTCOME, outcome)  # should it come back
            logger.warning("%s; the other ranks look for the outcome in the storage", lost)

    @staticmethod
    def _packed(result: object) -> bytes:
        try:
            return pickle.dumps(result)
        except Exception:
            logger.exception("the save is committed; its result cannot be sent to other ranks")
            return pickle.dumps(None)

    # ---- The others ----------------------------------------------------------------------------

    def _follow(self, was_committed: Callable[[], bool]) -> Any:
        try:
            outcome = self._outcome()
        except StoreLostError as lost:
            if self._own_failure is not None:  # it never voted, so nothing is committed
                raise error_of([self._own_failure], self._own_error) from lost
            return self._looked_up(was_committed, str(lost), lost)
        if outcome is None:
            coordinator = "rank 0 decided to commit and gave no answer since"
            return self._looked_up(was_committed, coordinator, None)
        self._is_unsure = outcome.startswith(_UNSURE)
        if self._is_unsure or outcome.startswith(_FAILED):
            raise error_of(from_rank(outcome[1:]))
        return from_rank(outcome[1:])

    def _outcome(self) -> bytes | None:
        """Returns the coordinator's outcome; None if it decided and then was silent."""
        exchange, deadline = self._exchange, self._deadline
        if exchange.wait(_DECISION, deadline, "the vote", _VOTES) is None:
            missing = exchange.missing(_VOTES) or [0]
            self._abort(exchange.lost_error(missing, deadline.waited_s, "the vote"))
        standing = exchange.standing(BALLOT, deadline) or ""
        if standing.startswith(_ERROR):
            raise exchange.error_in(BALLOT, standing, self._own_error)
        answer_by = deadline.anew(deadline.remaining_s + deadline.timeout_s)
        return exchange.wait(_OUTCOME, answer_by, "the commit", _VOTES)

    def _looked_up(
        self, was_committed: Callable[[], bool], reason: str, cause: BaseException | None
    ) -> None:
        """Returns if the save is in the storage."""
        try:
            if was_committed():
                logger.warning("%s; this save is in the storage: it was committed", reason)
                return
        except Exception as error:  # noqa: BLE001 - raised as the cause
            cause = error
        raise OutcomeUnknownError(
            f"{self._exchange.who}: its outcome is unknown: {reason}; this save was not in the "
            "storage a moment ago. What is there is the previous checkpoint or this one, whole"
        ) from cause

    # ---- Both ----------------------------------------------------------------------------------

    def _abort(self, failure: RankFailure, by: Deadline | None = None) -> str:
        """Claims the decision for an error; returns the one that stands."""
        standing = self._exchange.propose(BALLOT, _ERROR, [failure], by or self._deadline)
        self._keys.set(_WAKE, b"fail", by or self._deadline)
        return standing
