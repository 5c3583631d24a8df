"""`dcpx inspect`: what the metadata of a checkpoint says, no data read, nothing executed."""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from torch_dcpx.cli.output import FINE, UNSOUND, human_bytes, put_json, put_lines, put_table
from torch_dcpx.errors import NotCommittedError
from torch_dcpx.integrity.contents import commits_among, read_commit, wanted_sizes
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.names import METADATA_NAME, is_data_file_name
from torch_dcpx.storage.reader_lock import being_read


class Chunk(NamedTuple):
    """A stored piece of a tensor, or a Python object."""

    offsets: tuple[int, ...]  # elements, in the tensor
    sizes: tuple[int, ...]
    file: str
    offset: int  # bytes, in the file
    nbytes: int  # in the file, framing included


class Item(NamedTuple):
    """One name of a checkpoint."""

    fqn: str
    kind: str  # "tensor" or "object"
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int  # stored, framing included
    chunks: tuple[Chunk, ...]


class FileSize(NamedTuple):
    """Bytes of one data file."""

    found: int | None  # None: there is no such regular file
    wanted: int
    is_exact: bool  # else it may be longer: stock's metadata says no more

    @property
    def is_right(self) -> bool:
        if self.found is None:
            return False
        return self.found == self.wanted if self.is_exact else self.found >= self.wanted


class Described(NamedTuple):
    """One `.metadata` and what it binds."""

    path: str
    metadata_file: str
    written_by: str  # "torch-dcpx" or "stock"
    save_id: str
    items: tuple[Item, ...]
    files: dict[str, FileSize]  # by name

    @property
    def nbytes(self) -> int:
        return sum(size.found or 0 for size in self.files.values())

    @property
    def faults(self) -> list[str]:
        """What is wrong with the files, without a look into them."""
        return [
            f"'{name}' is missing"
            if size.found is None
            else f"'{name}' has {size.found} B, {size.wanted} B were written"
            for name, size in self.files.items()
            if not size.is_right
        ]


def show(path: Path, keys: Sequence[str], *, with_chunks: bool, limit: int, as_json: bool) -> int:
    """Prints what lies at `path`. Returns the exit code."""
    found = described(path, keys)
    code = UNSOUND if any(each.faults for each in found) else FINE
    if as_json:
        put_json([_json(each, with_chunks) for each in found])
        return code
    for each in found:
        tensors = sum(item.kind == "tensor" for item in each.items)
        put_lines(
            [
                f"{Path(each.path) / each.metadata_file}: written by {each.written_by}, "
                f"save {each.save_id[:12]}",
                f"{tensors} tensors, {len(each.items) - tensors} objects, {len(each.files)} files, "
                f"{human_bytes(each.nbytes)}",
                *each.faults,
                "",
            ]
        )
        _put_items(each.items, limit, with_chunks)
    return code


def _json(found: Described, with_chunks: bool) -> dict[str, Any]:
    items = [
        {**item._asdict(), "chunks": item.chunks if with_chunks else len(item.chunks)}
        for item in found.items
    ]
    more = {"nbytes": found.nbytes, "faults": found.faults, "items": items}
    return {**found._asdict(), **more}


def _put_items(items: Sequence[Item], limit: int, with_chunks: bool) -> None:
    shown = items[:limit] if limit > 0 else items
    if with_chunks:
        put_table(
            ["name", "dtype", "offsets", "sizes", "file", "#at byte", "#bytes"],
            (
                (item.fqn, item.dtype or "object", _text(chunk.offsets), _text(chunk.sizes),
                 chunk.file, chunk.offset, chunk.nbytes)
                for item in shown
                for chunk in item.chunks
            ),
        )  # fmt: skip
    else:
        put_table(
            ["name", "dtype", "shape", "#chunks", "#bytes"],
            (
                (item.fqn, item.dtype or "object", _text(item.shape), len(item.chunks), item.nbytes)
                for item in shown
            ),
        )
    if len(shown) < len(items):
        put_lines([f"... and {len(items) - len(shown)} more (--limit 0 shows all)"])


def _text(sizes: Sequence[int] | None) -> str:
    return "" if sizes is None else str(list(sizes))


def described(path: Path, keys: Sequence[str] = ()) -> list[Described]:
    """Returns what the directory's metadata say: the global one, else each rank's own.

    Args:
        path: directory of the checkpoint.
        keys: globs of names; none: all.

    Raises:
        NotCommittedError: there is no metadata.
        CorruptionError, UnsafePickleError, UnsupportedError, StorageError: it cannot be read.
    """
    with being_read(path), Directory(path) as directory:
        names = directory.names()
        commits = commits_among(names)
        if not commits:
            left = sum(map(is_data_file_name, names))
            raise NotCommittedError(
                f"'{path}' holds no '{METADATA_NAME}'"
                + (f", but {left} data files: a save that did not end" if left else ""),
                errno=errno.ENOENT,
                path=str(path / METADATA_NAME),
            )
        return [_described(directory, path, name, keys) for name in commits]


def _described(directory: Directory, path: Path, name: str, keys: Sequence[str]) -> Described:
    found = read_commit(directory, name)
    items = tuple(item for item in _items(found.metadata) if not keys or _fits(item.fqn, keys))
    is_exact = found.files is not None
    sizes = {
        name: FileSize(_size(directory, name), nbytes, is_exact)
        for name, nbytes in sorted(wanted_sizes(found).items())
    }
    written_by = "torch-dcpx" if is_exact else "stock"
    return Described(str(path), name, written_by, found.save_id, items, sizes)


def _fits(fqn: str, keys: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(fqn, key) for key in keys)


def _size(directory: Directory, name: str) -> int | None:
    """Returns the size of a regular file that a load would open: beneath, through no link."""
    parts = name.split("/")
    if "" in parts or "." in parts or ".." in parts:
        return None
    try:
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            found = os.stat(above, dir_fd=directory.fd, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                return None
        status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
    except (OSError, ValueError):  # ValueError: NUL in a name
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _items(metadata: Metadata) -> Iterator[Item]:
    for fqn, entry in metadata.state_dict_metadata.items():
        dtype: str | None = None
        shape: tuple[int, ...] | None = None
        if isinstance(entry, TensorStorageMetadata):
            chunks = tuple(
                _chunk(metadata, MetadataIndex(fqn, chunk.offsets, at), chunk.sizes)
                for at, chunk in enumerate(entry.chunks)
            )
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            shape = tuple(entry.size)
        else:
            chunks = (_chunk(metadata, MetadataIndex(fqn), ()),)
        nbytes = sum(chunk.nbytes for chunk in chunks)
        yield Item(fqn, "object" if shape is None else "tensor", dtype, shape, nbytes, chunks)


def _chunk(metadata: Metadata, index: MetadataIndex, sizes: Sequence[int]) -> Chunk:
    place = (metadata.storage_data or {}).get(index)
    offsets = tuple(index.offset or ())
    if place is None:
        return Chunk(offsets, tuple(sizes), "", 0, 0)
    return Chunk(offsets, tuple(sizes), place.relative_path, place.offset, place.length)
