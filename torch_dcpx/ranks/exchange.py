"""The ranks of one operation (a save, a load), and what they do together.

`Exchange` is the operation of one process by itself: it keeps its keys in a dict, pickles nothing
and waits for nobody. `StoreExchange` (store.py) is that of a process group, by the group's store.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import socket
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

from torch_dcpx._answers import BOUND, StorageTimeout
from torch_dcpx._waiting import Clock, Deadline
from torch_dcpx.errors import PlanError, StoreLostError
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.failures import RankFailure, error_of, from_rank, lost_error
from torch_dcpx.ranks.store_keys import Keys, LocalKeys

T = TypeVar("T")
R = TypeVar("R")

BALLOT = "ballot"  # the vote's keys lie beneath it, as a step's beneath its number


@cache
def host_name() -> str:
    """Returns this machine's name."""
    return socket.gethostname()


class Exchange:
    """One process by itself. Not thread-safe, but for the vote: other calls come from one thread.

    Every rank of a group makes the same calls in the same order. As a context manager, the exchange
    tells the other ranks of an exception that leaves the block (`fail`), and closes itself. In the
    block this rank waits for storage that does not answer as long as `storage` says.

    Attributes:
        deadline: until when the ranks wait for each other.
        phase: the last of `note_phase`, "planning" at first.
        keys: of this operation, for the vote.
        call: must be equal on all ranks; compared in the first step.
        storage: how long this rank waits for storage: as for other ranks, and a bit less.
    """

    rank = 0  # of this process in the group
    world_size = 1
    group = ""  # its name, which no other group of this process shares
    keys: Keys
    _drawn = b""  # ends a proposal

    def __init__(
        self,
        timeout_s: float,
        what: str = "save",
        call: CallId | None = None,
        clock: Clock = time,
    ) -> None:
        """Begins an operation.

        Args:
            timeout_s: seconds that ranks wait for each other.
            what: the operation, for messages.
            call: its name, the same on all ranks. Default None: `what`.
            clock: by which it waits. Default: the process'.
        """
        self.what = what
        self.call = call or CallId(what)
        self.host = host_name()
        self.deadline = Deadline(timeout_s, clock)
        is_write = what in ("save", "export")
        self.storage = StorageTimeout(timeout_s, "save_timeout_s" if is_write else "load_timeout_s")
        self._bounds: list[Any] = []  # before this one's
        self.phase = "planning"
        self.place = ""  # path or URL of the checkpoint or artifact, once it is known
        self.keys = LocalKeys()
        self._proposals = itertools.count()

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank 0 of the group, which reduces and commits."""
        return self.rank == 0

    @property
    def who(self) -> str:
        """This rank in the operation, for messages: "save on rank 3 (node7)"."""
        return f"{self.what} on rank {self.rank} ({self.host})"

    def agree_on(self, **options: Any) -> None:
        """Sets the options that must be equal on all ranks. REQUIRES: no step has begun."""
        text = ", ".join(f"{name}={value!r:.40}" for name, value in options.items())
        self.call = dataclasses.replace(self.call, options=text)

    def leave_out_target(self) -> None:
        """Allows ranks different paths. REQUIRES: no step has begun."""
        self.call = dataclasses.replace(self.call, target=None)

    def restart(self, timeout_s: float | None = None) -> None:
        """Begins the deadline anew, with other seconds if they are given."""
        self.deadline = self.deadline.anew(timeout_s)
        self.storage.timeout_s = self.deadline.timeout_s

    def note_phase(self, phase: str) -> None:
        """Notes what this rank does now: "planning", "staging", "writing" or "committing".

        Its errors begin with it, and other ranks name it if this rank is lost.
        """
        self.phase = phase

    def all_reduce(self, step: str, local: Callable[[], T], reduce: Callable[[list[T]], R]) -> R:
        """Runs `local` on each rank and `reduce` on the coordinator.

        A process by itself runs both in place, and raises their errors as they are.

        Args:
            step: its name, the same on all ranks; for messages.
            local: returns this rank's value, which can be pickled.
            reduce: takes the values by rank; all ranks return its result, which can be pickled.

        Raises:
            DcpxError: of any rank, on all; of several, the lowest rank's: it names the others.
            RankError: any other error of any rank, on all.
            RankLostError: ranks did not come by the deadline.
            StoreLostError: the store did not answer by the deadline.
        """
        return reduce([local()])

    def reduce_scatter(
        self, step: str, local: Callable[[], T], reduce: Callable[[list[T]], list[R]]
    ) -> R:
        """As `all_reduce`, but `reduce` returns one value a rank, and each rank gets its own."""
        return self.checked_pieces(step, reduce([local()]))[0]

    def checked_pieces(self, step: str, pieces: list[R]) -> list[R]:
        """Returns `pieces`. Raises PlanError unless there is one for each rank."""
        if len(pieces) != self.world_size:
            raise PlanError(
                f"reduce of {step!r} returned {len(pieces)} pieces for {self.world_size} ranks"
            )
        return pieces

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks at once that this one leaves the operation with an error.

        They raise it in their current step or in the next. Never raises.
        """
        self.propose(BALLOT, "error", [self.failure_of(error)], self.deadline)

    def close(self) -> None:
        """Ends the operation for this rank, and removes its keys from the store. Never raises."""

    # ---- For the vote (torch_dcpx/ranks/ballot.py) -----------------------------------------------

    @property
    def seal(self) -> bytes:
        """The beginning of each value, which names the operation."""
        return b""

    def opened(self, rank: int, value: bytes) -> bytes:
        """Returns a rank's value without the seal. Raises PlanError if it has another one."""
        if not value.startswith(self.seal):
            raise PlanError(
                f"rank {rank} answers for another {self.what}: every rank must make the same calls "
                "in the same order"
            )
        return value[len(self.seal) :]

    def wait(self, key: str, deadline: Deadline, step: str, prefix: str) -> bytes | None:
        """Returns the value of a key once it is there; None once the deadline has passed.

        Logs now and then that `step` waits for the ranks that have no key `prefix/RANK`.
        """
        return self.keys.wait_for(key, deadline)

    def failure_of(self, error: BaseException, phase: str | None = None) -> RankFailure:
        """Returns an error of this rank as the others get it. Default for `phase`: the current."""
        calls = (self.call.identity,)
        return RankFailure.of(error, self.rank, self.host, phase or self.phase, calls)

    def propose(self, name: str, kind: str, failures: list[RankFailure], by: Deadline) -> str:
        """Claims the answer of a step, or of BALLOT; returns the one that stands.

        An answer is "KIND RANK.NUMBER TOKEN"; beside it lie its failures, if it is an error.
        """
        # A rank that is interrupted proposes again, and must not change an answer that stands.
        number = f"{self.rank}.{next(self._proposals)}"
        body = f"{name}/b/{number}"
        if failures:
            self.keys.set(body, pickle.dumps(failures), by)
        mine = f"{kind} {number} {self._drawn.hex()}"
        stands = self.keys.claim(f"{name}/a", mine.encode(), by).decode()
        if failures and stands != mine:
            self.keys.post_delete([body])
        return stands

    def standing(self, name: str, by: Deadline) -> str | None:
        """Returns the answer of a step, or of BALLOT; None until there is one."""
        found = self.keys.get(f"{name}/a", by)
        return None if found is None else found.decode()

    def proposed(self, name: str, answer: str) -> list[RankFailure]:
        """Returns the failures of an answer. Raises: as `read`."""
        failures: list[RankFailure] = from_rank(self.read(f"{name}/b/{answer.split()[1]}"))
        return failures

    def read(self, key: str) -> bytes:
        """Returns the value of a key that was set. Raises StoreLostError if it is gone."""
        value = self.keys.get(key, self.deadline)
        if value is None:
            raise StoreLostError(f"{self.who}: the process group's store has lost {key!r}")
        return value

    def error_in(self, name: str, answer: str, own: BaseException | None) -> BaseException:
        """Returns the error of an answer of `propose`; `own` is this rank's own error, if any."""
        return own if own is not None else error_of(self.proposed(name, answer))

    def missing(self, prefix: str) -> list[int]:
        """Returns the ranks that have no key `prefix/RANK`."""
        keys = [f"{prefix}/{rank}" for rank in range(self.world_size)]
        absent = self.keys.absent(keys, self.deadline)
        return [int(key.rsplit("/", 1)[1]) for key in absent]

    def lost_error(self, ranks: Iterable[int], waited_s: float, step: str) -> RankFailure:
        """Returns the failure that names lost ranks and their last phases."""
        lost = self._last_phases(ranks)
        of = f"{self.what} at '{self.place}'" if self.place else self.what
        return self.failure_of(lost_error(lost, waited_s, f"{step} of the {of}"))

    def _last_phases(self, ranks: Iterable[int]) -> list[tuple[int, str, str]]:
        return [(rank, self.host, self.phase) for rank in ranks]

    def note_failure(self, error: BaseException) -> None:
        """Notes the error of the operation: all ranks know it, or will learn it."""

    def __enter__(self) -> Exchange:
        self._bounds.append(BOUND.set(self.storage))
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        BOUND.reset(self._bounds.pop())
        if error is not None:
            self.fail(error)
        self.close()
