"""Shows which call each rank is at: a rank leaves a note in the operation that it enters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import PlanError
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.failures import RankFailure
from torch_dcpx.ranks.store_keys import StoreKeys

_MAX_SHOWN = 8  # ranks in one message


class Presence(NamedTuple):
    """A rank's note."""

    phase: str
    host: str
    token: str  # random, of this rank in this operation
    thread: str
    number: str  # of its call
    call: str
    identity: str  # of the call
    compared: str

    def packed(self) -> bytes:
        """Returns the note as the store holds it: less than 4 MiB, whatever the names."""
        return "\n".join(self).encode(errors="backslashreplace")


ABSENT = Presence(*[""] * 8)
UNKNOWN = ABSENT._replace(phase="unknown", host="?")


def presence_of(rank: int, keys: StoreKeys, by: Deadline) -> Presence:
    """Returns a rank's note in an operation; ABSENT if the rank has not entered it."""
    found = keys.get(f"p/{rank}", by)
    return ABSENT if found is None else Presence(*found.decode().split("\n"))


def gone_on(
    rank: int, keys: StoreKeys, following: Iterable[StoreKeys], by: Deadline
) -> Presence | None:
    """Returns a rank's note in a later operation, if it has left this one for that.

    A later operation may also be one of another thread of the rank.
    """
    found = (presence_of(rank, later, by) for later in following)
    there = next((one for one in found if one is not ABSENT), None)
    if there is None:
        return None
    here = presence_of(rank, keys, by)
    return there if here is ABSENT or here.thread == there.thread else None


def calls_of(ranks: Iterable[int], keys: StoreKeys, by: Deadline) -> tuple[str, ...]:
    """Returns the identities of the calls that ranks have made in an operation."""
    found = (presence_of(rank, keys, by) for rank in ranks)
    return tuple(sorted({one.identity for one in found if one is not ABSENT}))


def refuse(others: Sequence[tuple[int, Presence]], rank: int, own: Presence) -> PlanError:
    """Returns the error of ranks that are at other calls than `rank` is."""
    texts = [
        f"rank {other} is at call {one.number}, {one.call}"
        for other, one in [*others[:_MAX_SHOWN], (rank, own)]
    ]
    more = f"; {len(others)} ranks differ" if len(others) > _MAX_SHOWN else ""
    return PlanError(
        f"{'; '.join(texts)}{more}: every rank must make the same calls in the same order; this "
        "call has done nothing"
    )


def of_call(call: CallId, failures: Iterable[RankFailure]) -> list[RankFailure]:
    """Returns the failures that end this call; a failure without calls ends all."""
    return [one for one in failures if not one.calls or call.is_among(one.calls)]


def differing(failure: RankFailure, rank: int, own: Presence) -> PlanError:
    """Returns the error of a rank whose call meets the failure of another call."""
    return PlanError(
        f"rank {failure.rank} is at {' or '.join(failure.calls)} and fails there; rank {rank} is "
        f"at call {own.number}, {own.call}: every rank must make the same calls in the same order"
    )


def missed(call: CallId) -> PlanError:
    """Returns the error of a rank that has missed a call of the same name."""
    return PlanError(
        f"{call}: the other ranks have given up a call of the same name for want of this rank, and "
        "nothing tells whether this is that call or a later one: nothing is written, on any rank; "
        "call it again, and give each save a path of its own"
    )
