"""The data files of a checkpoint against what its metadata says of them."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_dcpx._compat import dtype_name
from torch_dcpx.errors import CorruptionError, DcpxError, StorageError
from torch_dcpx.integrity.compare import Item, StoredCheckpoint
from torch_dcpx.integrity.findings import Finding, ItemRanges, file_finding, of_error, of_raw
from torch_dcpx.integrity.footers import BYTES, TENSOR, FileFacts, FooterRow, RawFinding, add_file
from torch_dcpx.storage.names import FileEntry

if TYPE_CHECKING:
    from torch_dcpx._native import _C


class LookedAt(NamedTuple):
    """A data file of which everything but the checksums was compared."""

    items: ItemRanges
    findings: list[Finding]
    is_there: bool


def look_at_named(job: _C.VerifyJob, checkpoint: StoredCheckpoint, name: str) -> LookedAt:
    """Compares one file that the metadata names with it, and adds it to what `job` sums."""
    items = checkpoint.items.get(name, [])
    ranges = ItemRanges((item.offset, item.offset + item.nbytes, item.fqn) for item in items)
    findings = list(_overlaps(items, name))
    fqns = tuple(dict.fromkeys(item.fqn for item in items))
    try:
        name.encode()
        entry = None if checkpoint.files is None else checkpoint.files.get(name)
        if entry is None and not job.has_footer(name):
            if checkpoint.files is not None:
                message = f"'{checkpoint.name}' names '{name}', which its file table lacks"
                findings.append(file_finding("disagreement", name, message))
            findings += _look_at_foreign(job, name, items, ranges)
            return LookedAt(ranges, findings, True)
        facts = add_file(job, name)
    except (DcpxError, UnicodeEncodeError) as error:
        findings.append(_unusable(error, name, fqns))
        return LookedAt(ranges, findings, False)
    findings += (of_raw(raw, name, ranges) for raw in facts.findings)
    if entry is None:
        message = (
            f"'{name}' has a footer of torch-dcpx, but '{checkpoint.name}' ends with its pickle: "
            "its columns are lost; `torch_dcpx.repair` makes them anew"
        )
        findings.append(file_finding("metadata", checkpoint.name, message))
    else:
        findings += _compare_entry(facts, entry, fqns)
    if facts.rows is not None:
        findings += _compare_rows(facts.rows, items, checkpoint.metadata, name)
    return LookedAt(ranges, findings, True)


def look_at_file(job: _C.VerifyJob, name: str) -> tuple[FileFacts | None, LookedAt]:
    """Looks at a file that no metadata vouches for, and adds it to what `job` sums."""
    try:
        name.encode()
        facts = add_file(job, name)
    except (DcpxError, UnicodeEncodeError) as error:
        return None, LookedAt(ItemRanges(()), [_unusable(error, name, ())], False)
    rows = facts.rows or []
    items = [Item(row.fqn, None, row.item_offset, row.item_bytes, False) for row in rows]
    ranges = ItemRanges((item.offset, item.offset + item.nbytes, item.fqn) for item in items)
    findings = [of_raw(raw, name, ranges) for raw in facts.findings]
    return facts, LookedAt(ranges, [*findings, *_overlaps(items, name)], True)


def _unusable(error: DcpxError | UnicodeEncodeError, name: str, fqns: Iterable[str]) -> Finding:
    """Returns the finding for a file that cannot be looked at."""
    if isinstance(error, UnicodeEncodeError):
        return file_finding("file", name, f"file name {name!r} is no text", fqns=fqns)
    if isinstance(error, CorruptionError):
        return of_error("file", error, name, fqns)
    is_missing = isinstance(error, StorageError) and error.errno in (errno.ENOENT, errno.ENOTDIR)
    return of_error("missing" if is_missing else "unreadable", error, name, fqns)


def _compare_entry(facts: FileFacts, entry: FileEntry, fqns: tuple[str, ...]) -> Iterator[Finding]:
    """Yields where a file is another than the one in the file table."""
    if facts.nbytes != entry.nbytes:
        yield file_finding(
            "size",
            facts.name,
            f"'{facts.name}' has {facts.nbytes} B, the metadata says {entry.nbytes} B: truncated, "
            "or of another save",
            where=(min(facts.nbytes, entry.nbytes), abs(facts.nbytes - entry.nbytes)),
            fqns=fqns,
            expected=f"{entry.nbytes} B",
            found=f"{facts.nbytes} B",
        )
    tail = facts.tail
    if tail is not None and (tail.file_id, tail.footer_crc) != (entry.file_id, entry.footer_crc):
        yield file_finding(
            "generation",
            facts.name,
            f"'{facts.name}' belongs to another save than the metadata: file id "
            f"{tail.file_id.hex()}, expected {entry.file_id.hex()}",
            where=(0, facts.nbytes),
            fqns=fqns,
            expected=f"file id {entry.file_id.hex()}",
            found=f"file id {tail.file_id.hex()}",
        )
    elif tail is not None and tail.save_id and entry.save_id not in (b"", tail.save_id):
        yield file_finding(
            "generation",
            facts.name,
            f"'{facts.name}' is of save {tail.save_id.hex()}, the metadata that names it of save "
            f"{entry.save_id.hex()}: the checkpoint is mixed of two saves",
            where=(0, facts.nbytes),
            fqns=fqns,
            expected=f"save id {entry.save_id.hex()}",
            found=f"save id {tail.save_id.hex()}",
        )


def _compare_rows(
    rows: list[FooterRow], items: list[Item], metadata: Metadata, name: str
) -> Iterator[Finding]:
    """Yields items of the metadata that the file's index does not hold so."""
    known = {(row.item_offset, row.item_bytes, row.fqn): row for row in rows}
    chunk_sizes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    for item in items:
        row = known.get((item.offset, item.nbytes, item.fqn))
        entry = metadata.state_dict_metadata.get(item.fqn)
        why = ""
        if row is None:
            why = "the file's index does not"
        elif (row.kind == BYTES) == isinstance(entry, TensorStorageMetadata):
            why = "the file holds something else than a tensor, or the other way round"
        elif isinstance(entry, TensorStorageMetadata):
            if item.fqn not in chunk_sizes:
                chunk_sizes[item.fqn] = {tuple(c.offsets): tuple(c.sizes) for c in entry.chunks}
            offsets = item.offsets if item.offsets is not None else (0,) * len(entry.size)
            wanted = (tuple(entry.size), offsets, chunk_sizes[item.fqn].get(offsets))
            found = (row.global_sizes, row.offsets, row.sizes)
            has_shape = row.kind == TENSOR or row.sizes  # older files say none of a torch tensor
            if has_shape and wanted != found:
                why = f"the file says (shape, offsets, sizes) {found}, the metadata {wanted}"
            elif dtype_name(entry.properties.dtype) != row.prop_dtype:
                why = f"the file says {row.prop_dtype}, the metadata {entry.properties.dtype}"
        if why:
            message = (
                f"the metadata names '{item.fqn}' at [{item.offset}, {item.offset + item.nbytes}) "
                f"of '{name}': {why}"
            )
            where = (item.offset, item.nbytes)
            yield file_finding("item", name, message, where=where, fqns=(item.fqn,))


