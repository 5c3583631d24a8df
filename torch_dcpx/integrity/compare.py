"""Metadata and data files of a checkpoint, compared: with themselves and with each other.

Each part of a `.metadata` is checked by itself. Pickle and columns, two readers' views of one
checkpoint, are compared. The chunks of each tensor must hold every element once. Then the size, the
footer and the items of each data file are compared with the metadata.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_dcpx._compat import common_properties, dtype_name
from torch_dcpx._native import _C
from torch_dcpx.errors import CorruptionError, DcpxError, StorageError
from torch_dcpx.integrity.findings import Finding, ItemRanges, file_finding, of_error, of_raw
from torch_dcpx.integrity.footers import BYTES, TENSOR, FileFacts, FooterRow, RawFinding, add_file
from torch_dcpx.integrity.stock_forms import compare_forms
from torch_dcpx.metadata.file import decode_metadata, encode_pieces
from torch_dcpx.metadata.lazy import plain_metadata
from torch_dcpx.metadata.parts import decode_parts
from torch_dcpx.metadata.stock import load_stock_metadata
from torch_dcpx.storage.names import METADATA_NAME, FileEntry
from torch_dcpx.storage.place import Place
from torch_dcpx.tensors.tiling import offence_text, untiled


class Item(NamedTuple):
    """One item as the metadata names it."""

    fqn: str
    offsets: tuple[int, ...] | None  # of the chunk; None: bytes
    offset: int  # bytes, in the file
    nbytes: int
    is_opaque: bool  # written through an extension

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class StoredCheckpoint(NamedTuple):
    """The content of one `.metadata`."""

    name: str
    metadata: Metadata
    files: dict[str, FileEntry] | None  # None: stock wrote it
    items: dict[str, list[Item]]  # by file


def read_checkpoint(
    directory: Place, name: str, safe_globals: Sequence[Any]
) -> tuple[StoredCheckpoint | None, list[Finding], int]:
    """Reads a file of metadata; returns its content or None, findings, and its size in bytes."""
    path = str(directory.path / name)
    try:
        data = directory.read_small(name)
    except (StorageError, CorruptionError) as error:
        kind = "file" if isinstance(error, CorruptionError) else "unreadable"
        return None, [of_error(kind, error, name)], 0
    try:
        parts = decode_parts(data, path)
        if parts.errors:
            return None, [of_error("metadata", error, name) for error in parts.errors], len(data)
        checkpoint = decode_metadata(data, path, safe_globals=safe_globals)
    except DcpxError as error:
        return None, [of_error("metadata", error, name)], len(data)
    metadata = plain_metadata(checkpoint.metadata)
    findings: list[Finding] = []
    if checkpoint.files is not None and parts.pickle is not None:
        files = list(checkpoint.files.values())
        findings += _compare(metadata, files, parts.pickle, name, path, safe_globals)
    findings += _check_chunks(metadata, name, is_whole=name == METADATA_NAME)
    stored = StoredCheckpoint(name, metadata, checkpoint.files, items_by_file(metadata))
    return stored, findings, len(data)


def items_by_file(metadata: Metadata) -> dict[str, list[Item]]:
    """Returns the items that the metadata names, by file."""
    items: dict[str, list[Item]] = {}
    for index, place in metadata.storage_data.items():
        offsets = None if index.offset is None else tuple(index.offset)
        is_opaque = bool(place.transform_descriptors)
        item = Item(index.fqn, offsets, place.offset, place.length, is_opaque)
        items.setdefault(place.relative_path, []).append(item)
    return items


def _compare(
    metadata: Metadata,
    files: list[FileEntry],
    pickle: bytes,
    name: str,
    path: str,
    safe_globals: Sequence[Any],
) -> Iterator[Finding]:
    """Yields where pickle and columns differ; decodes no pickle that a save would write of them."""
    where = (0, len(pickle))
    try:
        if bytes(encode_pieces(metadata, files, "")[0]) == pickle:
            return
        stock = load_stock_metadata(pickle, path, safe_globals)
    except DcpxError as error:
        yield file_finding("metadata", name, str(error), where=where)
        return
    for fqn, what in _disagreements(metadata, stock):
        message = f"pickle and columns of {path!r} disagree on {what}"
        yield file_finding("disagreement", name, message, where=where, fqns=[fqn] if fqn else ())


def _disagreements(columns: Metadata, stock: Metadata) -> Iterator[tuple[str, str]]:
    """Yields (fqn or empty, what) for each difference of two metadata of one checkpoint."""
    ours, theirs = columns.state_dict_metadata, stock.state_dict_metadata
    for fqn in {**ours, **theirs}:
        if _comparable(ours.get(fqn)) != _comparable(theirs.get(fqn)):
            yield fqn, f"what '{fqn}' is"
    for index in {**columns.storage_data, **stock.storage_data}:
        if columns.storage_data.get(index) != stock.storage_data.get(index):
            yield index.fqn, f"where '{index.fqn}' at offset {index.offset} is stored"
    if columns.planner_data != stock.planner_data:
        yield "", "the names' paths (planner_data)"


def _comparable(entry: Any) -> Any:
    """Returns the fields of an entry that the pickles of all torches have."""
    if not isinstance(entry, TensorStorageMetadata):
        return type(entry)
    return common_properties(entry.properties), entry.size, entry.chunks


def _check_chunks(metadata: Metadata, name: str, *, is_whole: bool) -> Iterator[Finding]:
    """Yields chunks that are stored nowhere, and tensors that their chunks do not hold once."""
    stored = {
        (index.fqn, None if index.offset is None else tuple(index.offset))
        for index in metadata.storage_data
    }
    named: set[tuple[str, Any]] = set()
    for fqn, entry in metadata.state_dict_metadata.items():
        chunks: list[Any] = [None]
        if isinstance(entry, TensorStorageMetadata):
            chunks = [tuple(chunk.offsets) for chunk in entry.chunks]
        for chunk in chunks:
            if (fqn, chunk) not in stored:
                at = "" if chunk is None else f" at offset {list(chunk)}"
                message = f"'{name}' does not say where '{fqn}'{at} is stored"
                yield file_finding("item", name, message, fqns=(fqn,))
            named.add((fqn, chunk))
    for fqn, chunk in stored - named:
        at = "" if chunk is None else f" at offset {list(chunk)}"
        message = f"'{name}' says where '{fqn}'{at} is stored, but names no such part"
        yield file_finding("item", name, message, fqns=(fqn,))
    if is_whole:
        for fqn, offence, text in coverage_offences(metadata.state_dict_metadata):
            kind = "overlap" if offence == "overlap" else "hole"
            yield file_finding(kind, name, text, fqns=(fqn,))


def coverage_offences(entries: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields (fqn, offence, text) of each tensor that its chunks do not hold exactly once."""
    fqns: list[str] = []
    tensors = []
    for fqn, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        ndim = len(entry.size)
        if any(len(c.offsets) != ndim or len(c.sizes) != ndim for c in entry.chunks):
            yield fqn, "outside", offence_text(entries, fqn, "", -1, -1, ())
            continue
        fqns.append(fqn)
        tensors.append((entry.size, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]))
    for number, offence, box, other, point in untiled(tensors):
        fqn = fqns[number]
        yield fqn, offence, offence_text(entries, fqn, offence, box, other, point)


