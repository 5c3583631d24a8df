"""`dcpx inspect`: prints the metadata of a checkpoint. Reads no data, executes nothing."""

from __future__ import annotations

import errno
import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from torch_dcpx._gc import paused_gc
from torch_dcpx._text import counted, human_bytes
from torch_dcpx.cli.inspect_page import inspect_data
from torch_dcpx.cli.output import (
    FINE,
    UNSOUND,
    put_json,
    put_lines,
    put_problem,
    put_table,
)
from torch_dcpx.cli.page import Page, put_written
from torch_dcpx.errors import NotCommittedError
from torch_dcpx.integrity.contents import (
    Contents,
    commits_among,
    least_sizes,
    open_checkpoint,
    open_contents,
    read_commit,
    wanted_sizes,
)
from torch_dcpx.reader.hints import uncommitted
from torch_dcpx.reader.pretrained_reader import PretrainedReader
from torch_dcpx.storage.names import METADATA_NAME, TORCH_SUFFIXES, Look
from torch_dcpx.storage.object_url import Location, location_of
from torch_dcpx.storage.place import Place
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
    is_exact: bool  # else a file may be longer: stock's metadata has no sizes of files

    @property
    def is_right(self) -> bool:
        return self.found is not None and (
            self.found == self.wanted if self.is_exact else self.found >= self.wanted
        )


class Described(NamedTuple):
    """One `.metadata`, with its names and files."""

    path: str
    metadata_file: str
    written_by: str  # "torch-dcpx" or "stock"; of an export its format
    save_id: str  # of an export ""
    metadata: Metadata
    fqns: list[str]  # those that were asked for
    files: dict[str, FileSize]  # by name
    writer: str  # with versions, where the metadata says them; else as `written_by`
    saved_s: float | None  # since 1970: when the metadata, or the export, was written

    def items(self, fqns: Iterable[str]) -> Iterator[Item]:
        """Yields the items of these names. Makes each now: a checkpoint may have 100,000."""
        return (_item(self.metadata, fqn) for fqn in fqns)

    @property
    def tensors(self) -> int:
        entries = self.metadata.state_dict_metadata
        return sum(isinstance(entries[fqn], TensorStorageMetadata) for fqn in self.fqns)

    @property
    def nbytes(self) -> int:
        return sum(size.found or 0 for size in self.files.values())

    @property
    def faults(self) -> list[str]:
        """Returns the missing files, and those of wrong sizes."""
        return [
            f"'{name}' is missing"
            if size.found is None
            else f"'{name}' has {size.found} B, {size.wanted} B were written"
            for name, size in self.files.items()
            if not size.is_right
        ]


@paused_gc()
def show(
    path: Location,
    keys: Sequence[str],
    *,
    with_chunks: bool,
    limit: int,
    as_json: bool,
    page: Page | None,
) -> int:
    """Prints the checkpoint at `path`, and draws it on `page`.

    Returns the exit code: globs without a name are a fault.
    """
    with being_read(path), open_contents(path) as contents:
        if contents.artifact is not None:
            found = [_described_artifact(contents, contents.artifact, keys)]
        else:
            found = described_in(contents.place, contents.look, keys)
    nothing = "" if not keys or any(each.fqns for each in found) else _no_name(path, keys)
    code = UNSOUND if nothing or any(each.faults for each in found) else FINE
    if page is not None:
        page.write("inspect", inspect_data(path, keys, found))
    if as_json:
        put_json([_json(each, with_chunks) for each in found])
    else:
        for each in found:
            _put(each, limit, with_chunks)
        put_written(page)
    if nothing:
        put_problem(nothing)
    return code


def _no_name(path: Location, keys: Sequence[str]) -> str:
    globs = " or ".join(map(repr, keys))
    return f"no name in '{path}' fits {globs}; `dcpx inspect {path}` lists all"


def _json(found: Described, with_chunks: bool) -> dict[str, Any]:
    items = [
        {**item._asdict(), "chunks": item.chunks if with_chunks else len(item.chunks)}
        for item in found.items(found.fqns)
    ]
    fields = {name: getattr(found, name) for name in ("path", "metadata_file", "written_by")}
    more = {"save_id": found.save_id, "items": items, "files": found.files}
    return {**fields, **more, "nbytes": found.nbytes, "faults": found.faults}


