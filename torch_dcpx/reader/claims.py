"""Finds the reads that may run together: their targets share no memory.

With tied weights two items go to one memory. They are read one after the other: so the later one
stays, as with stock, and no checksum is taken of memory that another read fills. Parts of one
target are disjoint by their plan.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple


class Claim(NamedTuple):
    """Memory that a read goes to."""

    begin: int
    end: int
    owner: Any  # the target; claims of one owner do not meet


def _share_memory(claims: Sequence[Claim | None]) -> bool:
    """Returns whether any two claims of different owners meet."""
    last_end, last_owner = -1, None
    for begin, end, owner in sorted(filter(None, claims), key=itemgetter(0, 1)):
        if begin >= last_end:
            last_end, last_owner = end, owner
        elif owner is not last_owner and owner != last_owner:
            return True
        else:
            last_end = max(last_end, end)
    return False


def disjoint_groups(claims: Sequence[Claim | None]) -> list[int]:
    """Cuts claims into runs without shared memory; returns the index behind each run's end.

    Args:
        claims: in their order; None for a read that goes to memory of its own.
    """
    if not _share_memory(claims):  # nearly always: one sort, and no list is inserted into
        return [len(claims)]
    ends = []
    spans: list[Claim] = []  # of the current run, disjoint and sorted
    for number, claim in enumerate(claims):
        if claim is None:
            continue
        begin, end, owner = claim
        first = after = bisect.bisect_left(spans, (begin,))
        if first and spans[first - 1].end > begin:
            first -= 1
        while after < len(spans) and spans[after].begin < end:
            after += 1
        met = spans[first:after]
        if any(other.owner != owner for other in met):
            ends.append(number)
            spans, met, first, after = [], [], 0, 0
        begin = min([begin, *(span.begin for span in met)])
        end = max([end, *(span.end for span in met)])
        spans[first:after] = [Claim(begin, end, owner)]
    return [*ends, len(claims)]
