"""Finds the reads that may run together: their targets share no memory.

With tied weights two items go to one memory. The later one stays, as with stock, and no checksum is
taken of memory that another read fills: so they are read one after the other. Parts of one target
are disjoint by their plan.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple


class Claim(NamedTuple):
    """Memory that a read goes to."""

    begin: int
    end: int
    owner: Any  # the target; claims of one owner do not meet


def _share_memory(claims: Sequence[Claim | None]) -> bool:
    """Returns whether any two claims of different owners meet."""
    spans = sorted((claim[0], claim[1], i) for i, claim in enumerate(claims) if claim is not None)
    last_end, last_owner = -1, None
    for begin, end, i in spans:
        if begin < last_end:
            owner = claims[i][2]  # type: ignore[index]
            if owner is not last_owner and owner != last_owner:
                return True
            last_end = max(last_end, end)
        else:
            last_end, last_owner = end, claims[i][2]  # type: ignore[index]
    return False


def disjoint_groups(claims: Sequence[Claim | None]) -> list[int]:
    """Cuts claims into runs, each of which shares no memory within itself.

    Args:
        claims: in their order; None for what goes to memory of its own.

    Returns:
        Where each run ends; the last one at the end of `claims`.
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