def _put(found: Described, limit: int, with_chunks: bool) -> None:
    name, by = location_of(found.path) / found.metadata_file, found.written_by
    origin = f"written by {by}, save {found.save_id[:12]}" if found.save_id else f"a file of {by}"
    put_lines([f"{name}: {origin}"])
    tensors, files = found.tensors, len(found.files)
    objects, size = len(found.fqns) - tensors, human_bytes(found.nbytes)
    counts = f"{counted(tensors, 'tensor')}, {counted(objects, 'object')}, {counted(files, 'file')}"
    put_lines([f"{counts}, {size}", *found.faults, ""])
    shown = found.fqns[:limit] if limit > 0 else found.fqns
    columns = ["offsets", "sizes", "file", "#at byte"] if with_chunks else ["shape", "#chunks"]
    rows: list[Sequence[Any]] = []
    for item in found.items(shown):
        values: list[Sequence[Any]] = [(_text(item.shape), len(item.chunks), item.nbytes)]
        if with_chunks:
            values = [(_text(one.offsets), _text(one.sizes), *one[2:]) for one in item.chunks]
        rows += [(item.fqn, item.dtype or "object", *each) for each in values]
    put_table(["name", "dtype", *columns, "#bytes"], rows)
    if len(shown) < len(found.fqns):
        put_lines([f"... and {len(found.fqns) - len(shown)} more (--limit 0 shows all)"])


def _text(sizes: Sequence[int] | None) -> str:
    return "" if sizes is None else str(list(sizes))


def described(path: Location) -> list[Described]:
    """Returns what `described_in` does of the checkpoint at `path`. Raises as it does."""
    with being_read(path), open_checkpoint(path) as place:
        return described_in(place, place.look())


def described_in(place: Place, look: Look, keys: Sequence[str] = ()) -> list[Described]:
    """Returns the global metadata of a place, else each rank's own; with globs, only their names.

    Raises:
        NotCommittedError: there is no metadata.
        CorruptionError, UnsafePickleError, UnsupportedError, StorageError: it cannot be read.
    """
    commits = commits_among(look.names)
    if not commits:
        raise NotCommittedError(
            uncommitted(place.path, look.names, (METADATA_NAME,)),
            errno=errno.ENOENT,
            path=str(place.path / METADATA_NAME),
        )
    return [_described(place, look, name, keys) for name in commits]


def _described(place: Place, look: Look, name: str, keys: Sequence[str]) -> Described:
    found = read_commit(place, name)
    fqns = _fitting(found.metadata.state_dict_metadata, keys)
    is_exact = found.files is not None
    sizes = {
        name: FileSize(look.size(name), nbytes, is_exact)
        for name, nbytes in sorted(wanted_sizes(found).items())
    }
    written_by = "torch-dcpx" if is_exact else "stock"
    where = str(place.path), name, written_by, found.save_id
    writer = found.writer or written_by
    return Described(*where, found.metadata, fqns, sizes, writer, look.modified_s(where[1]))


def _fitting(names: Iterable[str], keys: Sequence[str]) -> list[str]:
    """Returns the names that one of the globs fits; all where there is none."""
    if not keys:
        return list(names)
    return list(filter(re.compile("|".join(map(fnmatch.translate, keys))).match, names))


def _described_artifact(contents: Contents, name: str, keys: Sequence[str]) -> Described:
    """Returns what lies in the files of an export, whose file or index has this name."""
    reader = PretrainedReader(contents.path)
    metadata = reader.read_metadata()
    entries = metadata.state_dict_metadata
    entries |= {object_name: BytesStorageMetadata() for object_name in reader.objects}
    ends = least_sizes(metadata) or {name: 0}
    files = {one: FileSize(contents.look.size(one), end, False) for one, end in ends.items()}
    form = "torch.save" if name.endswith(TORCH_SUFFIXES) else "safetensors"
    where = str(contents.place.path), name, form, ""
    saved_s = contents.look.modified_s(name)
    return Described(*where, metadata, _fitting(entries, keys), files, form, saved_s)


def _item(metadata: Metadata, fqn: str) -> Item:
    entry = metadata.state_dict_metadata[fqn]
    if not isinstance(entry, TensorStorageMetadata):
        whole = _chunk(metadata, MetadataIndex(fqn), ())
        return Item(fqn, "object", None, None, whole.nbytes, (whole,))
    chunks = tuple(
        _chunk(metadata, MetadataIndex(fqn, chunk.offsets, at), chunk.sizes)
        for at, chunk in enumerate(entry.chunks)
    )
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return Item(fqn, "tensor", dtype, tuple(entry.size), sum(c.nbytes for c in chunks), chunks)


def _chunk(metadata: Metadata, index: MetadataIndex, sizes: Sequence[int]) -> Chunk:
    place = (metadata.storage_data or {}).get(index)
    where = ("", 0, 0) if place is None else (place.relative_path, place.offset, place.length)
    return Chunk(tuple(index.offset or ()), tuple(sizes), *where)
