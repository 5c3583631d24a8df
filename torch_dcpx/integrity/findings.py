"""Findings as they are made, of errors and of C++'s tables, with the items that they are in."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from torch_dcpx.errors import CorruptionError, DcpxError, StorageError
from torch_dcpx.integrity.footers import RawFinding
from torch_dcpx.integrity.verify_report import Finding


class ItemRanges:
    """Which items of a file a range of its bytes belongs to."""

    def __init__(self, ranges: Iterable[tuple[int, int, str]]) -> None:
        """Takes (begin, end, fqn) of every item."""
        self._ranges = sorted(ranges)
        # Where none reaches further than this, what lies behind cannot meet what begins here.
        self._furthest = list(accumulate((end for _, end, _ in self._ranges), max))

    def within(self, offset: int | None, nbytes: int | None) -> tuple[str, ...]:
        """Returns the names of the items with a byte in the range, in the order of the file."""
        if offset is None or offset < 0:
            return ()
        stop = offset + max(nbytes or 0, 1)
        first = bisect_left(self._furthest, offset + 1)
        names: dict[str, None] = {}
        for begin, end, fqn in self._ranges[first:]:
            if begin >= stop:
                break
            if end > offset:
                names[fqn] = None
        return tuple(names)


def file_finding(
    kind: str,
    file: str,
    message: str,
    *,
    where: tuple[int, int] | None = None,
    fqns: Iterable[str] = (),
    expected: str | None = None,
    found: str | None = None,
) -> Finding:
    """Returns a finding in a file; `where` is (offset, nbytes)."""
    offset, nbytes = where if where is not None else (None, None)
    return Finding(kind, file, offset, nbytes, tuple(fqns), expected, found, message)


def of_raw(raw: RawFinding, name: str, items: ItemRanges | None) -> Finding:
    """Returns a finding of C++'s."""
    has_range = raw.offset >= 0
    return Finding(
        raw.kind,
        name,
        raw.offset if has_range else None,
        raw.nbytes if has_range else None,
        items.within(raw.offset, raw.nbytes) if items is not None else (),
        raw.expected or None,
        raw.found or None,
        raw.message,
    )


def of_error(kind: str, error: DcpxError, name: str, fqns: Iterable[str] = ()) -> Finding:
    """Returns what an error says of file `name`."""
    offset = nbytes = None
    expected = found = None
    if isinstance(error, CorruptionError):
        offset, nbytes = error.offset, error.nbytes
        expected, found = error.expected, error.found
        fqns = (error.fqn,) if error.fqn else fqns
    elif isinstance(error, StorageError):
        offset, nbytes = error.offset, error.nbytes
        found = os.strerror(error.errno) if error.errno else None
    return Finding(kind, name, offset, nbytes, tuple(fqns), expected, found, str(error))
