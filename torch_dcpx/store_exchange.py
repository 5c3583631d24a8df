"""What ranks agree on, on the caller's thread, through the process group's store.

DCP plans by collectives: a rank that is stopped holds all others for good, and a job on NCCL needs
device memory to plan. Here every wait has a deadline. The keys of one operation lie beneath
`dcpx/NUMBER/`; all ranks begin a group's operations in the same order, so the numbers agree. A step
(its keys lie beneath its own number):

1. Each rank sets `v/RANK` and adds 1 to `n`. The last one, and one that fails, sets `wake`.
2. The coordinator sees `wake`, reads the values, reduces them, sets the results, and claims `a`.
3. All others wait for `a`, which names the rank that set it and where to read on.

A rank whose time is up claims `a` itself, with an error that names who is missing. `a` is claimed
once, so that all ranks leave a step in the same way.
"""

from __future__ import annotations

import logging
import pickle
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from torch_dcpx.deadline import Deadline
from torch_dcpx.errors import RankLostError, StoreLostError
from torch_dcpx.exchange_base import BALLOT, Exchange, check_pieces, host_name
from torch_dcpx.rank_errors import RankFailure, error_of, from_rank, lost_error
from torch_dcpx.store_client import StoreClient
from torch_dcpx.store_keys import StoreKeys

__all__ = ["StoreExchange"]

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger("torch_dcpx")

# A rank that fails wakes the others; who else is about to fail is waited for so long.
_GATHER_S = 0.5
_LINGER_S = 2.0  # of a coordinator whose operation failed
_MAX_PHASES = 64  # of lost ranks that are looked up
_OK, _ERROR = "ok", "error"


class _Own(Generic[T]):
    """What `local` gave on this rank."""

    value: T | None = None
    error: Exception | None = None


