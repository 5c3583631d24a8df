"""Finds the items of a load plan: one call to C++ opens the files and finds all of them.

Many items share dtype, sizes and strides: these are a `Form`, which is made once. A place is the
number of a form and three integers: a plan of a hundred thousand tensors costs few objects.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torch_dcpx._compat import dtype_by_name, storage_dtypes
from torch_dcpx.errors import CorruptionError, StorageError, UnsupportedError
from torch_dcpx.metadata.lazy import StoredPlaces
from torch_dcpx.storage.names import FileEntry

if TYPE_CHECKING:
    from torch_dcpx._native import _C


_FileSpec: TypeAlias = tuple[str, bool, int, bytes, int, bytes]  # as `ReadJob.locate` takes a file


@dataclass(slots=True, eq=False)
class Form:
    """Dtype and shape that stored items share. Sizes and strides in elements."""

    kind: str  # "plain", "bytes", "torch"
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    named_dtype: str  # ours: "float32"
    storage_name: str  # foreign: "FloatStorage"
    dtype_name: str  # foreign and untyped: "float8_e4m3fn"
    is_big_endian: bool
    dtype: torch.dtype | None = field(init=False, default=None)  # None: not plain, or unknown
    run_bytes: int = field(init=False, default=0)  # of elements without gaps in C order; else 0

    def __post_init__(self) -> None:
        if self.kind == "plain" and self.named_dtype:
            self.dtype = dtype_by_name(self.named_dtype)
        elif self.kind == "plain":
            self.dtype = storage_dtypes().get((self.storage_name, self.dtype_name))
        if self.dtype is not None and not self.is_big_endian:
            numel = 1
            for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
                if size != 1 and stride != numel:
                    return
                numel *= size
            self.run_bytes = numel * self.dtype.itemsize


class RawPlace(NamedTuple):
    """The place of a tensor's bytes with no frame around them, instead of a `_StorageInfo`."""

    relative_path: str
    offset: int
    length: int
    form: Form
    transform_descriptors: None = None


class Located(NamedTuple):
    """The place of a stored item: its file (number and name), and its payload there."""

    file: int
    path: str
    form: Form
    payload_offset: int  # bytes from the start of the file
    payload_bytes: int
    storage_offset: int  # elements


class Found(NamedTuple):
    """Open files, and where in them the items of a plan lie, in the order of the plan."""

    job: _C.ReadJob
    directory: str
    items: list[ReadItem]
    entries: list[Any]  # of the metadata, by which the items were found
    files: list[int]  # the number of each item's file; in the order in which the plan names them
    names: list[str]  # of the files
    is_foreign: list[bool]  # of each file: the metadata does not vouch for it
    forms: list[Form]
    places: list[tuple[int, int, int, int]]  # form, payload_offset, payload_bytes, storage_offset

    def located(self, number: int) -> Located:
        """Returns where an item of the plan lies."""
        file = self.files[number]
        form, *place = self.places[number]
        return Located(file, self.names[file], self.forms[form], *place)

    def names_in(self, path: str, begin: int, end: int) -> list[str]:
        """Returns the names of the plan's items that have bytes in a range of a file."""
        found: dict[str, None] = {}
        for number, item in enumerate(self.items):
            _, at, nbytes, _ = self.places[number]
            if at < end and at + nbytes > begin and self.names[self.files[number]] == path:
                found[item.storage_index.fqn] = None
        return list(found)

    def serving(
        self, items: Sequence[ReadItem], directory: str, storage_data: Mapping[Any, Any]
    ) -> Found | None:
        """Returns where these items lie; None where one of them was not looked for, or was in
        another place. A planner may have changed the plan, and DCP sends it from rank to rank.
        """
        if directory != self.directory:
            return None
        found = self
        if len(items) != len(self.items) or not all(map(is_, items, self.items)):
            numbers = {item.storage_index: number for number, item in enumerate(self.items)}
            order = [numbers.get(item.storage_index, -1) for item in items]
            if -1 in order:
                return None
            found = self._replace(
                items=list(items),
                entries=[self.entries[number] for number in order],
                files=[self.files[number] for number in order],
                places=[self.places[number] for number in order],
            )
        return found if _places(items, storage_data) == found.entries else None


def locate_items(
    job: _C.ReadJob,
    items: Sequence[ReadItem],
    storage_data: Mapping[Any, Any],
    table: Mapping[str, FileEntry] | None,
    directory: str,
) -> Found:
    """Opens the files of all items, which `job` keeps, and finds each item in its file.

    Args:
        table: the data files that the metadata vouches for; None for a checkpoint of stock's.
        directory: of the checkpoint.

    Raises: CorruptionError, StorageError: no tensor was touched.
    """
    numbers: dict[str, int] = {}
    specs: list[_FileSpec] = []
    entries, files, wanted = [], [], []
    has_raws = False
    byte_io, is_foreign = LoadItemType.BYTE_IO, table is None
    for item, entry in zip(items, _places(items, storage_data), strict=True):
        index = item.storage_index
        if entry is None:
            raise CorruptionError(
                f"the metadata in '{directory}' does not say where '{index.fqn}' at offset "
                f"{index.offset} is stored",
                fqn=index.fqn,
                path=directory,
                touched=(),
            )
        number = numbers.get(entry.relative_path)
        if number is None:
            number = numbers[entry.relative_path] = len(specs)
            specs.append(_file_spec(entry.relative_path, index.fqn, table))
        # Only the bytes are looked for where extensions made an item opaque, or its form is known.
        is_raw = type(entry) is RawPlace
        has_extensions = is_foreign and getattr(entry, "transform_descriptors", None)
        is_tensor = item.type is not byte_io and not has_extensions and not is_raw
        has_raws |= is_raw
        entries.append(entry)
        files.append(number)
        wanted.append((number, entry.offset, entry.length, is_tensor))
    try:
        form_rows, places = job.locate(specs, wanted)
    except (CorruptionError, StorageError) as error:
        error.touched = ()
        if getattr(error, "fqn", None) is None and error.path is not None:
            name = os.path.relpath(error.path, directory)
            _name_item(error, name, zip(items, entries, strict=True))
        raise
    names = [os.path.join(directory, spec[0]) for spec in specs]  # noqa: PTH118 - as C++ says it
    _refuse_twins(items, wanted, names)
    forms = [Form(*row) for row in form_rows]
    if has_raws:
        _set_raw_forms(entries, forms, places)
    foreign = [not spec[1] for spec in specs]
    return Found(job, directory, list(items), entries, files, names, foreign, forms, places)


