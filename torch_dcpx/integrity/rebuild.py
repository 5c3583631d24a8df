"""A Metadata out of the footers of data files, as far as they prove that it is one checkpoint's.

A footer knows its file's items (names, shapes, chunks, properties and paths) and its save, unless
an older version wrote it. It does not know the other files of that save. So one file per rank and
number must be there, all named in one way, none damaged, and together they must hold every element
of every tensor once. If not, each check here raises RepairError.

In each, `facts` are those of whole footers, `path` is the metadata to be made, for errors, and
`is_chosen` says that the caller named the files, and vouches for what nothing here can prove.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx._compat import DTYPES, LAYOUTS
from torch_dcpx.errors import RepairError
from torch_dcpx.integrity.compare import coverage_offences
from torch_dcpx.integrity.findings import listed
from torch_dcpx.integrity.footers import BYTES, TORCH_TENSOR, FileFacts, FooterRow, key_path
from torch_dcpx.metadata.stock_classes import MEMORY_FORMATS
from torch_dcpx.storage.names import data_file_parts

_WAY_OUT = (
    "move the files of other saves out of the directory, or name those of this one: "
    "`dcpx repair` with --file, repair(..., files=[...])"
)


def data_file_rank(name: str) -> int | None:
    """Returns the rank in a data file's name, or None."""
    parts = data_file_parts(name)
    return None if parts is None else parts[0]


def names_its_file(name: str) -> bool:
    """Returns whether a data file's name holds a file id: then no other save has that name."""
    parts = data_file_parts(name)
    return parts is not None and parts[2] is not None


def one_save(facts: Sequence[FileFacts], path: str, *, is_chosen: bool) -> tuple[bytes, list[str]]:
    """Checks that footers name one save at most; returns its id (b"": none does), assumptions."""
    by_save: dict[bytes, list[str]] = {}
    for one in facts:
        by_save.setdefault(one.tail.save_id if one.tail is not None else b"", []).append(one.name)
    silent = by_save.pop(b"", [])
    if len(by_save) > 1:
        named = "; ".join(f"of {save_id.hex()}: {listed(own)}" for save_id, own in by_save.items())
        _refuse_mix(path, f"the files are of {len(by_save)} saves ({named})", facts)
    save_id = next(iter(by_save), b"")
    if not silent or len(facts) == 1:
        return save_id, []
    if not save_id:
        return b"", ["all files are of one save: none of their footers says of which"]
    if not is_chosen:
        why = f"the footers of {listed(silent)} do not say of which save they are, the others are "
        _refuse_mix(path, f"{why}of {save_id.hex()}", facts)
    of_which = f"of {save_id.hex()}, as the others are: their footers do not say of which"
    return save_id, [f"these files are {of_which}: {listed(silent)}"]


def one_generation(facts: Sequence[FileFacts], path: str, *, is_chosen: bool) -> None:
    """Checks by names and footers that files are those of one save."""
    by_place: dict[tuple[int, int], list[FileFacts]] = {}
    plain: list[FileFacts] = []
    own: list[FileFacts] = []
    for one in facts:
        parts = data_file_parts(one.name)
        if parts is None or one.tail is None:
            _refuse(path, f"'{one.name}' is no name of a data file of ours", [one.name])
        rank, number, digits = parts
        if digits is not None and digits != one.tail.file_id.hex()[:12]:
            why = f"'{one.name}' holds file {one.tail.file_id.hex()}: it was renamed"
            _refuse(path, why, [one.name])
        if one.tail.rank != rank and not is_chosen:
            why = f"'{one.name}' was written by rank {one.tail.rank}: it was renamed"
            _refuse_mix(path, why, [one])
        by_place.setdefault((rank, number), []).append(one)
        (plain if digits is None else own).append(one)
    for (rank, number), found in sorted(by_place.items()):
        if len(found) > 1:
            why = f"{len(found)} files may be file {number} of rank {rank}: of several saves"
            _refuse_mix(path, why, found)
    if is_chosen:
        return
    if plain and own:
        why = "files with and without an id in their names are of several saves, or may be"
        _refuse_mix(path, why, [*plain, *own])
    for rank, places in groupby(sorted(by_place), key=itemgetter(0)):
        numbers = [number for _, number in places]
        if numbers != list(range(len(numbers))):
            why = f"rank {rank} has files {numbers}: one between them is lost, or may be"
            _refuse_mix(path, why, facts)


