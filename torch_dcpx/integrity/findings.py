"""The findings of `verify` and `repair`, and their two reports.

`torch_dcpx.verify` makes findings of errors and of C++'s tables, and names the items that they are
in. `torch_dcpx.repair` reports what it made, its sources, and its assumptions.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from typing import Literal

from torch_dcpx._text import counted, human_bytes, printable, with_short_names
from torch_dcpx.errors import CorruptionError, DcpxError, StorageError
from torch_dcpx.integrity.footers import RawFinding

Source = Literal["columns", "pickle", "footers"]

_MAX_NAMES = 3  # in a line of text
_MAX_LINES = 100

_NOTES = frozenset({"leftover", "padding", "unchecked"})  # all other kinds are faults


def listed(names: Sequence[str], most: int = 20) -> str:
    """Returns names in quotes, `most` of them at most."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + more


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth a note.

    Attributes:
        kind: a fault: "uncommitted" (nothing commits the files), "metadata" (a `.metadata` is
            damaged, or cannot be read), "disagreement" (its pickle and columns differ), "missing",
            "unreadable", "file" (a link, a pipe, a name that leaves the directory), "size",
            "generation" (a file of another save), "tail", "index", "table" (parts of a footer),
            "data" (bytes that fail their checksum), "item" (the file does not hold an item as the
            metadata names it), "overlap", "hole". Or a note: "leftover" (nothing names the file),
            "padding" (bytes that nobody reads), "unchecked" (bytes without a checksum).
        file: name beneath the directory.
        offset: begin of the range in the file, in bytes; None: the file as a whole.
        nbytes: length of the range; None with `offset`.
        fqns: names of the items that the range belongs to.
        expected: a checksum, size or file id as it was written, if known.
        found: the one that is there instead.
        message: all of it in words.
    """

    kind: str
    file: str
    offset: int | None
    nbytes: int | None
    fqns: tuple[str, ...]
    expected: str | None
    found: str | None
    message: str

    @property
    def is_fault(self) -> bool:
        """Whether the checkpoint is not as it was written."""
        return self.kind not in _NOTES

    def __str__(self) -> str:
        items = f" (in {listed(self.fqns, _MAX_NAMES)})" if self.fqns else ""
        return printable(with_short_names(f"{self.kind}: {self.message}{items}", self.fqns))


@dataclass(frozen=True)
class VerifyReport:
    """Lists what one `verify` has found.

    Attributes:
        path: the directory, or the file that was verified.
        findings: faults and notes, by file and offset.
        metadata_files: the files that commit the checkpoint.
        files: data files that were read.
        items: names of tensors and Python objects.
        parts: what these are stored in: whole tensors, shards and objects.
        checked_bytes: bytes that were compared with a checksum.
        metadata_s: seconds for `.metadata`, footers and their comparison.
        sum_s: seconds for reading and summing the data files.
        total_s: seconds, all in all.
        is_form_compared: whether shapes and dtypes were compared with what the files hold.
        is_named: whether names were, too: stock's data files hold none.
    """

    path: str
    findings: tuple[Finding, ...]
    metadata_files: tuple[str, ...]
    files: int
    items: int
    parts: int
    checked_bytes: int
    metadata_s: float
    sum_s: float
    total_s: float
    is_form_compared: bool
    is_named: bool = True

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are no notes."""
        return tuple(finding for finding in self.findings if finding.is_fault)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that are no faults."""
        return tuple(finding for finding in self.findings if not finding.is_fault)

    @property
    def ok(self) -> bool:
        """Whether everything is there as it was written."""
        return not self.faults

    @property
    def proved(self) -> str:
        """Says what was compared, and so is proved where there is no fault."""
        parts = []
        if self.checked_bytes:
            parts.append("bytes against recorded checksums")
        if self.is_form_compared:
            names = "names, " if self.is_named else ""
            parts.append(f"form ({names}shapes, dtypes, sizes)")
        lacking = ", no bytes" if parts and not self.checked_bytes else ""
        lacking = ", no form" if parts and not self.is_form_compared else lacking
        unchecked = [note for note in self.notes if note.kind == "unchecked"]
        if any(note.fqns and note.offset is None for note in unchecked):
            lacking += ", form not of all: see the notes"
        elif self.checked_bytes and unchecked:
            lacking += ", not all: see the notes"
        return (" and ".join(parts) or "neither bytes nor form") + lacking

    @property
    def gb_per_s(self) -> float:
        """Speed of the checksums, in 10^9 bytes a second."""
        return self.checked_bytes / self.sum_s / 1e9 if self.sum_s > 0 else 0.0

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        faults = len(self.faults)
        verdict = "is whole" if self.ok else f"has {counted(faults, 'fault')}"
        lines = [
            f"'{printable(self.path)}' {verdict}: {counted(self.parts, 'part')} in "
            f"{counted(self.files, 'file')}, "
            f"{human_bytes(self.checked_bytes)} compared with their checksums in "
            f"{self.total_s:.2f} s ({self.gb_per_s:.2f} GB/s)",
            f"  {'proved' if self.ok else 'compared'}: {self.proved}",
        ]
        shown = (*self.faults, *self.notes)[:_MAX_LINES]
        lines += [f"  {finding}" for finding in shown]
        if len(self.findings) > len(shown):
            lines.append(f"  and {len(self.findings) - len(shown)} more")
        return "\n".join(lines)


# ---- Findings of errors and of C++'s tables ------------------------------------------------------


class ItemRanges:
    """Maps a range of a file's bytes to the items that it belongs to."""

    def __init__(self, ranges: Iterable[tuple[int, int, str]]) -> None:
        """Takes (begin, end, fqn) of every item."""
        self._ranges = sorted(ranges)
        # How far an item and all before it reach: if no further than a range, they do not meet it.
        self._furthest = list(accumulate((end for _, end, _ in self._ranges), max))

    def within(self, offset: int | None, nbytes: int | None) -> tuple[str, ...]:
        """Returns the names of the items with a byte in the range, in the order of the file."""
        if offset is None or offset < 0:
            return ()
        stop = offset + max(nbytes or 0, 1)
        first = bisect_left(self._furthest, offset + 1)
        last = bisect_left(self._ranges, stop, key=itemgetter(0))
        near = self._ranges[first:last]
        return tuple(dict.fromkeys(fqn for _, end, fqn in near if end > offset))


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
    offset, nbytes = where or (None, None)
    names = tuple(fqns)
    message = with_short_names(message, (*names, file))
    return Finding(kind, file, offset, nbytes, names, expected, found, message)


