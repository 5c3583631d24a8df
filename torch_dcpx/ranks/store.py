"""The ranks of a process group agree through its store, on the caller's thread.

DCP plans by collectives: a stopped rank holds all others for good, and a job on NCCL needs device
memory to plan. Here every wait has a deadline. The keys of one operation lie beneath
`dcpx/NUMBER/`, those of a step (store_step.py) beneath a number of its own.

Each process counts the numbers by itself, and every rank makes the same calls in the same order.
Ranks that do not are noticed, and meet again:

1. The values of the first step carry a digest of the call. If digests differ, all ranks raise
   PlanError. The coordinator's answer carries a random token, and all later values carry it too.
2. A rank may enter an operation that has failed before (a failure adds `FAILED` to `e`). It goes on
   to the next number if that was another call, or if the others gave it up for want of this rank.
   Nobody can tell to which of two saves of one name it comes: all ranks raise PlanError, once.
3. A rank that waits looks around. If a missing rank has gone on to the next number, it has left
   this operation without a word: the first step is void, and all go on to the next number.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch_dcpx._waiting import Clock, Deadline
from torch_dcpx.errors import RankLostError, StoreLostError
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.exchange import BALLOT, Exchange
from torch_dcpx.ranks.failures import RankFailure, error_of, from_rank, lost_ranks
from torch_dcpx.ranks.presence import UNKNOWN, Presence, differing, missed, of_call, presence_of
from torch_dcpx.ranks.store_client import StoreClient
from torch_dcpx.ranks.store_keys import StoreKeys
from torch_dcpx.ranks.store_step import ERROR, FAILED, FIRST, OK, VOID, Own, Step, left_keys

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger("torch_dcpx")

_LINGER_S = 2.0  # of a coordinator whose operation failed
_MAX_PHASES = 64  # lost ranks whose phase is looked up
_MAX_LEFT = 8  # operations that a rank has left without a word, one after the other


class StoreExchange(Exchange):
    """The ranks of a process group in one operation."""

    keys: StoreKeys

    def __init__(
        self,
        client: StoreClient,
        rank: int,
        world_size: int,
        timeout_s: float,
        what: str,
        call: CallId | None = None,
        clock: Clock = time,
    ) -> None:
        """Takes the operation's number from the group's client; `enter` comes next.

        Args: `rank` of this process among the group's `world_size`; the others as `Exchange`.
        """
        self._client = client
        self._number = client.next_number()  # before anything can fail
        self._call_number = client.next_call()
        super().__init__(timeout_s, what, call, clock)
        self.group = client.name
        self.rank = rank
        self.world_size = world_size
        self.keys = self._keys_of(self._number)
        self._name = uuid.uuid4().hex  # of this rank in this operation
        self._drawn = os.urandom(8)  # the coordinator's becomes the operation's
        self._token = b""  # of the operation, once it is agreed
        self._is_late = False  # it had failed when this rank entered
        self._has_missed = False  # a call of the same name
        self._steps = 0  # begun
        self._is_in_step = False
        self._has_contributed = False
        self._error: BaseException | None = None  # with which this operation has ended
        self._is_closed = False

    def _keys_of(self, number: int) -> StoreKeys:
        return StoreKeys(self._client, f"dcpx/{number}/", self.who, self.world_size)

    def entered(self) -> StoreExchange:
        """Enters, and returns itself. Tells the other ranks of an error on the way."""
        try:
            self.enter()
        except BaseException as error:
            self.fail(error)
            self.close()
            raise
        return self

    def enter(self) -> None:
        """Tells the other ranks that this one is there.

        Raises StoreLostError if the store does not answer, or holds this number already.
        """
        mine = self.presence().packed()
        if self.keys.claim(f"p/{self.rank}", mine, self.deadline) != mine:
            raise StoreLostError(
                f"{self.who}: the process group's store holds this operation already: left by an "
                "earlier group of the same name; the next operation works"
            )
        self._is_late = self.keys.add("e", 1, self.deadline) >= FAILED

    def _go_on(self) -> None:
        """Leaves this operation to the others, for the next number."""
        soon = self.deadline.anew(0)
        self.keys.delete([f"p/{self.rank}"], soon)
        self._leave(soon)
        self._number = self._client.next_number()
        self.keys = self._keys_of(self._number)

    def note_phase(self, phase: str) -> None:
        self.phase = phase
        self.keys.post(f"p/{self.rank}", self.presence().packed())

    def all_reduce(self, step: str, local: Callable[[], T], reduce: Callable[[list[T]], R]) -> R:
        prefix = str(self._steps)

        def answer(values: list[T]) -> R:
            result = reduce(values)
            self.keys.set(f"{prefix}/b/0", pickle.dumps(result), self.deadline)
            return result

        return self._agree(step, local, answer, lambda: from_rank(self.read(f"{prefix}/b/0")))

    def reduce_scatter(
        self, step: str, local: Callable[[], T], reduce: Callable[[list[T]], list[R]]
    ) -> R:
        prefix = str(self._steps)

        def answer(values: list[T]) -> R:
            pieces = self.checked_pieces(step, reduce(values))
            others = ((f"{prefix}/s/{r}", pickle.dumps(pieces[r])) for r in range(1, len(pieces)))
            self.keys.set_all(others, self.deadline)
            return pieces[0]

        def receive() -> Any:
            key = f"{prefix}/s/{self.rank}"
            piece = from_rank(self.read(key))
            self.keys.post_delete([key])
            return piece

        return self._agree(step, local, answer, receive)

    def fail(self, error: BaseException) -> None:
        if self._is_closed or self._error is not None:
            return
        failure = self.failure_of(error)
        self._error = error_of([failure], error)
        soon = self.deadline.anew(0)
        try:
            # The others may have got past the step that this rank has left.
            if self._is_in_step:
                left = Step(self, str(self._steps - 1), by=soon)
                left.fail(failure)
                if not self._has_contributed:
                    left.count()
                if self.is_coordinator:  # all may be waiting for its answer
                    self.propose(str(self._steps - 1), ERROR, [failure], soon)
            following = Step(self, str(self._steps), by=soon)
            following.fail(failure)
            following.count()
            self.propose(BALLOT, ERROR, [failure], soon)
            self.keys.set(f"{BALLOT}/wake", b"fail", soon)
        except StoreLostError as lost:
            logger.warning("%s; the other ranks are not told of: %s", lost, failure.text)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        soon = self.deadline.anew(0)
        try:
            self.keys.delete([f"p/{self.rank}"], soon)
            if self.is_coordinator and self._error is not None:
                self._linger(self._error)
            self._leave(soon)
        except StoreLostError as lost:
            logger.debug("keys are left in the store: %s", lost)

    def _linger(self, error: BaseException) -> None:
        """Stays until the others have read the error: the store may end with this process."""
        lost = error.ranks if isinstance(error, RankLostError) else None
        others = self.world_size - 1 - len(lost or ())
        lingering, soon = self.deadline.anew(_LINGER_S), self.deadline.anew(0)
        while self.keys.add("out", 0, soon) < others and not lingering.has_passed:
            lingering.sleep(0.005)

    # ---- For the vote, too ---------------------------------------------------------------------

    def propose(self, name: str, kind: str, failures: list[RankFailure], by: Deadline) -> str:
        stands = super().propose(name, kind, failures, by)
        if kind in (ERROR, VOID) and name != BALLOT:  # also for who comes when all have left
            self.keys.set(f"{name}/wake", b"fail", by)
            if name == FIRST:
                self.keys.add("e", FAILED, by)
        return stands

    def error_in(self, name: str, answer: str, own: BaseException | None) -> BaseException:
        failures = self.proposed(name, answer)
        if name == FIRST:  # those of this rank's call, if there are any
            error = own or differing(failures[0], self.rank, self.presence())
            call = self.call
            if not call.is_target_compared:  # who is in together may name it otherwise
                call = dataclasses.replace(call, target=None)
            failures = of_call(call, failures) or [self.failure_of(error)]
        is_own = min(failure.rank for failure in failures) == self.rank
        return error_of(failures, own if is_own else None)

    def _last_phases(self, ranks: Iterable[int]) -> list[tuple[int, str, str]]:
        lost: list[tuple[int, str, str]] = []
        for rank in ranks:
            is_known = len(lost) < _MAX_PHASES
            found = presence_of(rank, self.keys, self.deadline) if is_known else UNKNOWN
            lost.append((rank, found.host, found.phase))
        return lost

    def note_failure(self, error: BaseException) -> None:
        self._error = self._error or error

    def wait(self, key: str, deadline: Deadline, step: str, prefix: str) -> bytes | None:
        what = self.waiting(step)
        return self.keys.wait_looking(key, deadline, what, lambda: self.missed(prefix))

    def missed(self, prefix: str) -> list[int]:
        """Returns the missing ranks; a follower misses the coordinator only."""
        if self.is_coordinator:
            return self.missing(prefix)
        return [0] if self.keys.get(f"{prefix}/0", self.deadline) is None else []

    def waiting(self, step: str) -> str:
        """Returns the step and this rank, for messages: "'plan' of the save on rank 3 (node7)"."""
        return f"{step} of the {self.who}"

    # ---- A step --------------------------------------------------------------------------------

    def _agree(
        self,
        step: str,
        local: Callable[[], T],
        answer: Callable[[list[T]], R],
        receive: Callable[[], Any],
    ) -> R:
        """Makes a step. The coordinator calls `answer`, the others `receive`."""
        if self._error is not None:
            raise self._error
        name = str(self._steps)
        self._steps += 1
        self._is_in_step, self._has_contributed = True, False
        try:
            own = Own(local, is_sent=not self.is_coordinator)  # which keeps its own
            standing, result = self._answered(name, step, own, answer)
            while name == FIRST and self._is_to_pass(standing):
                self._steps, self._is_in_step = 0, False  # should it be interrupted meanwhile
                self._go_on()
                self.enter()
                if self._has_missed and self.call.is_write:
                    own.packed, own.error = b"", missed(self.call)
                self._steps, self._is_in_step, self._has_contributed = 1, True, False
                standing, result = self._answered(name, step, own, answer)
            if standing.startswith(ERROR):
                self._error = self.error_in(name, standing, own.error)
                raise self._error
            if name == FIRST:
                self._token = bytes.fromhex(standing.split()[2])
            return result if self.is_coordinator else receive()  # type: ignore[return-value]
        except BaseException as error:
            self.fail(error)  # unless all ranks know it already
            raise
        finally:
            self._is_in_step = False

    def _is_to_pass(self, standing: str) -> bool:
        """Returns whether the first step has ended, but not for this rank's call."""
        if not standing.startswith(ERROR):
            return standing.startswith(VOID)
        _, number, token = standing.split()
        if number.split(".")[0] == str(self.rank) and token != self._drawn.hex():
            return True  # left by this very rank, in an earlier group of the same name
        if not self._is_late:
            return False
        own = of_call(self.call, self.proposed(FIRST, standing))
        if own and all(self.rank in lost_ranks(failure) for failure in own):
            self._has_missed = True
            return True
        return not own

    def _answered(
        self, name: str, title: str, own: Own[T], answer: Callable[[list[T]], R]
    ) -> tuple[str, R | None]:
        """Returns the answer that stands, and on the coordinator the result of `answer`."""
        step = Step(self, name, title)
        step.tell(own)
        self._has_contributed = True
        if self.is_coordinator:
            return step.coordinate(own, answer)
        standing = step.follow()
        if standing.startswith(OK):  # else the coordinator may yet come and read it
            self.keys.post_delete([f"{name}/v/{self.rank}"])
        return standing, None

    @property
    def seal(self) -> bytes:
        """8 B: the digest of the call, then the operation's token once the ranks have agreed."""
        return self._token or self.call.digest

    def presence(self) -> Presence:
        """Returns this rank's note, of the calling thread."""
        thread, number, call = str(threading.get_ident()), str(self._call_number), self.call
        names = str(call), call.identity, call.compared
        return Presence(self.phase, self.host, self._name, thread, number, *names)

    def following_keys(self) -> list[StoreKeys]:
        """Returns the keys of the next operations: one of them holds a rank that left this one."""
        numbers = range(self._number + 1, self._number + 1 + _MAX_LEFT)
        return [self._keys_of(number) for number in numbers]

    def _leave(self, by: Deadline) -> None:
        """Counts this rank out; the last one removes the keys that are left."""
        if self.keys.add("out", 1, by) == self.world_size:
            self.keys.delete(left_keys(self, self._steps, self._error is not None, by), by)
