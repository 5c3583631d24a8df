"""One `.metadata` looked at for all that is wrong with it, and what it says then.

Its parts are checked each by itself; pickle and columns, two readers' views of one checkpoint, are
compared; and the chunks of each tensor must hold every element once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_dcpx._compat import common_properties
from torch_dcpx.errors import CorruptionError, DcpxError, StorageError
from torch_dcpx.integrity.findings import file_finding, of_error
from torch_dcpx.integrity.verify_report import Finding
from torch_dcpx.metadata.file import decode_metadata, encode_pieces
from torch_dcpx.metadata.lazy import plain_metadata
from torch_dcpx.metadata.parts import decode_parts
from torch_dcpx.metadata.stock import load_stock_metadata
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.names import METADATA_NAME, FileEntry
from torch_dcpx.tensors.tiling import offence_text, untiled


class Item(NamedTuple):
    """One item as the metadata names it."""

    fqn: str
    offsets: tuple[int, ...] | None  # of the chunk; None: bytes
    offset: int  # bytes, in the file
    nbytes: int
    is_opaque: bool  # written through an extension


class StoredCheckpoint(NamedTuple):
    """What a `.metadata` says of a checkpoint."""

    name: str
    metadata: Metadata
    files: dict[str, FileEntry] | None  # None: stock wrote it
    items: dict[str, list[Item]]  # by file


def read_checkpoint(
    directory: Directory, name: str, safe_globals: Sequence[Any]
) -> tuple[StoredCheckpoint | None, list[Finding], int]:
    """Reads and checks one file of metadata.

    Returns:
        What it says (None where it cannot be read), what is wrong, and its size in bytes.
    """
    path = str(directory.path / name)
    try:
        data = directory.read_small(name)
    except StorageError as error:
        return None, [of_error("unreadable", error, name)], 0
    except CorruptionError as error:
        return None, [of_error("file", error, name)], 0
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
    return (
        StoredCheckpoint(name, metadata, checkpoint.files, items_by_file(metadata)),
        findings,
        len(data),
    )


def items_by_file(metadata: Metadata) -> dict[str, list[Item]]:
    """Returns the items that the metadata names, by file."""
    items: dict[str, list[Item]] = {}
    for index, place in metadata.storage_data.items():
        offsets = None if index.offset is None else tuple(index.offset)
        is_opaque = bool(place.transform_descriptors)
        row = Item(index.fqn, offsets, place.offset, place.length, is_opaque)
        items.setdefault(place.relative_path, []).append(row)
    return items


def _compare(
    metadata: Metadata,
    files: list[FileEntry],
    pickle: bytes,
    name: str,
    path: str,
    safe_globals: Sequence[Any],
) -> Iterator[Finding]:
    """Yields where the pickle says something else than the columns.

    What we would write of the columns is compared first: nothing of a pickle need be decoded then.
    """
    where = (0, len(pickle))
    try:
        if bytes(encode_pieces(metadata, files, "")[0]) == pickle:
            return
        stock: Any = load_stock_metadata(pickle, path, safe_globals, trusted=False)
    except DcpxError as error:
        yield file_finding("metadata", name, str(error), where=where)
        return
    if not isinstance(stock, Metadata):
        message = f"the pickle of {path!r} holds a {type(stock).__name__}, no Metadata"
        yield file_finding("metadata", name, message, where=where)
        return
    for fqn, what in disagreements(metadata, stock):
        message = f"pickle and columns of {path!r} disagree on {what}"
        yield file_finding("disagreement", name, message, where=where, fqns=(fqn and (fqn,)) or ())


def disagreements(columns: Metadata, stock: Metadata) -> Iterator[tuple[str, str]]:
    """Yields (fqn or empty, what) for all that two metadata of one checkpoint say differently."""
    for fqn in {**columns.state_dict_metadata, **stock.state_dict_metadata}:
        entries = [found.state_dict_metadata.get(fqn) for found in (columns, stock)]
        if _comparable(entries[0]) != _comparable(entries[1]):
            yield fqn, f"what '{fqn}' is"
    for index in {**columns.storage_data, **stock.storage_data}:
        if columns.storage_data.get(index) != stock.storage_data.get(index):
            yield index.fqn, f"where '{index.fqn}' at offset {index.offset} is stored"
    if columns.planner_data != stock.planner_data:
        yield "", "the names' paths (planner_data)"


def _comparable(entry: Any) -> Any:
    """Returns an entry without what the pickle of one torch has and that of another has not."""
    if not isinstance(entry, TensorStorageMetadata):
        return type(entry)
    return common_properties(entry.properties), entry.size, entry.chunks


def _check_chunks(metadata: Metadata, name: str, *, is_whole: bool) -> Iterator[Finding]:
    """Yields chunks that are stored nowhere, and tensors that their chunks do not hold once."""
    stored = {
        (index.fqn, None if index.offset is None else tuple(index.offset))
        for index in metadata.storage_data
    }
    for fqn, entry in metadata.state_dict_metadata.items():
        chunks: list[Any] = [None]
        if isinstance(entry, TensorStorageMetadata):
            chunks = [tuple(chunk.offsets) for chunk in entry.chunks]
        for chunk in chunks:
            if (fqn, chunk) not in stored:
                at = "" if chunk is None else f" at offset {list(chunk)}"
                message = f"'{name}' does not say where '{fqn}'{at} is stored"
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