def led_on(finding: Finding, way: str) -> Finding:
    """Returns a finding that says what can be done, too; `way` may say what is wrong once more."""
    way = way.rpartition(f"{finding.message}; ")[2]
    return replace(finding, message=f"{finding.message}; {way}") if way else finding


def of_raw(raw: RawFinding, name: str, items: ItemRanges | None) -> Finding:
    """Returns a finding of C++'s."""
    return file_finding(
        raw.kind,
        name,
        raw.message,
        where=(raw.offset, raw.nbytes) if raw.offset >= 0 else None,
        fqns=items.within(raw.offset, raw.nbytes) if items is not None else (),
        expected=raw.expected or None,
        found=raw.found or None,
    )


def of_error(kind: str, error: DcpxError, name: str, fqns: Iterable[str] = ()) -> Finding:
    """Returns the finding for an error of file `name`."""
    offset = nbytes = expected = found = None
    if isinstance(error, (CorruptionError, StorageError)):
        offset, nbytes = error.offset, error.nbytes
    if isinstance(error, CorruptionError):
        expected, found = error.expected, error.found
        fqns = (error.fqn,) if error.fqn else fqns
    elif isinstance(error, StorageError) and error.errno:
        found = os.strerror(error.errno)
    return Finding(kind, name, offset, nbytes, tuple(fqns), expected, found, str(error))


@dataclass(frozen=True)
class RepairedMetadata:
    """One file of metadata that was made anew.

    Attributes:
        name: `.metadata`, or `__{rank}.metadata`.
        source: the "columns" or the "pickle" of the damaged file, which name the data files of the
            save, or the "footers" of the data files alone.
        save_id: the save's own, if whole columns or footers hold it; else a new one.
        files: the data files that it names.
        items: names of tensors and Python objects.
        parts: what these are stored in: whole tensors, shards and objects.
        assumed: conditions that nothing in the directory could prove.
    """

    name: str
    source: Source
    save_id: str
    files: tuple[str, ...]
    items: int
    parts: int
    assumed: tuple[str, ...]


@dataclass(frozen=True)
class RepairReport:
    """Lists what one `repair` has done, or with `dry_run` would do.

    Attributes:
        path: the directory.
        repaired: each file of metadata that was made anew.
        is_dry_run: nothing was written.
    """

    path: str
    repaired: tuple[RepairedMetadata, ...]
    is_dry_run: bool

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The `assumed` of all files of metadata, each once."""
        return tuple(dict.fromkeys(text for one in self.repaired for text in one.assumed))

    def __str__(self) -> str:
        verb, path = "would make" if self.is_dry_run else "made", printable(self.path)
        lines = []
        for one in self.repaired:
            held = f"{counted(one.parts, 'part')} in {counted(len(one.files), 'file')}"
            lines.append(f"{verb} '{one.name}' in '{path}' of the {one.source}: {held}")
            lines += [f"  assumed: {text}" for text in one.assumed]
        return "\n".join(lines)