def check_ranks(facts: Iterable[FileFacts], path: str) -> None:
    """Checks that no rank between others, or before them, lacks a file."""
    ranks = sorted({data_file_rank(one.name) or 0 for one in facts})
    if ranks != list(range(len(ranks))):
        why = f"there are files of the ranks {ranks}: those of others are lost, or may be"
        _refuse_mix(path, why, facts)


def metadata_of(facts: Sequence[FileFacts], path: str, *, is_whole: bool) -> Metadata:
    """Returns the metadata of all files of a save, whose items must not contradict each other.

    `is_whole`, of a checkpoint of all ranks: every tensor must be there as a whole.
    """
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for one in sorted(facts, key=lambda one: (data_file_rank(one.name) or 0, one.name)):
        for row in one.rows or ():
            index = _add_entry(entries, row, path, one.name)
            if index in storage:
                names = [storage[index].relative_path, one.name]
                _refuse(path, f"'{row.fqn}' at offset {index.offset} is there twice", names)
            storage[index] = _StorageInfo(one.name, row.item_offset, row.item_bytes)
            try:
                keys = key_path(row)
            except ValueError as error:
                _refuse(path, f"the path of '{row.fqn}': {error}", [one.name])
            if keys is not None:
                paths[row.fqn] = keys
    if is_whole:
        for fqn, _, text in coverage_offences(entries):
            files = {info.relative_path for index, info in storage.items() if index.fqn == fqn}
            why = f"the files do not hold all of '{fqn}' once, so not all of the save is there"
            _refuse(path, f"{why}: {text}", sorted(files))
    return Metadata(entries, paths or None, storage, None, CURRENT_DCP_VERSION)


def _add_entry(entries: dict[str, Any], row: FooterRow, path: str, name: str) -> MetadataIndex:
    """Adds a row to `entries`; returns its index."""
    before = entries.get(row.fqn)
    if row.kind == BYTES:
        if before is not None:
            _refuse(path, f"'{row.fqn}' is there twice", [name])
        entries[row.fqn] = BytesStorageMetadata()
        return MetadataIndex(row.fqn)
    if row.kind == TORCH_TENSOR and not row.sizes:
        why = f"the footer names no shape of '{row.fqn}': an older torch-dcpx wrote it, or it has "
        _refuse(path, why + "no dimensions", [name])
    size = torch.Size(row.global_sizes)
    properties = _properties(row, path, name)
    if before is None:
        before = entries[row.fqn] = TensorStorageMetadata(properties, size, [])
    shape = (before.properties, before.size) if isinstance(before, TensorStorageMetadata) else ()
    if shape != (properties, size):
        _refuse(path, f"'{row.fqn}' is there with different shapes or properties", [name])
    before.chunks.append(ChunkStorageMetadata(torch.Size(row.offsets), torch.Size(row.sizes)))
    return MetadataIndex(row.fqn, before.chunks[-1].offsets, len(before.chunks) - 1)


def _properties(row: FooterRow, path: str, name: str) -> TensorProperties:
    has_format = row.memory_format < len(MEMORY_FORMATS)
    if row.prop_dtype not in DTYPES or row.layout not in LAYOUTS or not has_format:
        why = f"'{row.fqn}' is a {row.layout} tensor of {row.prop_dtype}, which this torch lacks"
        _refuse(path, why, [name])
    return TensorProperties(
        DTYPES[row.prop_dtype],
        LAYOUTS[row.layout],
        bool(row.flags & 1),
        MEMORY_FORMATS[row.memory_format],
        bool(row.flags & 2),
    )


def _refuse(path: str, why: str, candidates: Iterable[str]) -> NoReturn:
    names = tuple(candidates)
    message = f"repair '{path}': {why} (files: {listed(names)})"
    raise RepairError(message, path=path, candidates=names)


def _refuse_mix(path: str, why: str, facts: Iterable[FileFacts]) -> NoReturn:
    """Refuses files that may be of several saves."""
    _refuse(path, f"{why}; {_WAY_OUT}", [one.name for one in facts])
