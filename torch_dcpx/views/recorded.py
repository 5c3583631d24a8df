"""Finds what a checkpoint records of its bytes: checksums of chunks, where raw bytes lie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

from torch_dcpx._answered_os import os
from torch_dcpx._native import _C
from torch_dcpx.errors import CorruptionError
from torch_dcpx.integrity.contents import Contents, open_contents, read_commit
from torch_dcpx.integrity.footers import TORCH_TENSOR, FooterRow, add_file
from torch_dcpx.integrity.verify import verify
from torch_dcpx.options import ReadOptions
from torch_dcpx.storage.names import metadata_name

_PIECE_BYTES = 1 << 20


class Sum(NamedTuple):
    """The checksum of one stored chunk, and all that its bytes depend on besides values."""

    form: tuple[Any, ...]
    numel: int
    crc: int


class _Span(NamedTuple):
    """The bytes of one chunk."""

    key: Any  # which chunk it is
    file: str
    offset: int
    nbytes: int
    crc: int | None  # None: none is recorded


class Recorded:
    """The records of one checkpoint, read when somebody asks."""

    def __init__(self, path: str | os.PathLike[str], rank: int | None) -> None:
        self._path = path
        self._rank = rank

    @cached_property
    def sums(self) -> dict[str, dict[Any, Sum]]:
        """The checksums of all chunks by name and offsets; none of stock's, nor of an export's."""
        sums: dict[str, dict[Any, Sum]] = {}
        for _, row in self._rows:
            sums.setdefault(row.fqn, {})[row.offsets] = _sum_of(row)
        return sums

    def digest(self, name: str) -> list[tuple[Any, int, bytes]] | None:
        """Returns what the stored bytes of a name are, read and compared with their checksums;
        None: they lie in no checkpoint.

        Raises: CorruptionError: they are not what was written. StorageError.
        """
        spans = self._spans.get(name)
        if spans is None:
            return None
        with open_contents(self._path) as contents:
            return sorted(
                ((span.key, span.nbytes, _digest_of(contents, span, name)) for span in spans),
                key=repr,
            )

    @cached_property
    def _rows(self) -> list[tuple[str, FooterRow]]:
        rows: list[tuple[str, FooterRow]] = []
        with open_contents(self._path) as (_, place, look, artifact):
            name = metadata_name(self._rank)
            if artifact is not None or look.size(name) is None:
                return rows
            files = read_commit(place, name).files
            job = place.verify_job(ReadOptions())
            for entry in (files or {}).values():
                facts = add_file(job, entry.path)
                if facts.tail is None or facts.tail.footer_crc != entry.footer_crc:
                    continue  # damaged, or of another save: reading says so
                rows += ((entry.path, row) for row in facts.rows or ())
        return rows

    @cached_property
    def _spans(self) -> dict[str, list[_Span]]:
        spans: dict[str, list[_Span]] = {}
        for file, row in self._rows:
            place = row.payload_offset, row.payload_bytes, row.payload_crc
            spans.setdefault(row.fqn, []).append(_Span(row.offsets, file, *place))
        return spans or self._spans_of_stock()

    def _spans_of_stock(self) -> dict[str, list[_Span]]:
        spans: dict[str, list[_Span]] = {}
        with open_contents(self._path) as (_, place, look, artifact):
            name = metadata_name(self._rank)
            if artifact is not None or look.size(name) is None:
                return spans
            stored = read_commit(place, name).metadata.storage_data
            for index, at in (stored or {}).items():
                span = _Span(
                    tuple(index.offset or ()), at.relative_path, at.offset, at.length, None
                )
                spans.setdefault(index.fqn, []).append(span)
        return spans


def check_foreign(path: str | os.PathLike[str], names: Iterable[str], options: ReadOptions) -> None:
    """Compares files of stock, or of torch.save, with the checksums in their archives, which a read
    leaves alone. Safetensors have none.

    Raises: CorruptionError: bytes of one of the names are not what was written. As `verify`.
    """
    if options.verify == "none":
        return
    wanted = set(names)
    found = verify(path, workers=options.workers, safe_globals=options.safe_globals)
    is_file = os.path.isfile(found.path)
    for fault in found.faults:
        if fault.kind == "data" and (not fault.fqns or not wanted.isdisjoint(fault.fqns)):
            raise CorruptionError(
                str(fault),
                path=found.path if is_file else f"{found.path}/{fault.file}",
                fqn=next(iter(fault.fqns), None),
                offset=fault.offset,
                nbytes=fault.nbytes,
                expected=fault.expected,
                found=fault.found,
            )


def _digest_of(contents: Contents, span: _Span, name: str) -> bytes:
    found, crc = blake2b(digest_size=16), 0
    for piece in _pieces(contents, span):
        found.update(piece)
        crc = _C.crc32(piece, crc)
    if span.crc is not None and crc != span.crc:
        path = str(contents.place.path / span.file)
        raise CorruptionError(
            f"'{name}': {span.nbytes} B at offset {span.offset} of '{path}' have the checksum "
            f"0x{crc:08x}, where 0x{span.crc:08x} is recorded",
            fqn=name,
            path=path,
            offset=span.offset,
            nbytes=span.nbytes,
            expected=f"0x{span.crc:08x}",
            found=f"0x{crc:08x}",
        )
    return found.digest()


def _pieces(contents: Contents, span: _Span) -> Iterator[bytes]:
    with contents.place.open_regular(span.file) as file:
        for at in range(0, span.nbytes, _PIECE_BYTES):
            yield file.part(span.offset + at, min(_PIECE_BYTES, span.nbytes - at))


def _sum_of(row: FooterRow) -> Sum:
    form: tuple[Any, ...] = (row.kind, row.sizes, row.strides, row.dtype, row.payload_bytes)
    if row.kind == TORCH_TENSOR:  # equal values may lie in unequal archives: these are read
        form = (*form, row.payload_crc)
    return Sum(form, math.prod(row.sizes), row.payload_crc)


def same_sums(name: str, numel: int, a: Recorded, b: Recorded) -> bool | None:
    """Returns whether the checksums of a name are equal; None: they cannot tell.

    Args:
        numel: elements of the tensor, 1 of an object.
    """
    one, two = a.sums.get(name, {}), b.sums.get(name, {})
    is_whole = bool(one) and sum(each.numel for each in one.values()) == numel
    if not is_whole or {k: v.form for k, v in one.items()} != {k: v.form for k, v in two.items()}:
        return None
    return {k: v.crc for k, v in one.items()} == {k: v.crc for k, v in two.items()}