# ---- Data files against their metadata -----------------------------------------------------------


class LookedAt(NamedTuple):
    """A data file of which everything but the checksums was compared."""

    items: ItemRanges
    findings: list[Finding]
    is_there: bool


def look_at_named(
    directory: Place, job: _C.VerifyJob, checkpoint: StoredCheckpoint, name: str
) -> LookedAt:
    """Compares one file with the metadata that names it, and adds it to the sums of `job`."""
    items = checkpoint.items.get(name, [])
    ranges = ItemRanges((item.offset, item.end, item.fqn) for item in items)
    apart, findings = _apart(items, name)
    fqns = tuple(dict.fromkeys(item.fqn for item in items))
    try:
        name.encode()
        entry = None if checkpoint.files is None else checkpoint.files.get(name)
        if entry is None and not job.has_footer(name):  # stock wrote it
            if checkpoint.files is not None:
                message = f"'{checkpoint.name}' names '{name}', which its file table lacks"
                findings.append(file_finding("disagreement", name, message))
            findings += (_empty(item, name) for item in items if not item.nbytes)
            rows = [(i.offset, i.nbytes, i.offsets is not None and not i.is_opaque) for i in apart]
            raws = map(RawFinding._make, job.add_foreign(name, rows)[1])
            findings += [of_raw(raw, name, ranges) for raw in raws]
            known = {fqn for finding in findings for fqn in finding.fqns}
            tensors = [i for i, (_, _, is_tensor) in zip(apart, rows, strict=True) if is_tensor]
            unknown = [item for item in tensors if item.fqn not in known]
            findings += compare_forms(directory, unknown, checkpoint.metadata, name)
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
    """Looks at a file by its footer alone, and adds it to the sums of `job`."""
    try:
        name.encode()
        facts = add_file(job, name)
    except (DcpxError, UnicodeEncodeError) as error:
        return None, LookedAt(ItemRanges(()), [_unusable(error, name, ())], False)
    rows = facts.rows or []
    items = [Item(row.fqn, None, row.item_offset, row.item_bytes, False) for row in rows]
    ranges = ItemRanges((item.offset, item.end, item.fqn) for item in items)
    findings = [of_raw(raw, name, ranges) for raw in facts.findings]
    return facts, LookedAt(ranges, findings + _apart(items, name)[1], True)


