"""PretrainedReader: a checkpoint, or safetensors files from anywhere, for `load_pretrained`.

Safetensors files become a Metadata of one chunk a tensor, and places without a frame around them:
from there on, plan and reads are those of a checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
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

from torch_dcpx.metadata.lazy import sizes_of
from torch_dcpx.options import ReadOptions
from torch_dcpx.reader.generation import Generation, check_not_replaced
from torch_dcpx.reader.locate import Form, RawPlace
from torch_dcpx.reader.reader import DcpxReader
from torch_dcpx.reader.rows import stored_dtype
from torch_dcpx.reader.safetensors import (
    Safetensors,
    find_safetensors,
    read_safetensors,
)


class PretrainedReader(DcpxReader):
    """A DcpxReader that also reads the safetensors files that a path means."""

    def __init__(self, path: str | os.PathLike[str], *, options: ReadOptions | None = None) -> None:
        """Reads `path`: a directory of either kind, a safetensors file, or an index of such.

        Raises:
            NotCommittedError, StorageError: there is nothing to read.
            UnsupportedError: a URL.
        """
        DcpxReader(path)  # refuses an argument that is no path before a look at the disk
        directory, file_name = find_safetensors(Path(path)) or (path, None)
        super().__init__(directory, options=options)
        self._file_name = file_name
        self._held: Safetensors | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads `.metadata`, or the headers of the safetensors files. Raises: as they do."""
        if self._file_name is None:
            return super().read_metadata(*args, **kwargs)
        self._held = read_safetensors(Path(self.path), self._file_name)
        return _metadata_of(self._held, StorageMeta(load_id=self.load_id))

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
        """Returns the save whose metadata was read, or the digest of the headers."""
        if self._held is None:
            return super().generation
        return Generation(os.path.abspath(self.path), self._held.digest)  # noqa: PTH100 - as there


def stored_sizes(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...] | None]:
    """Returns sizes of the tensors by name, None for objects, of a checkpoint or of safetensors.

    Raises: NotCommittedError, CorruptionError, StorageError: it cannot be read.
    """
    return sizes_of(PretrainedReader(path).read_metadata().state_dict_metadata)


def _metadata_of(held: Safetensors, storage_meta: StorageMeta) -> Metadata:
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    forms: dict[tuple[str, tuple[int, ...]], Form] = {}
    for name, (file, offset, row) in held.tensors.items():
        key = row.dtype, row.sizes
        if key not in forms:
            forms[key] = Form("plain", row.sizes, _strides(row.sizes), row.dtype, "", "", False)
        properties = TensorProperties(dtype=stored_dtype(forms[key], name))
        sizes, zeros = torch.Size(row.sizes), torch.Size([0] * len(row.sizes))
        chunk = ChunkStorageMetadata(zeros, sizes)
        entries[name] = TensorStorageMetadata(properties, sizes, [chunk])
        place = RawPlace(file, offset, row.end - row.begin, forms[key])
        places[MetadataIndex(name, zeros, 0)] = place
    return Metadata(entries, storage_data=places, storage_meta=storage_meta)


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a tensor in C order, in elements."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