class StoreExchange(Exchange):
    """The ranks of a process group in one operation."""

    keys: StoreKeys

    def __init__(
        self, client: StoreClient, rank: int, world_size: int, timeout_s: float, what: str
    ) -> None:
        """Takes the operation's number; `enter` comes next.

        Args:
            client: of the group's store.
            rank: this process' rank in the group.
            world_size: ranks in the group.
            timeout_s: seconds until which ranks wait for each other.
            what: what is done, for messages.
        """
        number = client.next_number()  # before anything can fail: the others count on
        self.group = client.name
        self.what = what
        self.rank = rank
        self.world_size = world_size
        self.host = host_name()
        self.deadline = Deadline(timeout_s)
        self.phase = "planning"
        who = f"{what} on rank {rank} ({self.host})"
        self.keys = StoreKeys(client, f"dcpx/{number}/", who, world_size)
        self._token = uuid.uuid4().hex
        self._steps = 0  # begun
        self._is_in_step = False
        self._has_contributed = False
        self._error: BaseException | None = None  # with which this operation has ended
        self._is_closed = False

    def enter(self) -> None:
        """Says that this rank is there.

        Raises:
            StoreLostError: the store does not answer, or holds this number already.
        """
        mine = self._phase_value()
        if self.keys.claim(f"p/{self.rank}", mine, self.deadline) != mine:
            raise StoreLostError(
                f"{self.what} on rank {self.rank} ({self.host}): the process group's store holds "
                "this operation already: left by an earlier group of the same name; the next "
                "operation works"
            )

    def note_phase(self, phase: str) -> None:
        self.phase = phase
        self.keys.post(f"p/{self.rank}", self._phase_value())

    def all_reduce(self, step: str, local: Callable[[], T], reduce: Callable[[list[T]], R]) -> R:
        prefix = str(self._steps)

        def answer(values: list[T]) -> R:
            result = reduce(values)
            self.keys.set(f"{prefix}/b/0", pickle.dumps(result), self.deadline)
            return result

        def receive() -> R:
            result: R = from_rank(self._read(f"{prefix}/b/0"))
            return result

        return self._agree(step, local, answer, receive)

    def reduce_scatter(
        self, step: str, local: Callable[[], T], reduce: Callable[[list[T]], list[R]]
    ) -> R:
        prefix = str(self._steps)

        def answer(values: list[T]) -> R:
            pieces = reduce(values)
            check_pieces(step, len(pieces), self.world_size)
            others = ((f"{prefix}/s/{r}", pickle.dumps(pieces[r])) for r in self._followers())
            self.keys.set_all(others, self.deadline)
            return pieces[0]

        def receive() -> R:
            key = f"{prefix}/s/{self.rank}"
            piece: R = from_rank(self._read(key))
            self.keys.post_delete([key])
            return piece

        return self._agree(step, local, answer, receive)

    def fail(self, error: BaseException) -> None:
        if self._is_closed or self._error is not None:
            return
        failure = self.failure_of(error)
        self._error = error_of([failure], error)
        soon = Deadline(0)
        try:
            # The others may have got past the step that this rank has left.
            if self._is_in_step:
                self._tell(str(self._steps - 1), failure, soon)
                if not self._has_contributed:
                    self._count(str(self._steps - 1), soon)
                if self.is_coordinator:  # all may be waiting for its answer
                    self.propose(str(self._steps - 1), _ERROR, [failure], soon)
            self._tell(str(self._steps), failure, soon)
            self._count(str(self._steps), soon)
            self.propose(BALLOT, _ERROR, [failure], soon)
            self.keys.set(f"{BALLOT}/wake", b"fail", soon)
        except StoreLostError as lost:
            logger.warning("%s; the other ranks are not told of: %s", lost, failure.text)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        soon = Deadline(0)
        try:
            self.keys.delete([f"p/{self.rank}"], soon)
            if self.is_coordinator and self._error is not None:
                self._linger(self._error)
            if self.keys.add("out", 1, soon) == self.world_size:
                self._delete_all(soon)
        except StoreLostError as lost:
            logger.debug("keys are left in the store: %s", lost)

    def _linger(self, error: BaseException) -> None:
        """Stays until the others have read the error: the store may end with this process."""
        lost = error.ranks if isinstance(error, RankLostError) else None
        others = self.world_size - 1 - len(lost or ())
        lingering, soon = Deadline(_LINGER_S), Deadline(0)
        while self.keys.add("out", 0, soon) < others and not lingering.has_passed:
            time.sleep(0.005)

    # ---- For the vote, too ---------------------------------------------------------------------

    def propose(self, name: str, kind: str, failures: list[RankFailure], by: Deadline) -> str:
        body = f"{name}/b/{self.rank}"
        if failures:
            self.keys.set(body, pickle.dumps(failures), by)
        mine = f"{kind} {self.rank}"
        stands = self.keys.claim(f"{name}/a", mine.encode(), by).decode()
        if failures and stands != mine:
            self.keys.post_delete([body])
        return stands

    def error_in(self, name: str, answer: str, own: BaseException | None) -> BaseException:
        rank = int(answer.split()[1])
        failures: list[RankFailure] = from_rank(self._read(f"{name}/b/{rank}"))
        is_own = min(failure.rank for failure in failures) == self.rank
        return error_of(failures, own if is_own else None)

    def lost_error(self, ranks: Iterable[int], waited_s: float, step: str) -> RankFailure:
        lost: list[tuple[int, str, str]] = []
        soon = Deadline(0)
        for rank in ranks:
            found = self.keys.get(f"p/{rank}", soon) if len(lost) < _MAX_PHASES else b"unknown\n?\n"
            phase, host, _ = (found or b"\n\n").decode().split("\n")
            lost.append((rank, host, phase))
        return self.failure_of(lost_error(lost, waited_s, f"{step} of the {self.what}"))

    def missing(self, prefix: str) -> list[int]:
        keys = [f"{prefix}/{rank}" for rank in range(self.world_size)]
        absent = self.keys.absent(keys, Deadline(0))
        return [int(key.rsplit("/", 1)[1]) for key in absent]

    def note_failure(self, error: BaseException) -> None:
        self._error = self._error or error

    # ---- A step --------------------------------------------------------------------------------

    def _agree(
        self,
        step: str,
        local: Callable[[], T],
        answer: Callable[[list[T]], R],
        receive: Callable[[], R],
    ) -> R:
        """Makes a step. `answer` is called on the coordinator, `receive` on the others."""
        if self._error is not None:
            raise self._error
        name = str(self._steps)
        self._steps += 1
        self._is_in_step, self._has_contributed = True, False
        try:
            own = self._contribute(name, local)
            if self.is_coordinator:
                standing, result = self._coordinate(name, step, own, answer)
            else:
                standing = self._follow(name, step)
            if not self.is_coordinator:  # it has been read, or never will be
                self.keys.post_delete([f"{name}/v/{self.rank}"])
            if standing.startswith(_ERROR):
                self._error = self.error_in(name, standing, own.error)
                raise self._error
            return result if self.is_coordinator else receive()  # type: ignore[return-value]
        except BaseException as error:
            self.fail(error)  # unless all ranks know it already
            raise
        finally:
            self._is_in_step = False

    def _contribute(self, name: str, local: Callable[[], T]) -> _Own[T]:
        """Tells this rank's value, or its error."""
        own: _Own[T] = _Own()
        packed = b""
        try:
            own.value = local()
            if not self.is_coordinator:  # it keeps its own
                packed = pickle.dumps(own.value)
        except Exception as error:  # noqa: BLE001 - raised by _agree, on all ranks
            own.error = error
        self.keys.set(f"{name}/v/{self.rank}", packed, self.deadline)
        if own.error is not None:
            self._tell(name, self.failure_of(own.error), self.deadline)
        self._count(name, self.deadline)
        self._has_contributed = True
        return own

    def _coordinate(
        self, name: str, step: str, own: _Own[T], answer: Callable[[list[T]], R]
    ) -> tuple[str, R | None]:
        """Returns the answer that stands, and what `answer` returned."""
        begun = Deadline(float("inf"))
        if not self.keys.wait_for(f"{name}/wake", self.deadline):
            missing = self.missing(f"{name}/v")
            if missing:  # else the last one came this moment
                lost = self.lost_error(missing, begun.waited_s, repr(step))
                return self.propose(name, _ERROR, [lost], self.deadline), None
        failures = self._failures(name)
        if failures:
            return self.propose(name, _ERROR, failures, self.deadline), None
        packed = self.keys.multi_get([f"{name}/v/{r}" for r in self._followers()], self.deadline)
        try:
            result = answer([own.value, *map(from_rank, packed)])  # type: ignore[list-item]
        except StoreLostError:
            raise
        except Exception as error:  # noqa: BLE001 - raised by _agree, on all ranks
            own.error = error
            failure = self.failure_of(error)
            return self.propose(name, _ERROR, [failure], self.deadline), None
        return self.propose(name, _OK, [], self.deadline), result

    def _follow(self, name: str, step: str) -> str:
        """Returns the answer that stands."""
        begun = Deadline(float("inf"))
        if self.keys.wait_for(f"{name}/wake", self.deadline):
            if self.keys.get(f"{name}/wake", self.deadline) == b"fail":
                # The coordinator may be lost, or have much to do before it comes here.
                soon = Deadline(min(4 * _GATHER_S, self.deadline.remaining_s))
                is_answered = self.keys.wait_for(f"{name}/a", soon)
                failures = [] if is_answered else self._failures(name)
                if failures:
                    return self.propose(name, _ERROR, failures, self.deadline)
            self.keys.wait_for(f"{name}/a", self.deadline)
        standing = self.keys.get(f"{name}/a", self.deadline)
        if standing is not None:
            return standing.decode()
        missing = self.missing(f"{name}/v") or [0]
        lost = self.lost_error(missing, begun.waited_s, repr(step))
        return self.propose(name, _ERROR, [lost], self.deadline)

    def _failures(self, name: str) -> list[RankFailure]:
        """Returns the failures of this step; if there is one, others are waited for a moment."""
        if self.keys.add(f"{name}/nf", 0, self.deadline) == 0:
            return []
        gathering = Deadline(min(_GATHER_S, self.deadline.remaining_s))
        while self.keys.add(f"{name}/n", 0, self.deadline) < self.world_size:
            if gathering.has_passed:
                break
            time.sleep(0.01)
        return self._told(name, self.deadline)

    def _told(self, name: str, by: Deadline) -> list[RankFailure]:
        count = self.keys.add(f"{name}/nf", 0, by)
        told = (self.keys.get(f"{name}/f/{i}", by) for i in range(1, count + 1))
        return [from_rank(failure) for failure in told if failure is not None]

    def _tell(self, name: str, failure: RankFailure, by: Deadline) -> None:
        index = self.keys.add(f"{name}/nf", 1, by)
        self.keys.set(f"{name}/f/{index}", pickle.dumps(failure), by)
        self.keys.set(f"{name}/wake", b"fail", by)

    def _count(self, name: str, by: Deadline) -> None:
        if self.keys.add(f"{name}/n", 1, by) == self.world_size:
            self.keys.set(f"{name}/wake", b"full", by)

    def _followers(self) -> range:
        return range(1, self.world_size)

    def _phase_value(self) -> bytes:
        return f"{self.phase}\n{self.host}\n{self._token}".encode()

    def _read(self, key: str) -> bytes:
        value = self.keys.get(key, self.deadline)
        if value is None:
            raise StoreLostError(
                f"{self.what} on rank {self.rank} ({self.host}): the process group's store has "
                f"lost {key!r}"
            )
        return value

    def _delete_all(self, by: Deadline) -> None:
        """Removes what is left when all ranks are out."""
        names = [*map(str, range(self._steps + 1)), BALLOT]
        keys = ["out"]
        for name in names:
            keys += [f"{name}/{key}" for key in ("n", "nf", "wake", "a", "v/0", "b/0", "outcome")]
        has_failed = self._error is not None or not self.keys.absent([f"{self._steps}/wake"], by)
        for name in names if has_failed else ():
            standing = self.keys.get(f"{name}/a", by)
            if standing is not None:
                keys.append(f"{name}/b/{standing.decode().split()[1]}")
            told = self._told(name, by)
            keys += [f"{name}/f/{i}" for i in range(1, len(told) + 1)]
            for failure in told:  # these ranks did not clean up behind themselves
                keys += [f"{name}/v/{failure.rank}", f"{name}/s/{failure.rank}"]
        self.keys.delete(keys, by)
