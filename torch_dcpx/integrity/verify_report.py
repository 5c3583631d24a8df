"""What `torch_dcpx.verify` has found."""

from __future__ import annotations

from dataclasses import dataclass

from torch_dcpx._text import printable

_MAX_NAMES = 3  # in a line of text
_MAX_LINES = 100

# A note says what is worth knowing; everything else is a fault.
NOTES = frozenset({"leftover", "padding", "unchecked"})


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth a note.

    Attributes:
        kind: what sort of thing. Faults: "uncommitted" (nothing commits what is there), "metadata"
            (a `.metadata` is damaged, or cannot be read), "disagreement" (its pickle and columns
            say different things), "missing", "unreadable", "file" (a link, a pipe, a name that
            leaves the directory), "size", "generation" (a file of another save), "tail", "index",
            "table" (parts of a footer), "data" (bytes that fail their checksum), "item" (what the
            metadata names and the file does not hold so), "overlap", "hole". Notes: "leftover"
            (nothing names the file), "padding" (bytes that nobody reads), "unchecked" (bytes
            without a checksum).
        file: name beneath the directory.
        offset: where in the file, in bytes; None: the file as a whole.
        nbytes: how many bytes; None with `offset`.
        fqns: names of the items that the range belongs to.
        expected: what was written, where that is known: a checksum, a size, a file id.
        found: what is there instead.
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
        """Whether it makes the checkpoint one that is not as it was written."""
        return self.kind not in NOTES

    def __str__(self) -> str:
        names = ", ".join(f"'{fqn}'" for fqn in self.fqns[:_MAX_NAMES])
        more = len(self.fqns) - _MAX_NAMES
        tail = f" and {more} more" if more > 0 else ""
        items = f" (in {names}{tail})" if names else ""
        return printable(f"{self.kind}: {self.message}{items}")


@dataclass(frozen=True)
class VerifyReport:
    """What one `verify` has found.

    Attributes:
        path: the directory.
        findings: faults and notes, by file and offset.
        metadata_files: the files that commit what was looked at.
        files: data files that were read.
        items: stored tensors, shards and Python objects that the metadata names.
        checked_bytes: bytes that were compared with a checksum.
        metadata_s: seconds for `.metadata`, footers and what is compared between them.
        sum_s: seconds for reading and summing the data files.
        total_s: seconds, all in all.
    """

    path: str
    findings: tuple[Finding, ...]
    metadata_files: tuple[str, ...]
    files: int
    items: int
    checked_bytes: int
    metadata_s: float
    sum_s: float
    total_s: float

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
        """Whether all that was written is there as it was written."""
        return not self.faults

    @property
    def gb_per_s(self) -> float:
        """Speed of the checksums, in 10^9 bytes a second."""
        return self.checked_bytes / self.sum_s / 1e9 if self.sum_s > 0 else 0.0

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        faults = len(self.faults)
        verdict = "is whole" if self.ok else f"has {faults} fault{'s' * (faults != 1)}"
        lines = [
            f"'{printable(self.path)}' {verdict}: {self.items} items in {self.files} files, "
            f"{self.checked_bytes} B compared with their checksums in {self.total_s:.2f} s "
            f"({self.gb_per_s:.2f} GB/s)"
        ]
        shown = (*self.faults, *self.notes)[:_MAX_LINES]
        lines += [f"  {finding}" for finding in shown]
        if len(self.findings) > len(shown):
            lines.append(f"  and {len(self.findings) - len(shown)} more")
        return "\n".join(lines)
