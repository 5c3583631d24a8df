"""PretrainedReader: a checkpoint, or files of safetensors or torch.save, for `load_pretrained`.

Other files become a Metadata of one chunk a tensor, and places without a frame around them: from
there on, plan and reads are those of a checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan

from torch_dcpx.errors import NotCommittedError
from torch_dcpx.metadata.lazy import sizes_of
from torch_dcpx.options import ReadOptions
from torch_dcpx.reader.generation import Generation, check_not_replaced
from torch_dcpx.reader.locate import Form, RawPlace
from torch_dcpx.reader.reader import DcpxReader
from torch_dcpx.reader.rows import stored_dtype
from torch_dcpx.reader.safetensors import (
    Safetensors,
    find_files,
    names_file,
    read_safetensors,
    refuse_link,
)
from torch_dcpx.reader.saved_parts import sizes_of_parts
from torch_dcpx.reader.torch_file import TorchFile, read_torch_file
from torch_dcpx.storage.names import METADATA_NAME, TORCH_SUFFIXES
from torch_dcpx.storage.object_url import Location, location_of
from torch_dcpx.storage.paths import absolute_text, checked_location


class PretrainedReader(DcpxReader):
    """A DcpxReader that also reads the files of safetensors or torch.save that a path means."""

    def __init__(self, path: str | os.PathLike[str], *, options: ReadOptions | None = None) -> None:
        """Reads `path`: a directory or prefix of any kind, a file of safetensors or torch.save, or
        an index.

        Raises:
            NotCommittedError, StorageError: there is nothing to read; of a prefix `read_metadata`
                says it.
            UnsupportedError: a URL other than `s3://` and `az://`.
        """
        text = checked_location(path, "mount it, and name the directory")
        location = location_of(text, getattr(options, "endpoint", None))
        found: tuple[Location, str] | None = None
        if isinstance(location, Path) or names_file(location):
            found = find_files(location)
        directory, file_name = found or (path, None)
        super().__init__(directory, options=options)
        self._file_name = file_name
        self._held: Safetensors | TorchFile | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads `.metadata`, or what the files say of their tensors. Raises: as they do."""
        location = location_of(self.path, self.options.endpoint)
        if self._file_name is None:
            refuse_link(location, METADATA_NAME)
            try:
                return super().read_metadata(*args, **kwargs)
            except NotCommittedError:
                found = find_files(location)
                if found is None:
                    raise
                self._file_name = found[1]
                self.reset()  # drops the error
        meta = StorageMeta(load_id=self.load_id)
        if self._file_name.endswith(TORCH_SUFFIXES):
            file = read_torch_file(location, self._file_name, self.options.safe_globals)
            self._held = file
            whole = ((name, *_whole(place)) for name, place in file.places.items())
            return _metadata_of(whole, meta, file.paths)
        self._held = read_safetensors(location, self._file_name)
        return _metadata_of(_parts_of(self._held), meta, None)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Opens every file that the plan needs, and notes which headers were read.

        Raises: StorageError: a file was replaced after its header was read.
        """
        plan = super().prepare_local_plan(plan)
        if self._held is None:
            return plan
        check_not_replaced(self._held.directory, self._held.files)
        return dataclasses.replace(plan, storage_data=self.generation)

    @property
    def generation(self) -> Generation | None:
        """Returns the save whose metadata was read, or the digest of headers or pickle."""
        if self._held is None:
            return super().generation
        return Generation(absolute_text(self.path), self._held.digest)

    @property
    def has_checksums(self) -> bool:
        """Whether what was read has checksums: safetensors have none."""
        return not isinstance(self._held, Safetensors)

    @property
    def objects(self) -> dict[str, Any]:
        """Returns what a file of torch.save holds besides tensors; of all else nothing."""
        return self._held.objects if isinstance(self._held, TorchFile) else {}


def shown_path(reader: DcpxReader) -> str:
    """Returns the path of what is read: the directory, or the file or index in it."""
    name = reader._file_name if isinstance(reader, PretrainedReader) else None
    return str(reader.path) if name is None else f"{reader.path}/{name}"


def stored_sizes(
    path: str | os.PathLike[str], options: ReadOptions | None = None
) -> dict[str, tuple[int, ...] | None]:
    """Returns sizes of the tensors by name, None for objects, of a checkpoint or of safetensors.

    Raises: NotCommittedError, CorruptionError, StorageError: it cannot be read.
    """
    return sizes_of(PretrainedReader(path, options=options).read_metadata().state_dict_metadata)


_Parts = tuple[str, Sequence[int], list[tuple[Sequence[int], RawPlace]]]  # name, sizes, offsets


def _parts_of(held: Safetensors) -> Iterator[_Parts]:
    """Yields each tensor's name, sizes, and the places of its parts."""
    forms: dict[tuple[str, tuple[int, ...]], Form] = {}
    for name, parts in held.tensors.items():
        places: list[tuple[Sequence[int], RawPlace]] = []
        for one in parts:
            row = one.entry
            key = row.dtype, row.sizes
            if key not in forms:
                forms[key] = Form("plain", row.sizes, _strides(row.sizes), row.dtype, "", "", False)
            place = RawPlace(one.file, one.offset, row.end - row.begin, forms[key])
            places.append((one.begin, place))
        yield name, sizes_of_parts(parts), places


def _whole(place: RawPlace) -> tuple[Sequence[int], list[tuple[Sequence[int], RawPlace]]]:
    """Returns sizes and parts of a tensor that lies in one piece."""
    return place.form.sizes, [((0,) * len(place.form.sizes), place)]


def _metadata_of(tensors: Iterable[_Parts], storage_meta: StorageMeta, paths: Any) -> Metadata:
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for name, sizes, parts in tensors:
        properties = TensorProperties(dtype=stored_dtype(parts[0][1].form, name))
        chunks = []
        for number, (begin, place) in enumerate(parts):
            offsets = torch.Size(begin)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(place.form.sizes)))
            places[MetadataIndex(name, offsets, number)] = place
        entries[name] = TensorStorageMetadata(properties, torch.Size(sizes), chunks)
    return Metadata(entries, paths, places, storage_meta)


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a tensor in C order, in elements."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