def _overlaps(items: list[Item], name: str) -> Iterator[Finding]:
    """Yields where two items share bytes."""
    _, overlapping = _apart(items)
    for item, before in overlapping:
        message = (
            f"'{item.fqn}' at [{item.offset}, {item.offset + item.nbytes}) of '{name}' shares "
            f"bytes with '{before.fqn}'"
        )
        fqns = (before.fqn, item.fqn)
        yield file_finding("overlap", name, message, where=(item.offset, item.nbytes), fqns=fqns)


def _apart(items: list[Item]) -> tuple[list[Item], list[tuple[Item, Item]]]:
    """Returns the items in the order of the file, and of those that overlap only the first; the
    others each with the one before.
    """
    apart: list[Item] = []
    overlapping: list[tuple[Item, Item]] = []
    for item in sorted(items, key=lambda item: (item.offset, item.nbytes)):
        if item.nbytes == 0:
            continue
        last = apart[-1] if apart else None
        if last is not None and item.offset < last.offset + last.nbytes:
            overlapping.append((item, last))
        else:
            apart.append(item)
    return apart, overlapping


def _look_at_foreign(
    job: _C.VerifyJob, name: str, items: list[Item], ranges: ItemRanges
) -> Iterator[Finding]:
    """Looks at the items of a file without a footer, which stock wrote."""
    rows = [
        (item.offset, item.nbytes, item.offsets is not None and not item.is_opaque)
        for item in _apart(items)[0]
    ]
    _, findings = job.add_foreign(name, rows)
    for raw in map(RawFinding._make, findings):
        yield of_raw(raw, name, ranges)