def _refuse_twins(
    items: Sequence[ReadItem], wanted: Sequence[tuple[int, int, int, bool]], names: Sequence[str]
) -> None:
    """Raises CorruptionError where two items are the same bytes, but for a tensor of two names.

    C++ has refused items that overlap otherwise.
    """
    unlike = {*wanted}
    objects = (place for place in wanted if not place[3])
    if len(unlike) == len(wanted) and not any((*place[:3], True) in unlike for place in objects):
        return
    first: dict[tuple[int, int], ReadItem] = {}
    chunks: dict[tuple[int, int, str], MetadataIndex] = {}  # of a tensor's further names
    for item, (file, offset, nbytes, _) in zip(items, wanted, strict=True):
        other = first.setdefault((file, offset), item) if nbytes else item
        if other is item:
            continue
        index, known = item.storage_index, other.storage_index
        has_object = LoadItemType.BYTE_IO in (item.type, other.type)
        if index.fqn != known.fqn and not has_object:
            known = chunks.setdefault((file, offset, index.fqn), index)
        if index != known:
            raise CorruptionError(
                f"the metadata puts '{index.fqn}' at offset {index.offset} on the {nbytes} B at "
                f"offset {offset} of '{names[file]}', which are '{known.fqn}' at offset "
                f"{known.offset}; one tensor alone may have two names",
                fqn=index.fqn,
                path=names[file],
                offset=offset,
                nbytes=nbytes,
                touched=(),
            )


def _set_raw_forms(
    entries: Sequence[Any], forms: list[Form], places: list[tuple[int, int, int, int]]
) -> None:
    """Adds the forms of raw entries to `forms`, and gives their places the numbers of these."""
    numbers: dict[int, int] = {}
    for at, entry in enumerate(entries):
        if type(entry) is RawPlace:
            number = numbers.setdefault(id(entry.form), len(forms))
            if number == len(forms):
                forms.append(entry.form)
            places[at] = (number, *places[at][1:])


def _places(items: Sequence[ReadItem], storage_data: Mapping[Any, Any]) -> list[Any]:
    """Returns the places of items by the metadata; None for each that it does not place."""
    indices = [item.storage_index for item in items]
    if isinstance(storage_data, StoredPlaces):
        return storage_data.find(indices)
    return list(map(storage_data.get, indices))


def refuse_foreign_places(
    items: Sequence[ReadItem], storage_data: Mapping[Any, Any], directory: str
) -> None:
    """Raises UnsupportedError for the first item whose place is not as a `_StorageInfo` is."""
    for item, entry in zip(items, _places(items, storage_data), strict=True):
        fields = [getattr(entry, name, None) for name in ("relative_path", "offset", "length")]
        if entry is not None and list(map(type, fields)) != [str, int, int]:
            raise UnsupportedError(
                f"load '{item.storage_index.fqn}' from '{directory}': its entry in `storage_data` "
                f"is {entry!r:.80} ({type(entry).__name__}), which does not say the file, the "
                "offset and the length as a `_StorageInfo` does; a subclass that has such "
                "entries needs a `read_data` of its own"
            )


def _file_spec(name: str, fqn: str, table: Mapping[str, FileEntry] | None) -> _FileSpec:
    """Returns the spec of a data file. Raises CorruptionError: no file system takes its name."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise CorruptionError(
            f"file name {name!r} in the metadata of '{fqn}' is no text", fqn=fqn, touched=()
        ) from error
    entry = table.get(name) if table else None
    if entry is None:
        return (name, False, 0, b"", 0, b"")
    return (name, True, entry.nbytes, entry.file_id, entry.footer_crc, entry.save_id)


def _name_item(
    error: CorruptionError | StorageError,
    file_name: str,
    stored: Iterable[tuple[ReadItem, Any]],
) -> None:
    """Adds the name of the item of the damaged file that begins at the damage, or else holds it;
    of a missing file, its first.
    """
    at = -1 if error.offset is None else error.offset
    own = [(item, entry) for item, entry in stored if entry.relative_path == file_name]
    if isinstance(error, StorageError):
        at = own[0][1].offset if own and at < 0 else at
        for item in [i for i, entry in own if entry.offset + entry.length > at][:1]:
            error.message += f" (item '{item.storage_index.fqn}')"
        return
    begin = [item for item, entry in own if entry.offset == at]
    hold = [item for item, entry in own if entry.offset <= at < entry.offset + entry.length]
    for item in (begin or hold)[:1]:
        error.fqn = item.storage_index.fqn
        error.message += f" (item '{error.fqn}')"
