"""Who takes part in one operation (a save, a load), and what they agree on, on the caller's thread.

DCP plans by collectives: a rank that is stopped holds all others for good, and a job on NCCL needs
device memory to plan. Here ranks agree through the process group's store, with a deadline.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any, TypeVar

from torch_dcpx.deadline import Deadline
from torch_dcpx.errors import PlanError, UnsupportedError

__all__ = ["Exchange", "LocalExchange", "exchange_for"]

T = TypeVar("T")
R = TypeVar("R")


@cache
def host_name() -> str:
    """Returns this machine's name."""
    return socket.gethostname()


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
    """

    what: str
    rank: int
    world_size: int
    host: str
    deadline: Deadline

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank 0 of the group, which reduces and commits."""
        return self.rank == 0

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


class LocalExchange(Exchange):
    """One process by itself: the callables run in place, their errors are raised as they are."""

    def __init__(self, timeout_s: float, what: str = "save") -> None:
        """Begins an operation.

        Args:
            timeout_s: seconds of its deadline, for whoever asks: nobody is waited for here.
            what: what is done, for messages.
        """
        self.what = what
        self.rank = 0
        self.world_size = 1
        self.host = host_name()
        self.deadline = Deadline(timeout_s)
        self.phase = "planning"

    def note_phase(self, phase: str) -> None:
        self.phase = phase

    def all_reduce(self, step: str, local: Callable[[], T], reduce: Callable[[list[T]], R]) -> R:
        return reduce([local()])

    def reduce_scatter(
        self, step: str, local: Callable[[], T], reduce: Callable[[list[T]], list[R]]
    ) -> R:
        pieces = reduce([local()])
        check_pieces(step, len(pieces), 1)
        return pieces[0]

    def fail(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass


def check_pieces(step: str, pieces: int, world_size: int) -> None:
    """Raises PlanError unless there is one piece a rank."""
    if pieces != world_size:
        raise PlanError(f"reduce of {step!r} returned {pieces} pieces for {world_size} ranks")


def exchange_for(
    process_group: Any, no_dist: bool, timeout_s: float, what: str = "save"
) -> Exchange:
    """Begins an operation among the ranks of a group.

    Args:
        process_group: None for the default group.
        no_dist: this process by itself, even where torch.distributed is initialised.
        timeout_s: seconds until which ranks wait for each other.
        what: what is done, for messages.

    Returns:
        A LocalExchange with `no_dist`, in a group of one, and where torch.distributed is
        unavailable or uninitialised.
    """
    import torch.distributed as dist

    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return LocalExchange(timeout_s, what)
    if dist.get_world_size(process_group) == 1:
        return LocalExchange(timeout_s, what)
    raise UnsupportedError("several ranks have no exchange yet")