def _unusable(error: DcpxError | UnicodeEncodeError, name: str, fqns: Iterable[str]) -> Finding:
    """Returns the finding for a file that cannot be looked at."""
    if isinstance(error, UnicodeEncodeError):
        return file_finding("file", name, f"file name {name!r} is no text", fqns=fqns)
    if isinstance(error, CorruptionError):
        return of_error("file", error, name, fqns)
    is_missing = isinstance(error, StorageError) and error.errno in (errno.ENOENT, errno.ENOTDIR)
    return of_error("missing" if is_missing else "unreadable", error, name, fqns)


def _compare_entry(facts: FileFacts, entry: FileEntry, fqns: tuple[str, ...]) -> Iterator[Finding]:
    """Yields where a file differs from the one in the file table."""
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
    if tail is None:
        return
    if (tail.file_id, tail.footer_crc) != (entry.file_id, entry.footer_crc):
        kind, expected, found = "file id", entry.file_id.hex(), tail.file_id.hex()
        why = f"belongs to another save than the metadata: file id {found}, expected {expected}"
    elif tail.save_id and entry.save_id not in (b"", tail.save_id):
        kind, expected, found = "save id", entry.save_id.hex(), tail.save_id.hex()
        why = f"is of save {found}, the metadata that names it of save {expected}: the checkpoint "
        why += "is mixed of two saves"
    else:
        return
    yield file_finding(
        "generation",
        facts.name,
        f"'{facts.name}' {why}",
        where=(0, facts.nbytes),
        fqns=fqns,
        expected=f"{kind} {expected}",
        found=f"{kind} {found}",
    )


def _compare_rows(
    rows: list[FooterRow], items: list[Item], metadata: Metadata, name: str
) -> Iterator[Finding]:
    """Yields the items of the metadata that the file's index lacks or holds otherwise."""
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
            where, span = (item.offset, item.nbytes), f"[{item.offset}, {item.end})"
            why = f"the metadata names '{item.fqn}' at {span} of '{name}': {why}"
            yield file_finding("item", name, why, where=where, fqns=(item.fqn,))


def _empty(item: Item, name: str) -> Finding:
    """Returns the finding for an item of stock's without a byte: each is an archive."""
    message = f"the metadata says that '{item.fqn}' takes 0 B of '{name}'"
    return file_finding("item", name, message, where=(item.offset, 0), fqns=(item.fqn,))


def _apart(items: list[Item], name: str) -> tuple[list[Item], list[Finding]]:
    """Returns items that share no bytes, in the order of the file, and a finding for each other."""
    apart: list[Item] = []
    findings: list[Finding] = []
    for item in sorted(filter(attrgetter("nbytes"), items), key=attrgetter("offset", "nbytes")):
        if not apart or item.offset >= apart[-1].end:
            apart.append(item)
            continue
        where, span, before = (item.offset, item.nbytes), f"[{item.offset}, {item.end})", apart[-1]
        message = f"'{item.fqn}' at {span} of '{name}' shares bytes with '{before.fqn}'"
        fqns = (before.fqn, item.fqn)
        findings.append(file_finding("overlap", name, message, where=where, fqns=fqns))
    return apart, findings
