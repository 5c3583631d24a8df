"""What the ranks of one operation (a save, a load) do together."""

from __future__ import annotations

import dataclasses
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import TracebackType
from typing import Any, Protocol, TypeVar

from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import PlanError
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.failures import RankFailure

T = TypeVar("T")
R = TypeVar("R")

BALLOT = "ballot"  # the vote's keys lie beneath it, as a step's beneath its number


@cache
def host_name() -> str:
    """Returns this machine's name."""
    return socket.gethostname()


class Keys(Protocol):
    """What the vote does with the keys of an operation; see StoreKeys."""

    def set(self, key: str, value: bytes, deadline: Deadline) -> None: ...
    def get(self, key: str, deadline: Deadline) -> bytes | None: ...
    def multi_get(self, keys: Sequence[str], deadline: Deadline) -> list[bytes]: ...
    def add(self, key: str, amount: int, deadline: Deadline) -> int: ...
    def wait_for(
        self, key: str, deadline: Deadline, until: Deadline | None = None
    ) -> bytes | None: ...
    def post(self, key: str, value: bytes) -> None: ...
    def post_delete(self, keys: Sequence[str]) -> None: ...


class Exchange(ABC):
    """The ranks of one operation. Not thread-safe: its calls come from one thread, in one order.

    Every rank of the group makes the same calls. As a context manager, an exception that leaves the
    block is told to the other ranks (`fail`), and the exchange is closed.

    Attributes:
        what: what the ranks do, for messages: "save".
        rank: this process' rank in the group.
        world_size: ranks in the group.
        host: this machine's name.
        deadline: until when the ranks wait for each other.
        phase: what `note_phase` said last, "planning" at first.
        keys: of this operation, for the vote.
        group: which of this process' groups they are, by a name that other processes do not
            share; "" where this process is by itself.
        call: what all ranks must call alike; compared in the first step.
    """

    what: str
    rank: int
    world_size: int
    host: str
    deadline: Deadline
    phase: str
    keys: Keys
    group: str = ""
    call: CallId

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank 0 of the group, which reduces and commits."""
        return self.rank == 0

    def agree_on(self, **options: Any) -> None:
        """Says which options must be equal on all ranks. REQUIRES: no step has begun."""
        told = ", ".join(f"{name}={value!r:.40}" for name, value in options.items())
        self.call = dataclasses.replace(self.call, options=told)

    def leave_out_target(self) -> None:
        """Says that ranks may have different paths. REQUIRES: no step has begun."""
        self.call = dataclasses.replace(self.call, target=None)

    def restart(self, timeout_s: float | None = None) -> None:
        """Begins the deadline anew, with other seconds if they are given."""
        self.deadline = self.deadline.anew(timeout_s)

    @abstractmethod
    def note_phase(self, phase: str) -> None:
        """Says what this rank does from now on.

        Args:
            phase: "planning", "staging", "writing" or "committing"; others name it where this rank
                is lost, and its errors begin with it.
        """

    @abstractmethod
    def all_reduce(self, step: str, local: Callable[[], T], reduce: Callable[[list[T]], R]) -> R:
        """Runs `local` on each rank and `reduce` on the coordinator.

        Args:
            step: its name, the same on all ranks; in messages.
            local: this rank's value, which can be pickled.
            reduce: from the values by rank to what all ranks get, which can be pickled.

        Returns:
            What `reduce` returned, the same on every rank.

        Raises:
            DcpxError: of any rank, on all of them; of several, the lowest rank's, whose message
                names the others.
            RankError: any other error of any rank, on all of them.
            RankLostError: ranks did not come by the deadline.
            StoreLostError: the store did not answer by the deadline.
        """

    @abstractmethod
    def reduce_scatter(
        self, step: str, local: Callable[[], T], reduce: Callable[[list[T]], list[R]]
    ) -> R:
        """As `all_reduce`, but `reduce` returns one value a rank, and each rank gets its own."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tells the other ranks, at once, that this one leaves the operation with an error.

        They raise it in the step that they are in, or in their next. Never raises.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the operation for this rank, and removes what it left in the store. Never raises."""

    # ---- For the vote (torch_dcpx/ranks/ballot.py) -----------------------------------------------

    def sealed(self, value: bytes) -> bytes:
        """Returns a value that says of which operation it is."""
        return value

    def opened(self, rank: int, value: bytes) -> bytes:
        """Returns what `sealed` was given by a rank. Raises PlanError: of another operation."""
        return value

    def wait(self, key: str, deadline: Deadline, step: str, prefix: str) -> bytes | None:
        """Waits for a key, and says now and then for which ranks.

        Args:
            key: to wait for.
            deadline: until when.
            step: for the log.
            prefix: ranks without a key `prefix/RANK` are missing.

        Returns:
            Its value; None when the deadline has passed.
        """
        return self.keys.wait_for(key, deadline)

    def failure_of(self, error: BaseException, phase: str | None = None) -> RankFailure:
        """Returns what to tell the others of an error of this rank, in its phase unless given."""
        return RankFailure.of(error, self.rank, self.host, phase or self.phase)

    @abstractmethod
    def propose(self, name: str, kind: str, failures: list[RankFailure], by: Deadline) -> str:
        """Claims an answer; returns the one that stands, "KIND RANK".

        Args:
            name: of the step, or BALLOT.
            kind: the first word of this rank's answer.
            failures: what it is, if an error.
            by: the deadline.
        """

    @abstractmethod
    def error_in(self, name: str, answer: str, own: BaseException | None) -> BaseException:
        """Returns the error that an answer names.

        Args:
            name: of the step, or BALLOT.
            answer: "KIND RANK".
            own: this rank's own error, if it had one.
        """

    @abstractmethod
    def missing(self, prefix: str) -> list[int]:
        """Returns the ranks that have no key `prefix/RANK`."""

    @abstractmethod
    def lost_error(self, ranks: Iterable[int], waited_s: float, step: str) -> RankFailure:
        """Returns the failure that says which ranks did not come, and what they were last doing."""

    @abstractmethod
    def note_failure(self, error: BaseException) -> None:
        """Says that the operation has ended so, and all ranks know or will learn it."""

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close()


def check_pieces(step: str, pieces: int, world_size: int) -> None:
    """Raises PlanError unless there is one piece a rank."""
    if pieces != world_size:
        raise PlanError(f"reduce of {step!r} returned {pieces} pieces for {world_size} ranks")
